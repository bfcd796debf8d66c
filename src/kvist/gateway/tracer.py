"""What the gateway asks of whoever traces its requests; and nobody, who does nothing."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from kvist.gateway.record import Record


class Tracer(Protocol):
    """Traces requests."""

    def request(
        self, record: Record, client: Mapping[str, str], engine: MutableMapping[str, str]
    ) -> AbstractContextManager[None]:
        """A span while the body runs, below the one that the `client` headers name.

        What engines need to go on with it is put into the `engine` headers; what the record says at
        the end becomes the span's attributes.
        """
        ...

    def close(self) -> None:
        """Sends what was not sent yet."""
        ...


class NoTracer:
    """Traces nothing; a client's `traceparent` reaches the engine as it came."""

    def request(
        self, record: Record, client: Mapping[str, str], engine: MutableMapping[str, str]
    ) -> AbstractContextManager[None]:
        """No span."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to send."""
