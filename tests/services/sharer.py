"""A process with a store of its own that writes blocks to a remote, or reads them from there.

`sharer.py write|read URL FOLDER FIRST COUNT PRESENT`; with FOLDER `-` there is no SSD tier. A read
waits until it knows of PRESENT blocks. Prints how many blocks were stored, or how many were hits;
a wrong byte is an error.
"""

from __future__ import annotations

import json
import sys
import time

from kvist.assemble import open_embedded_store
from kvist.config import load_config
from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.native import digest

BLOCK_BYTES = 200_000
FINGERPRINT = digest(b"a keyspace")
WAIT_S = 30.0


def key(n: int) -> bytes:
    return digest(b"shared %d" % n)


def content(n: int) -> bytes:
    return (digest(b"bytes %d" % n) * (BLOCK_BYTES // 32 + 1))[:BLOCK_BYTES]


def main() -> None:
    action, url, folder, first, count, present = sys.argv[1:7]
    ssd = {"enabled": False} if folder == "-" else {"path": folder, "capacity": "64MiB"}
    config = load_config(
        env={},
        overrides={
            "store": {
                "dram": {"capacity": "32MiB"},
                "ssd": ssd,
                "remote": {"url": url, "probe_s": 1.0, "timeout_s": 10.0},
            }
        },
    ).config
    numbers = range(int(first), int(first) + int(count))
    store = open_embedded_store(config, block_bytes=BLOCK_BYTES, fingerprint=FINGERPRINT)
    keys = [key(n) for n in numbers]
    if action == "write":
        with store.write([BlockRef(k, None) for k in keys]) as lease:
            absent = [i for i in range(len(keys)) if not lease.present(i)]
            for i in absent:
                lease.buffer(i)[:] = content(numbers[i])
                assert lease.commit(i)
        assert store.flush(WAIT_S)
        answer = {"stored": len(absent)}
    else:
        give_up_s = time.monotonic() + WAIT_S
        while len(match := store.match(keys)) < int(present):
            assert time.monotonic() < give_up_s, f"{len(match)} blocks were matched"
            time.sleep(0.1)
        with store.read(keys[: len(match)], deadline_s=WAIT_S) as lease:
            hits = [i for i in range(len(match)) if lease.wait(i) is Outcome.HIT]
            for i in hits:
                assert bytes(lease.buffer(i)) == content(numbers[i]), "a wrong byte"
        answer = {"matched": len(match), "hits": len(hits)}
        answer["remote"] = match.tiers.count(Tier.REMOTE)
    began_s = time.monotonic()
    store.close(WAIT_S)
    print(json.dumps(answer | {"closed_s": round(time.monotonic() - began_s, 3)}))


if __name__ == "__main__":
    main()
