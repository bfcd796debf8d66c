"""Which start of a node this is: a number that grows, kept in a file beside its socket."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvist.cluster.record import next_incarnation

_log = logging.getLogger(__name__)
_MOST_DIGITS = 20


def begin_incarnation(path: Path, now_ns: int) -> int:
    """The number of this start, above that of every former one; the caller holds the node's lock.

    A file that cannot be read or written is no reason not to start: the wall clock orders starts
    then, unless it was set back.
    """
    former = 0
    try:
        text = path.read_text()[:_MOST_DIGITS].strip()
        former = int(text) if text.isdecimal() else 0
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("%s cannot be read: %s", path, error)
    incarnation = next_incarnation(now_ns, former)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(f"{incarnation}\n")
        beside.replace(path)
    except OSError as error:
        _log.warning("%s cannot be written: %s", path, error)
    return incarnation
