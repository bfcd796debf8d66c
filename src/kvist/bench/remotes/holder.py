"""Gives a Mooncake pool its memory, in a process of its own, until standard input ends.

Arguments: the master's address, that of its metadata server, and bytes. Says `held` when it has.
"""

from __future__ import annotations

import sys

from kvist.bench.remotes.plain import Mooncake


def main() -> None:
    """Holds."""
    master, metadata, size = sys.argv[1:]
    held = Mooncake(master, metadata, segment_bytes=int(size))
    print("held", flush=True)
    sys.stdin.buffer.read()
    held.close()


if __name__ == "__main__":
    main()
