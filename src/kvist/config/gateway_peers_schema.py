"""The knobs of what a gateway hears: of its replicas, and of other gateways."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvist.config.store_schema import Section


class GatewayEventsConfig(Section, frozen=True):
    """What the engines and nodes behind a gateway say that they hold."""

    enabled: Annotated[
        bool,
        Meta(
            description="Whether KV events are listened to: of replicas that name theirs "
            "(`?events=`), of engines that `kvist serve` started on this host, and of the nodes "
            "that `node.cluster.discovery` finds. Without, what the gateway sent somewhere is "
            "taken to be there."
        ),
    ] = True
    index: Annotated[
        int,
        Meta(
            ge=1024,
            le=1 << 24,
            description="Blocks that the router knows at most, about 50 bytes each; those not "
            "looked up lately are forgotten first.",
        ),
    ] = 1 << 23
    keyspace: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="Fingerprint of the replicas' keyspace, as `kvist node status` shows it, "
            "where their nodes have several. Empty: the only one that they have.",
        ),
    ] = ""
    heard_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds for which a prompt that was sent to an engine is taken to be in "
            "its cache though its events do not say so yet; up to twice as long.",
        ),
    ] = 5.0
    silent_s: Annotated[
        float,
        Meta(gt=0, description="Likewise, where an engine's events are not heard."),
    ] = 120.0


class GatewayPeersConfig(Section, frozen=True):
    """Other gateways in front of the same engines."""

    listen: Annotated[
        str,
        Meta(
            description="Where this gateway tells the others what it has sent where and what its "
            "tenants used, such as `tcp://10.0.0.1:8081`. An endpoint that others can reach needs "
            "`secret_file`. Empty: to nobody."
        ),
    ] = ""
    members: Annotated[
        str | tuple[str, ...],
        Meta(
            description="`listen` of all gateways, the same list on each (its own is left out): a "
            "list, or one text with commas."
        ),
    ] = ""
    secret_file: Annotated[
        str,
        Meta(
            description="File with a secret of 32 characters or more, the same on every gateway, "
            "of mode 0600, or `env:NAME`: what they tell is sealed with it, and nobody hears or is "
            "believed without."
        ),
    ] = ""
    every_s: Annotated[
        float,
        Meta(gt=0, le=5, description="Seconds between two reports to the others."),
    ] = 0.1
    expire_s: Annotated[
        float,
        Meta(
            gt=0,
            le=60,
            description="Seconds of silence after which another gateway, and all that it had "
            "booked, is forgotten.",
        ),
    ] = 10.0
