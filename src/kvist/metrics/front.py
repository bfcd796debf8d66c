"""What stands before engines: the router and the gateway."""

from __future__ import annotations

from kvist.metrics.kinds import Kind, Metric

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

FRONT: tuple[Metric, ...] = (
    Metric(
        "kvist_router_index_blocks",
        _G,
        "blocks",
        "Blocks that some replica is believed or predicted to have.",
    ),
    Metric("kvist_router_index_bytes", _G, "bytes", "Memory that the router's index takes."),
    Metric(
        "kvist_router_index_evicted_total",
        _C,
        "blocks",
        "Blocks that the router's index forgot because it was full.",
    ),
    Metric(
        "kvist_router_index_predicted_total",
        _C,
        "blocks",
        "Blocks that a chosen replica was predicted to have soon.",
    ),
    Metric(
        "kvist_router_index_left_out_total",
        _C,
        "blocks",
        "Blocks in engines' events that no key could be given: the parent is not known (orphan), "
        "images or an unknown adapter are in it (unnamed), the engine has another block size "
        "(block_size), it is no whole block (partial), or it keeps no whole prefix (group).",
        ("reason",),
    ),
    Metric(
        "kvist_gateway_requests_total",
        _C,
        "requests",
        "Requests that are over, by how they ended: ok, refused, invalid, failed, cancelled.",
        ("endpoint", "outcome"),
    ),
    Metric(
        "kvist_gateway_refused_total",
        _C,
        "requests",
        "Requests that were refused, by why: predicted to miss a limit (ttft, tbt) or their own "
        "deadline; queue-full and queue-time, too many wait or one did for too long; limit, of the "
        "tenant; bound, of what the gateway holds at once; no-replica, none is up; replicas, none "
        "served it; engine, one of these refused it.",
        ("reason",),
    ),
    Metric(
        "kvist_gateway_requests_in_flight", _G, "requests", "Requests that a gateway is serving."
    ),
    Metric(
        "kvist_gateway_bookings",
        _G,
        "bookings",
        "Requests that a gateway's router has in its books.",
    ),
    Metric(
        "kvist_gateway_peers",
        _G,
        "gateways",
        "Other gateways that were heard lately: their bookings count.",
    ),
    Metric("kvist_gateway_peer_words_total", _C, "words", "Words of other gateways that count."),
    Metric(
        "kvist_gateway_peer_words_refused_total",
        _C,
        "words",
        "Words of other gateways that could not be read, came late, or are beyond a limit.",
    ),
    Metric("kvist_gateway_prompt_tokens_total", _C, "tokens", "Tokens of prompts.", ("tenant",)),
    Metric("kvist_gateway_output_tokens_total", _C, "tokens", "Tokens of answers.", ("tenant",)),
    Metric(
        "kvist_gateway_hit_tokens_total",
        _C,
        "tokens",
        "Tokens of prompts that the router expected in a cache of the replica it chose.",
        ("tenant",),
    ),
    Metric(
        "kvist_gateway_broken_attempts_total",
        _C,
        "attempts",
        "Attempts at requests that a replica did not bring to an end.",
        ("replica",),
    ),
    Metric(
        "kvist_gateway_resumed_total",
        _C,
        "requests",
        "Requests that went on at another replica: sent again, continued or replayed.",
        ("way",),
    ),
    Metric(
        "kvist_gateway_splits_total",
        _C,
        "requests",
        "Choices beside prefill replicas, by where the prompt is to be computed: at the replica "
        "that answers (local) or at another (remote), and why: what is cheaper by the rule `cost`; "
        "by `length` short, long, or a queue at the prefill replica; always and never; no-prefill, "
        "none is up; undivided, the request cannot be split.",
        ("where", "reason"),
    ),
    Metric(
        "kvist_gateway_prefills_total",
        _C,
        "requests",
        "Prefills for another replica, by how they ended: ok; late, lost with their replica or "
        "refused by it, so that the prompt is computed elsewhere; cancelled with the request.",
        ("outcome",),
    ),
    Metric(
        "kvist_gateway_ttft_seconds",
        _H,
        "seconds",
        "Time from a request's head to its stream's first token, at the gateway.",
        ("endpoint",),
    ),
    Metric(
        "kvist_gateway_ttft_error_seconds",
        _H,
        "seconds",
        "How far the router's predicted TTFT was off, where it predicted one.",
        ("endpoint",),
    ),
    Metric(
        "kvist_gateway_request_seconds",
        _H,
        "seconds",
        "Time from a request's head to its answer's end, at the gateway.",
        ("endpoint",),
    ),
)
