"""Who holds a lock for long lets those that wait have a turn, and nobody is in it together."""

from __future__ import annotations

import threading

from kvist.router.turns import Turns

WAIT_S = 30.0


def test_pause_without_anybody_goes_on_at_once() -> None:
    lock = Turns()
    with lock:
        lock.pause()
        lock.pause()
    with lock:
        pass


def test_whoever_waits_has_its_turn_in_a_pause() -> None:
    lock, order = Turns(), list[str]()
    begun = threading.Event()

    def work() -> None:
        with lock:
            begun.set()
            until_other_waits(lock)
            order.append("before")
            lock.pause()
            order.append("behind")

    worker = threading.Thread(target=work)
    worker.start()
    assert begun.wait(WAIT_S)
    with lock:
        order.append("request")
    worker.join(WAIT_S)
    assert order == ["before", "request", "behind"]


def until_other_waits(lock: Turns) -> None:
    """Returns when another thread stands at the door."""
    while not lock._door.locked():
        pass


def test_nobody_is_in_it_together() -> None:
    lock, inside, most = Turns(), [0], [0]

    def enter() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        inside[0] -= 1

    def work(pauses: int) -> None:
        for _ in range(500):
            with lock:
                enter()
                for _ in range(pauses):
                    lock.pause()
                    enter()

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 0, 1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert most == [1]
