"""Throws damaged payloads at every chain of codecs, in a process of its own with little memory.

    python tests/faults/payload_fuzz.py SECONDS SEED

A decoder may answer a damaged payload with `FormatError`, or with the block's exact bytes; a lossy
one, whose payloads have no checksum of their own, with any block. All else (another exception, an
exact codec's wrong byte, memory beyond the limit, a crash) ends the process with an error. The last
line on stdout counts what was tried; whatever fails is printed with what reproduces it.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvist.codec.cachegen.table import TableShape
from kvist.codec.chain import Chain
from kvist.codec.keyring import Keyring
from kvist.codec.registry import open_codecs
from kvist.core.errors import FormatError
from kvist.core.layout import BlockLayout
from kvist.native import digest
from kvist.testing.codec_suite import suite_values
from kvist.testing.made_up_kv import made_up_block, made_up_table

SPARE_BYTES = 256 << 20  # what decoding may take; the largest block has 1 MiB
LAYOUTS = (
    BlockLayout(2, 2, 16, 24, "bfloat16"),
    BlockLayout(1, 3, 7, 5, "float16"),
    BlockLayout(2, 1, 33, 1, "float32", kinds=1),
    BlockLayout(4, 4, 64, 64, "bfloat16"),
)
CONTENTS = ("kv", "normal", "channels", "special", "zeros")
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)
RINGS = (Keyring("a", {"a": bytes(32)}), Keyring("a", {"a": bytes(31) + b"\1"}))
KEYS = (digest(b"one"), digest(b"two"))

Random = np.random.Generator
Case = tuple[Chain, BlockLayout, bytes, bytes]


def block_of(layout: BlockLayout, content: str) -> bytes:
    """As a model makes it (what the tables are of), or what the suite of codecs has."""
    return made_up_block(layout) if content == "kv" else suite_values(layout, content)


def cases() -> list[Case]:
    """Chain, layout, block and payload, for every chain and some blocks."""
    found: list[Case] = []
    for layout in LAYOUTS:
        table = made_up_table(TableShape.of(layout))
        codecs = open_codecs("int8", layout, RINGS[0], table)
        for name in codecs.names:
            for content in CONTENTS:
                chain, block = codecs.find(name), block_of(layout, content)
                assert chain is not None
                stored = chain.encode(memoryview(block), key=KEYS[0])
                if stored is None and chain.codec is not None:
                    stored = chain.codec.encode(memoryview(block))
                found.append((chain, layout, block, bytes(stored or b"")))
    return found


def flip(stored: bytearray, rng: Random) -> None:
    for _ in range(rng.integers(1, 9)):
        stored[rng.integers(len(stored))] ^= 1 << int(rng.integers(8))


def cut(stored: bytearray, rng: Random) -> None:
    del stored[rng.integers(len(stored)) :]


def grow(stored: bytearray, rng: Random) -> None:
    at = rng.integers(len(stored) + 1)
    stored[at:at] = rng.bytes(int(rng.integers(1, 100)))


def drop(stored: bytearray, rng: Random) -> None:
    at = rng.integers(len(stored))
    del stored[at : at + int(rng.integers(1, 40))]


def zero(stored: bytearray, rng: Random) -> None:
    at = int(rng.integers(len(stored)))
    end = min(len(stored), at + int(rng.integers(1, 200)))
    stored[at:end] = bytes(end - at)


def bomb(stored: bytearray, rng: Random) -> None:
    """A number of 1 to 8 bytes somewhere, mostly in the heads, becomes an extreme one."""
    form = "<BHIQ"[rng.integers(1, 5)]
    size = struct.calcsize("<" + form)
    reach = min(len(stored), 160 if rng.random() < 0.8 else len(stored))
    value = int(EXTREMES[rng.integers(len(EXTREMES))]) & ((1 << 8 * size) - 1)
    at = int(rng.integers(max(1, reach - size)))
    stored[at : at + size] = struct.pack("<" + form, value)


def trust_sizes(stored: bytearray, rng: Random) -> None:
    """Cuts or grows, and lets the head say the size that is there."""
    (cut if rng.random() < 0.5 else grow)(stored, rng)
    if len(stored) >= 64:
        struct.pack_into("<Q", stored, 56, len(stored) - 64)


MUTATIONS: tuple[Callable[[bytearray, Random], None], ...] = (
    flip,
    cut,
    grow,
    drop,
    zero,
    bomb,
    trust_sizes,
)


def damaged(all_cases: list[Case], case: Case, rng: Random) -> tuple[str, bytes, bytes]:
    """What was done, a damaged payload for a case, and the only block that it may give exactly."""
    if rng.random() < 0.1:  # the payload of another chain, layout or block
        other = all_cases[rng.integers(len(all_cases))]
        return "swap", other[3], other[2]
    stored, done = bytearray(case[3]), []
    for _ in range(rng.integers(1, 4)):
        mutate = MUTATIONS[rng.integers(len(MUTATIONS))]
        if stored:
            mutate(stored, rng)
            done.append(mutate.__name__)
    return "+".join(done), bytes(stored), case[2]


def judge(chain: Chain, bad: bytes, block: bytes, view: memoryview, key: bytes) -> str:
    """What a decoder made of a payload; raises AssertionError if it may not."""
    try:
        chain.decode(memoryview(bad), view, key=key)
    except FormatError:
        return "refused"
    assert chain.sealer is None or key == KEYS[0], "opened as another block"
    assert not chain.exact or view == block, "an exact codec gave other bytes"
    return "decoded"


def run(seconds: float, seed: int) -> Counter[str]:
    """Tries for `seconds`; whatever fails is printed and raised."""
    all_cases = cases()
    # The same ids, other secrets.
    strangers = {
        layout: open_codecs("int8", layout, RINGS[1], made_up_table(TableShape.of(layout)))
        for layout in LAYOUTS
    }
    out = bytearray(max(len(c[2]) for c in all_cases))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    counts: Counter[str] = Counter(chains=len({(case[0].name, case[1]) for case in all_cases}))
    ends, number = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        number += 1
        rng = np.random.default_rng([seed, number])
        case = all_cases[rng.integers(len(all_cases))]
        done, bad, block = damaged(all_cases, case, rng)
        key = KEYS[0] if rng.random() < 0.9 else KEYS[1]
        view = memoryview(out)[: len(case[2])]
        try:
            counts[judge(case[0], bad, block, view, key)] += 1
            if case[0].sealer is not None:
                other = strangers[case[1]].find(case[0].name)
                assert other is not None
                answer = judge(other, bad, block, view, KEYS[0])
                assert answer == "refused", "opened with another secret"
        except BaseException:
            print(f"{case[0].name} {case[1]} seed {seed} number {number}: {done}", flush=True)
            raise
    return counts


if __name__ == "__main__":
    print(json.dumps(run(float(sys.argv[1]), int(sys.argv[2]))))
