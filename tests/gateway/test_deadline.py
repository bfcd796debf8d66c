"""A limit that is moved on: it ends a wait when it is over, never sooner, and ends nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from kvist.gateway.deadline import Deadline

LONG_S = 3600.0
SHORT_S = 0.02


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    """Runs a test's coroutine, which may take a minute at most."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


async def now_s() -> float:
    """The loop's clock."""
    return asyncio.get_running_loop().time()


async def forever() -> None:
    """Never ends."""
    await asyncio.get_running_loop().create_future()


async def value(number: int, turns: int = 1) -> int:
    """A number, after some turns of the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return number


def test_what_comes_in_time_is_given_back() -> None:
    async def main() -> None:
        deadline = Deadline()
        for number in range(100):
            assert await deadline.wait(value(number), await now_s() + LONG_S) == number
        deadline.close()

    run(main)


def test_a_wait_ends_at_its_limit_and_what_was_waited_for_is_cancelled() -> None:
    async def main() -> None:
        deadline, ended = Deadline(), []

        async def waited() -> None:
            try:
                await forever()
            finally:
                ended.append("cancelled")

        until_s = await now_s() + SHORT_S
        with pytest.raises(TimeoutError):
            await deadline.wait(waited(), until_s)
        assert await now_s() >= until_s
        assert ended == ["cancelled"]
        assert await deadline.wait(value(1), await now_s() + LONG_S) == 1  # it can wait again

    run(main)


def test_a_limit_that_was_moved_on_does_not_end_a_wait_at_the_old_one() -> None:
    async def main() -> None:
        deadline = Deadline()
        await deadline.wait(value(1), await now_s() + SHORT_S)
        until_s = await now_s() + 5 * SHORT_S
        with pytest.raises(TimeoutError):
            await deadline.wait(forever(), until_s)
        assert await now_s() >= until_s

    run(main)


def test_a_limit_that_comes_sooner_than_the_one_before_holds() -> None:
    async def main() -> None:
        deadline = Deadline()
        await deadline.wait(value(1), await now_s() + LONG_S)
        with pytest.raises(TimeoutError):
            await deadline.wait(forever(), await now_s() + SHORT_S)
        with pytest.raises(TimeoutError):
            await deadline.wait(forever(), 0.0)  # long past

    run(main)


def test_nothing_ends_between_waits() -> None:
    """The timer goes off while nobody waits; the next wait has a limit all the same."""

    async def main() -> None:
        deadline = Deadline()
        await deadline.wait(value(1), await now_s() + SHORT_S)
        await asyncio.sleep(3 * SHORT_S)
        assert await deadline.wait(value(2), await now_s() + LONG_S) == 2
        with pytest.raises(TimeoutError):
            await deadline.wait(forever(), await now_s() + SHORT_S)

    run(main)


def test_a_cancelled_task_is_no_timeout() -> None:
    async def main() -> None:
        deadline = Deadline()
        task = asyncio.ensure_future(deadline.wait(forever(), await now_s() + LONG_S))
        await value(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run(main)


def test_a_task_that_is_cancelled_as_its_limit_passes_stays_cancelled() -> None:
    """Whoever cancels a task has to see it end, also if its wait was over at the same moment."""

    async def main() -> None:
        deadline = Deadline()
        task = asyncio.ensure_future(deadline.wait(forever(), await now_s() + LONG_S))
        await value(0)
        deadline.expire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main)


def test_whoever_gives_up_ends_the_wait_under_way_and_no_other() -> None:
    async def main() -> None:
        deadline = Deadline()
        deadline.expire()  # nobody waits
        assert await deadline.wait(value(1), await now_s() + LONG_S) == 1
        task = asyncio.ensure_future(deadline.wait(forever(), await now_s() + LONG_S))
        await value(0)
        deadline.expire()
        deadline.expire()
        with pytest.raises(TimeoutError):
            await task

    run(main)


def test_a_fault_of_what_is_waited_for_is_its_own() -> None:
    async def main() -> None:
        async def fails() -> None:
            raise ConnectionError("gone")

        with pytest.raises(ConnectionError, match="gone"):
            await Deadline().wait(fails(), await now_s() + LONG_S)

    run(main)


def test_a_closed_deadline_leaves_no_timer_behind() -> None:
    """A timer would keep a request that is over in memory for as long as its limit was."""

    class Counting(asyncio.SelectorEventLoop):
        timers = 0

        def call_at(self, *args: object, **options: object) -> asyncio.TimerHandle:  # type: ignore[override]
            self.timers += 1
            return super().call_at(*args, **options)  # type: ignore[arg-type]

    async def main() -> None:
        deadline = Deadline()
        for _ in range(50):
            await deadline.wait(value(1), await now_s() + LONG_S)
        timer = deadline._timer
        assert timer is not None
        deadline.close()
        deadline.close()
        assert timer.cancelled()

    loop = Counting()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert loop.timers == 1
