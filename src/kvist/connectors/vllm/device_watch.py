"""Times forward passes on a device, where a launch returns long before the work is done."""

from __future__ import annotations

from collections import deque

import torch

_MOST_OPEN = 64


class DeviceWatch:
    """Events around each pass on its stream; their times are read when the device has passed them.

    Nothing here waits for the device.
    """

    def __init__(self) -> None:
        self._began: tuple[int, torch.cuda.Event] | None = None
        self._open: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_MOST_OPEN)

    def start(self, step: int) -> None:
        """The pass of `step` is about to be launched."""
        self._began = step, _event()

    def stop(self) -> None:
        """It was launched."""
        if self._began is not None:
            step, began = self._began
            self._began = None
            self._open.append((step, began, _event()))

    def take(self) -> dict[int, float]:
        """Seconds of passes that the device has finished since the last call."""
        done: dict[int, float] = {}
        while self._open and self._open[0][2].query():
            step, began, ended = self._open.popleft()
            done[step] = began.elapsed_time(ended) / 1000.0
        return done


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
