"""What the policies share: walking an `OrderedDict` that shrinks, and offering victims in turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from itertools import chain, islice

from kvist.core.keys import Key

_FIRST_CHUNK = 8
_LARGEST_CHUNK = 1 << 16

Queue = OrderedDict[Key, None]


def oldest_first(queue: Queue) -> Iterator[Key]:
    """Keys from the front; the caller may remove the key it was given last, and nothing else.

    Works on copies that double, so that one victim costs O(1) and all of them O(n).
    """
    skipped, size = 0, _FIRST_CHUNK
    while chunk := list(islice(queue, skipped, skipped + size)):
        for key in chunk:
            yield key
            skipped += key in queue
        size = min(2 * size, _LARGEST_CHUNK)


def in_turn(
    choose: Callable[[], Key | None], resident: Container[Key], *rest: Queue
) -> Iterator[Key]:
    """Victims as `choose` names them while each is removed; after a skip, what `rest` holds.

    Args:
        choose: the best victim now; asked again after each removal. Until then it must give the
            same answer, though it may tidy up.
        resident: the keys that are present.
        rest: queues that hold every key once, colder queues first.
    """
    while (best := choose()) is not None:
        yield best
        if best in resident:
            for key in chain.from_iterable(oldest_first(queue) for queue in rest):
                if key != best:
                    yield key
            return
