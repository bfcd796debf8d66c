"""NVIDIA Dynamo's `RadixTree` in process, without etcd or NATS; its hashes of blocks.

An event carries two hashes of each block, computed before. The time to apply events ends with a
question, which waits until all are applied.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("DYN_LOG", "error")

import dynamo._core as core  # type: ignore[import-not-found]
from workload import (  # type: ignore[import-not-found]
    BLOCK_TOKENS,
    EVENT_BLOCKS,
    Spent,
    Workload,
    answer,
)

_Prompt = tuple[list[int], list[int]]  # hashes of the blocks' tokens, numbers of the blocks


def _hashed(work: Workload) -> list[list[_Prompt]]:
    shared, fresh = work.shared_blocks, work.prompt_blocks
    found = []
    for prompts in work.prompts:
        mine = []
        for tokens in prompts:
            hashes = core.compute_block_hash_for_seq(tokens, BLOCK_TOKENS)
            ids = [*range(1, shared + 1), *range(fresh + 1, fresh + 1 + len(hashes) - shared)]
            fresh += len(hashes)
            mine.append((hashes, ids))
        found.append(mine)
    return found


def _stored(prompt: _Prompt, first: int, last: int, number: int) -> bytes:
    hashes, ids = prompt
    blocks = [{"block_hash": ids[i], "tokens_hash": hashes[i]} for i in range(first, last)]
    above = ids[first - 1] if first else None
    return json.dumps(
        {"event_id": number, "data": {"stored": {"parent_hash": above, "blocks": blocks}}}
    ).encode()


def measure(work: Workload) -> dict[str, list[float]]:
    """Everything; seconds, bytes of an entry."""
    prompts = _hashed(work)
    events = [
        (worker, _stored(prompt, first, min(first + EVENT_BLOCKS, work.prompt_blocks), first))
        for worker, mine in enumerate(prompts)
        for n, prompt in enumerate(mine)
        for first in work.runs(n)
    ]
    clock = Spent(work)
    tree = core.RadixTree()
    for worker, event in events:
        tree.apply_event(worker, event)
    tree.find_matches(prompts[0][0][0][:1])
    found: dict[str, list[float]] = clock.of_an_entry()

    def one(sample: int) -> object:
        worker, n = work.ask_of(sample)
        return tree.find_matches(prompts[worker][n][0])

    unknown = core.compute_block_hash_for_seq(work.unknown, BLOCK_TOKENS)
    assert one(0).scores, "what a worker holds is found"  # type: ignore[attr-defined]
    assert not tree.find_matches(unknown).scores, "nobody holds what was never told"
    found["match_one_s"] = work.timed(one)
    found["match_none_s"] = work.timed(lambda _: tree.find_matches(unknown))
    first = prompts[0][0]
    for worker in range(work.workers):
        tree.apply_event(worker, _stored(first, 0, work.prompt_blocks, 1 << 30))
    scores = tree.find_matches(first[0]).scores
    assert sorted(scores.values()) == [work.prompt_blocks] * work.workers, "all hold all"
    found["match_all_s"] = work.timed(lambda _: tree.find_matches(first[0]))
    tokens = work.prompts[0][0]
    found["hash_s"] = work.timed(lambda _: core.compute_block_hash_for_seq(tokens, BLOCK_TOKENS))
    return found


if __name__ == "__main__":
    answer(measure)
