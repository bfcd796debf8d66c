"""The rules of the replay, on traces small enough to count by hand."""

import gc

import pytest

from kvist.core.hints import Finish
from kvist.sim.contenders import NAMES, contender
from kvist.sim.replay import prefill_flops, replay
from kvist.sim.traces import Request, Trace

BLOCK_TOKENS = 10


def _trace(*chains: str) -> Trace:
    """A request for each word; a letter is a block, a capital one is partial."""
    return Trace.of(
        "words",
        BLOCK_TOKENS,
        [
            Request(
                time_s=float(n),
                keys=tuple(word[: i + 1].encode() for i in range(len(word))),
                input_tokens=BLOCK_TOKENS * len(word) - (5 if word[-1:].isupper() else 0),
                output_tokens=3,
                finish=Finish.END_TURN,
            )
            for n, word in enumerate(chains)
        ],
    )


def _run(name: str, capacity_blocks: int, *chains: str) -> tuple[float, int]:
    trace = _trace(*chains)
    result = replay(trace, contender(name, trace, capacity_blocks), capacity_blocks)
    return result.block_hit_ratio * trace.accesses_blocks, result.blocks_written


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"second-sight"}))
def test_everything_fits_so_all_that_came_before_hits(name: str) -> None:
    assert _run(name, 100, "abc", "abd", "abc") == (pytest.approx(5), 4)


def test_a_block_behind_a_missing_one_is_no_hit() -> None:
    # Two blocks of room; FIFO evicts the root first, as it came first.
    hits, _ = _run("fifo", 3, "ab", "cd", "ab")
    assert hits == pytest.approx(1)


def test_the_blocks_of_a_request_are_spared_when_it_needs_room() -> None:
    assert _run("lru", 3, "ab", "abcd") == (pytest.approx(2), 3)


def test_leaves_go_before_roots() -> None:
    hits, written = _run("leaf-lru", 3, "abc", "x", "abc")
    assert (hits, written) == (pytest.approx(2), 5)


def test_second_sight_stores_what_is_asked_for_twice() -> None:
    assert _run("second-sight", 10, "ab", "ab", "ab") == (pytest.approx(2), 2)


def test_belady_keeps_what_comes_back() -> None:
    assert _run("belady", 2, "ab", "cd", "ef", "ab") == (pytest.approx(2), 2)
    assert _run("lru", 2, "ab", "cd", "ef", "ab")[0] == 0


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"belady"}))
def test_no_order_beats_belady(name: str) -> None:
    words = [a + b + c for a in "abcd" for b in "xyz" for c in "uv"] * 3
    words = sorted(words, key=lambda w: hash_of(w))
    assert _run(name, 12, *words)[0] <= _run("belady", 12, *words)[0]


def hash_of(word: str) -> int:
    """An order that is the same everywhere."""
    return sum(ord(letter) * 31**i for i, letter in enumerate(word)) * 2654435761 % 1009


def test_a_partial_block_counts_only_its_tokens() -> None:
    trace = _trace("aB", "aB")
    result = replay(trace, contender("lru", trace, 9), 9)
    assert result.token_hit_ratio == pytest.approx(0.5)
    assert result.flops_saved_ratio == pytest.approx(0.5)


def test_later_tokens_cost_more() -> None:
    assert prefill_flops(2000) > 2 * prefill_flops(1000)


def test_replay_leaves_the_collector_as_it_was() -> None:
    assert gc.isenabled()
    _run("value", 3, "abc", "abd")
    assert gc.isenabled()
