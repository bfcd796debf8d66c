"""Kvist's `PrefixIndex`, from the bytes of messages on; its keys of blocks.

Messages are those that Kvist nodes publish, with keys, or those of stock engines, with tokens that
have yet to be hashed. Applying them includes watching their order and gaps. With several events a
message or engines' events, nothing else is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from workload import (  # type: ignore[import-not-found]
    BLOCK_TOKENS,
    EVENT_BLOCKS,
    MESSAGE_EVENTS,
    Spent,
    Workload,
    answer,
)

from kvist.cluster.wire import NUMBER_BYTES, decode_message, encode_payload, topic_of
from kvist.core.events import Cleared, Stored
from kvist.core.outcome import Tier
from kvist.native import chain_keys, digest
from kvist.router.index import PrefixIndex

_BATCH = 16
_FINGERPRINT = digest(b"bench")
_WRITTEN: Final = {"ts": 0.0, "block_tokens": BLOCK_TOKENS}
_Message = tuple[str, bytes, bytes, bytes]  # whose, topic, number, payload


def _new_index(work: Workload) -> PrefixIndex:
    index = PrefixIndex(block_tokens=BLOCK_TOKENS, fingerprint=_FINGERPRINT)
    for worker in range(work.workers):
        index.attach(str(worker))
    return index


def _node_payload(keys: list[bytes], firsts: Sequence[int]) -> bytes:
    events = []
    for first in firsts:
        above = keys[first - 1] if first else None
        events.append(Stored(tuple(keys[first : first + EVENT_BLOCKS]), above, Tier.HBM))
    return encode_payload(events, **_WRITTEN)


def _engine_payload(worker: int, tokens: list[int], keys: list[bytes], first: int) -> bytes:
    """As vLLM writes it, the hashes being this worker's own."""
    last = first + EVENT_BLOCKS
    hashes = [digest(b"%d" % worker + key) for key in keys[max(first - 1, 0) : last]]
    event = {
        "type": "BlockStored",
        "block_hashes": hashes[1:] if first else hashes,
        "parent_block_hash": hashes[0] if first else None,
        "token_ids": tokens[first * BLOCK_TOKENS : last * BLOCK_TOKENS],
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


def _filled(work: Workload, messages: list[_Message]) -> tuple[PrefixIndex, dict[str, list[float]]]:
    """An index that has heard all; what an entry took."""
    clock = Spent(work)
    index = _new_index(work)
    for whose, topic, number, payload in messages:
        index.take(decode_message(topic, number, payload, source=whose), 0.0)
    spent = clock.of_an_entry()
    assert index.complete, "no message was lost"
    assert index.feed.counts.orphans == 0, "every parent was known"
    return index, spent


def _messages(work: Workload, keys: list[list[list[bytes]]]) -> list[_Message]:
    found = []
    for worker, prompts in enumerate(keys):
        payloads = [] if work.events == "engines" else [encode_payload([Cleared()], **_WRITTEN)]
        for n, mine in enumerate(prompts):
            runs = work.runs(n)
            if work.events == "engines":
                tokens = work.prompts[worker][n]
                payloads += [_engine_payload(worker, tokens, mine, first) for first in runs]
            else:
                count = MESSAGE_EVENTS if work.events == "several" else 1
                parts = [runs[i : i + count] for i in range(0, len(runs), count)]
                payloads += [_node_payload(mine, part) for part in parts]
        topic = b"" if work.events == "engines" else topic_of(str(worker), 1)
        for number, payload in enumerate(payloads):
            found.append((str(worker), topic, number.to_bytes(NUMBER_BYTES, "big"), payload))
    return found


def measure(work: Workload) -> dict[str, list[float]]:
    """Everything; seconds, bytes of an entry."""
    plain = PrefixIndex(block_tokens=BLOCK_TOKENS, fingerprint=_FINGERPRINT)
    keys = [[plain.keys(tokens) for tokens in prompts] for prompts in work.prompts]
    index, found = _filled(work, _messages(work, keys))

    def one(sample: int) -> object:
        worker, n = work.ask_of(sample)
        return index.match(keys[worker][n])

    assert one(0), "what a worker holds is found"
    if work.events != "nodes":
        return found
    unknown = plain.keys(work.unknown)
    assert index.match(unknown) == {}, "nobody holds what was never told"
    found["match_one_s"] = work.timed(one)
    found["match_none_s"] = work.timed(lambda _: index.match(unknown))
    batch = [tuple(keys[worker][0]) for worker in range(min(_BATCH, work.workers))]
    many = work.timed(lambda _: index.match_many(batch))
    found["match_many_s"] = [took_s / len(batch) for took_s in many]
    first = keys[0][0]
    for worker in range(work.workers):
        index.predict(str(worker), first, 0.0)
    everybody = index.match(first)
    assert {p.hbm_blocks for p in everybody.values()} == {work.prompt_blocks}, "all hold all"
    assert len(everybody) == work.workers, "all hold all"
    found["match_all_s"] = work.timed(lambda _: index.match(first))
    tokens = work.prompts[0][0]
    seed = digest(b"seed")
    found["hash_s"] = work.timed(lambda _: chain_keys(seed, tokens, BLOCK_TOKENS))
    return found


if __name__ == "__main__":
    answer(measure)
