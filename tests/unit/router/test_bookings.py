"""Accounts of one replica: queue, contexts, blocks; what goes in comes out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvist.router.bookings import Contexts, HeldBlocks, PrefillQueue, Work
from kvist.router.lengths import Distribution

TIMES = Distribution()


def _work(serve_s: float, tokens: int = 100) -> Work:
    return Work(serve_s, tokens, 0)


def test_a_queue_is_worked_off_by_time_but_not_beyond_the_prompt_in_front() -> None:
    queue = PrefillQueue()
    assert queue.left_s(5.0) == 0.0
    queue.add(1, _work(2.0), 10.0)
    queue.add(2, _work(3.0), 10.5)
    assert queue.left_s(10.0) == 5.0
    assert queue.left_s(11.0) == 4.0
    assert queue.left_s(99.0) == 3.0  # the one in front is late: the second has not begun
    queue.remove(1, 13.0)
    assert queue.left_s(13.0) == 3.0
    assert queue.left_s(14.0) == 2.0
    assert queue.tokens == 100
    queue.remove(2, 16.0)
    assert (queue.left_s(16.0), queue.tokens, len(queue)) == (0.0, 0, 0)


def test_prompts_whose_end_nobody_sees_end_when_they_are_predicted_to() -> None:
    queue = PrefillQueue()
    for booking, seen in enumerate([False, False, True, False]):
        queue.add(booking, Work(2.0, 100, 0, seen=seen), 0.0)
    assert queue.left_s(1.0) == 7.0
    assert queue.left_s(3.0) == 5.0
    assert (len(queue), queue.tokens) == (3, 300)
    assert queue.left_s(9.0) == 2.0  # the third has not said that it is computed
    queue.remove(2, 9.0)
    queue.remove(0, 9.0)  # is gone already
    assert queue.left_s(10.0) == 1.0
    assert queue.left_s(99.0) == 0.0
    assert (len(queue), queue.tokens) == (0, 0)


def test_a_prompt_behind_that_ends_first_takes_only_its_own_work_away() -> None:
    queue = PrefillQueue()
    queue.add(1, _work(2.0), 0.0)
    queue.add(2, _work(3.0), 0.0)
    queue.remove(2, 1.0)
    assert queue.left_s(1.0) == 2.0
    queue.remove(7, 1.0)  # is not here
    assert queue.left_s(1.0) == 2.0


def test_a_context_counts_from_its_booking_and_is_live_from_its_first_token() -> None:
    contexts = Contexts()
    contexts.expect(1, 1000, 5.0, TIMES)
    assert (len(contexts), contexts.expected, contexts.live, contexts.tokens) == (1, 1, 0, 1000)
    contexts.begin(1, 6.0)
    contexts.begin(1, 7.0)  # told twice
    contexts.begin(2, 7.0)  # is not here
    contexts.grow(1, 50)
    contexts.grow(2, 50)
    assert (contexts.expected, contexts.live, contexts.live_tokens) == (0, 1, 1050)
    assert [context.since_s for context in contexts] == [6.0]
    assert contexts.remove(1) is not None
    assert contexts.remove(1) is None
    assert (len(contexts), contexts.live_tokens, contexts.tokens) == (0, 0, 0)


def test_blocks_are_counted_once_however_many_hold_them() -> None:
    blocks = HeldBlocks()
    first, second = [b"a", b"b"], [b"a", b"b", b"c"]
    blocks.hold(first)
    blocks.hold(second)
    assert len(blocks) == 3
    assert blocks.leading([b"a", b"b", b"c", b"d"]) == 3
    blocks.release(second)
    assert blocks.leading([b"a", b"b", b"c"]) == 2
    blocks.release(first)
    assert len(blocks) == 0


@given(st.lists(st.tuples(st.sampled_from("abr"), st.integers(0, 5), st.floats(0, 3)), max_size=60))
def test_sums_are_those_of_what_is_open(steps: list[tuple[str, int, float]]) -> None:
    queue, contexts = PrefillQueue(), Contexts()
    works: dict[int, Work] = {}
    live: set[int] = set()
    now_s = 0.0
    for what, booking, seconds in steps:
        now_s += seconds
        if what == "a" and booking not in works:
            works[booking] = _work(seconds, booking * 10)
            queue.add(booking, works[booking], now_s)
            contexts.expect(booking, booking * 10, now_s, TIMES)
        elif what == "b" and booking in works:
            contexts.begin(booking, now_s)
            live.add(booking)
        elif what == "r":
            queue.remove(booking, now_s)
            contexts.remove(booking)
            works.pop(booking, None)
            live.discard(booking)
        assert queue.tokens == contexts.tokens == sum(w.new_tokens for w in works.values())
        assert (contexts.live, contexts.expected) == (len(live), len(works) - len(live))
        assert contexts.live_tokens == sum(n * 10 for n in live)
        total_s = sum(w.serve_s for w in works.values())
        assert -1e-9 <= queue.left_s(now_s) <= total_s + 1e-9
