"""Daemon threads that make calls which may hang: ending the process never waits for them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock, Thread
from typing import TypeVar

from kvist.core.errors import ClosedError, KvistError

_T = TypeVar("_T")
_IDLE_S = 60.0  # a thread that had nothing to do for so long ends

_Task = Callable[[], None]


class Crew:
    """At most so many threads; they come when needed and go when idle."""

    def __init__(self, most_threads: int, *, name: str) -> None:
        self._most_threads = most_threads
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = Lock()
        self._threads = 0
        self._open_tasks = 0  # queued or running
        self._closed = False

    @property
    def busy(self) -> int:
        """Calls that are queued or running."""
        return self._open_tasks

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Makes the call on some thread, in the order of submission.

        Raises:
            ClosedError: the crew was closed.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError(f"the threads of {self._name} were ended")
            self._open_tasks += 1
            self._tasks.put(partial(self._run, future, call))
            if self._threads < min(self._open_tasks, self._most_threads):
                self._threads += 1
                Thread(target=self._serve, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Lets the threads end when they have done what is queued. Idempotent, does not wait."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._tasks.put(None)

    def _serve(self) -> None:
        try:
            while True:
                try:
                    task = self._tasks.get(timeout=_IDLE_S)
                except queue.Empty:
                    task = None
                if task is not None:
                    task()
                elif self._may_end():
                    return
        finally:
            with self._lock:
                self._threads -= 1

    def _may_end(self) -> bool:
        with self._lock:
            return self._closed or self._tasks.empty()

    def _run(self, future: Future[_T], call: Callable[[], _T]) -> None:
        """Puts what the call returns, or raises, into the future.

        Whoever is given the result may ask at once whether a thread is free: this one is by then.
        """
        if not future.set_running_or_notify_cancel():
            self._ended()
            return
        try:
            result = call()
        except (KvistError, OSError) as error:
            self._ended()
            future.set_exception(error)
        except BaseException as error:  # a fault in the program: this thread ends of it
            self._ended()
            future.set_exception(error)
            raise
        else:
            self._ended()
            future.set_result(result)

    def _ended(self) -> None:
        with self._lock:
            self._open_tasks -= 1
