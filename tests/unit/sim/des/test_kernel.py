"""The event loop: order, cancelling, streams."""

from __future__ import annotations

import pytest

from kvist.sim.des.kernel import Kernel


def test_events_run_by_time_and_then_in_the_order_they_were_scheduled() -> None:
    kernel, seen = Kernel(0), []
    for name, time_s in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        kernel.at(time_s, lambda name=name: seen.append((kernel.now_s, name)))
    kernel.run()
    assert seen == [(1.0, "a"), (2.0, "b"), (2.0, "c")]
    assert kernel.events == 3


def test_an_event_in_the_past_or_without_an_end_is_refused() -> None:
    kernel = Kernel(0)
    kernel.at(5.0, lambda: None)
    kernel.run()
    for time_s in (4.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="an event at"):
            kernel.at(time_s, lambda: None)


def test_a_cancelled_event_never_runs_and_leaves_the_heap() -> None:
    kernel, seen = Kernel(0), []
    events = [kernel.at(float(n), lambda n=n: seen.append(n)) for n in range(2000)]
    for event in events[1:]:
        kernel.cancel(event)
    kernel.cancel(events[1])
    kernel.cancel(None)
    assert len(kernel._heap) < 1000
    kernel.run()
    assert seen == [0]


def test_streams_of_one_seed_do_not_move_each_other() -> None:
    one, other = Kernel(7), Kernel(7)
    one.stream("faults").random()
    assert one.stream("router").random() == other.stream("router").random()
    assert Kernel(8).stream("router").random() != other.stream("router").random()
