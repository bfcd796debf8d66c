"""Requests go on in fair order, one for each piece of room, and none is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from kvist.gateway.faults import Fault
from kvist.gateway.waiting import Waiting
from kvist.router.fairness import FairQueue
from kvist.router.protocol import Ask, Need, Refused

LIMIT_S = 10.0


class Engines:
    """Room for so many requests; who goes on takes a piece of it in the same turn."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.went: list[str] = []
        self.waited_s: dict[str, float] = {}
        self.most_over = 0
        self.waiting: Waiting

    def has_room(self, now_s: float) -> bool:
        """Whether another one may go on."""
        return self.room > 0

    def need(self, ask: Ask, ahead_s: float, now_s: float) -> Need | Refused:
        """Nothing is cached; three seconds (60,000 tokens) are too long a wait."""
        if ahead_s > 3.0:
            return Refused("ttft", 3.0)
        return Need(ask.prompt_tokens, ask.prompt_tokens / 20_000)

    async def send(self, ask: Ask) -> None:
        """A request as the relay sends it."""
        self.waited_s[ask.request] = await self.waiting.turn(ask)
        self.room -= 1
        self.most_over = min(self.most_over, self.room)
        self.went.append(ask.request)


def run(
    test: Callable[[Engines], Awaitable[None]],
    *,
    room: int = 0,
    capacity: int = 100,
    most_s: float = LIMIT_S,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            engines = Engines(room)
            queue = FairQueue(capacity=capacity, tenant_capacity=capacity, overtaken_s=LIMIT_S)
            loop = asyncio.get_running_loop()
            engines.waiting = Waiting(queue, engines, loop.time, most_s=most_s)
            await test(engines)
            assert len(engines.waiting) == 0
            assert len(queue) == 0

    asyncio.run(main())


def asked(name: str, tenant: str = "", **more: float) -> Ask:
    return Ask(name, (), 4096, tenant=tenant, **more)  # type: ignore[arg-type]


async def settle() -> None:
    """Lets whoever can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_nobody_waits_while_there_is_room() -> None:
    async def test(engines: Engines) -> None:
        for n in range(3):
            await engines.send(asked(str(n)))
        assert engines.went == ["0", "1", "2"]
        assert set(engines.waited_s.values()) == {0.0}

    run(test, room=3)


def test_room_for_one_lets_one_on() -> None:
    async def test(engines: Engines) -> None:
        tasks = [asyncio.create_task(engines.send(asked(str(n)))) for n in range(10)]
        await settle()
        assert engines.went == []
        for n in range(10):
            engines.room = 1
            while len(engines.went) == n:
                await asyncio.sleep(0.001)
            await settle()
            assert len(engines.went) == n + 1
        await asyncio.gather(*tasks)
        assert engines.went == [str(n) for n in range(10)]
        assert engines.most_over == 0

    run(test)


def test_tenants_take_turns_and_urgent_requests_go_first_in_theirs() -> None:
    async def test(engines: Engines) -> None:
        many = [asyncio.create_task(engines.send(asked(f"a{n}", "a"))) for n in range(6)]
        await settle()
        few = [asyncio.create_task(engines.send(asked(f"b{n}", "b"))) for n in range(2)]
        few.append(asyncio.create_task(engines.send(asked("b!", "b", priority=1))))
        await settle()
        engines.room = 9
        await asyncio.gather(*many, *few)
        assert [name for name in engines.went if name[0] == "b"] == ["b!", "b0", "b1"]
        assert {name[0] for name in engines.went[:2]} == {"a", "b"}
        assert engines.went[-3:] == ["a3", "a4", "a5"]

    run(test)


def test_the_shortest_goes_first_and_is_told_how_long_it_waited() -> None:
    async def test(engines: Engines) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        sizes = {"long": 16_000, "short": 1000, "middle": 4000}
        tasks = [
            asyncio.create_task(engines.send(replace(asked(name), prompt_tokens=tokens)))
            for name, tokens in sizes.items()
        ]
        await settle()
        engines.room = 3
        await asyncio.gather(*tasks)
        assert engines.went == ["short", "middle", "long"]
        assert all(0 < waited_s <= loop.time() - began_s for waited_s in engines.waited_s.values())

    run(test)


def test_who_would_wait_for_too_long_is_told_at_once() -> None:
    async def test(engines: Engines) -> None:
        task = asyncio.create_task(engines.send(replace(asked("1"), prompt_tokens=80_000)))
        await settle()
        with pytest.raises(Fault, match="ttft"):
            await engines.send(asked("2"))
        engines.room = 2
        await task
        await engines.send(asked("3"))
        assert engines.went == ["1", "3"]

    run(test)


def test_names_of_requests_may_be_alike() -> None:
    async def test(engines: Engines) -> None:
        tasks = [asyncio.create_task(engines.send(asked("same"))) for _ in range(3)]
        await settle()
        engines.room = 3
        await asyncio.gather(*tasks)
        assert engines.went == ["same"] * 3

    run(test)


def test_too_many_and_too_late_are_refused() -> None:
    async def test(engines: Engines) -> None:
        now_s = asyncio.get_running_loop().time()
        late = asyncio.create_task(engines.send(asked("late", deadline_s=now_s + 0.01)))
        kept = asyncio.create_task(engines.send(asked("kept")))
        await settle()
        with pytest.raises(Fault, match="queue-full"):
            await engines.send(asked("one more"))
        with pytest.raises(Fault, match="deadline"):
            await late
        engines.room = 1
        await kept
        assert engines.went == ["kept"]

    run(test, capacity=2)


@pytest.mark.parametrize("room_first", [False, True])
def test_client_that_leaves_takes_nobodys_turn(room_first: bool) -> None:
    async def test(engines: Engines) -> None:
        tasks = [asyncio.create_task(engines.send(asked(str(n)))) for n in range(3)]
        await settle()
        if room_first:  # it was let on, and leaves before it is sent
            engines.room = 2
            engines.waiting._look()
        tasks[0].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[0]
        engines.room = 2
        await asyncio.gather(*tasks[1:])
        assert engines.went == ["1", "2"]

    run(test)


def test_wait_ends_though_no_room_ever_comes() -> None:
    async def test(engines: Engines) -> None:
        with pytest.raises(Fault, match="queue-time"):
            await engines.send(asked("1"))
        engines.room = 1
        await engines.send(asked("2"))
        assert engines.went == ["2"]

    run(test, most_s=0.05)
