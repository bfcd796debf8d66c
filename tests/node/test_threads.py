"""Threads of one owner: they run until they are told to end, and ending them twice is one end."""

from __future__ import annotations

import threading

from kvist.node.threads import Threads

LIMIT_S = 10.0


def test_work_goes_on_until_its_owner_ends_it() -> None:
    begun, ended = threading.Barrier(3), []

    def work() -> None:
        begun.wait(LIMIT_S)
        assert threads.ending.wait(LIMIT_S)
        ended.append(threading.current_thread().name)

    threads = Threads({"one": work, "two": work})
    threads.start()
    begun.wait(LIMIT_S)
    assert threads.end()
    assert sorted(ended) == ["one", "two"]
    assert not threads.end()


def test_threads_that_never_began_can_be_ended() -> None:
    threads = Threads({"one": lambda: None})
    assert threads.end()
    assert threads.ending.is_set()
