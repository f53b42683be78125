"""Giving up, from two sides: a transfer stops for its caller or for a failure of its own.

Used wherever one call runs several requests at once.
"""

from __future__ import annotations

import threading
from time import monotonic, sleep
from typing import Final

from trainmount_files.retry import Cancellation

__all__ = ["Either", "LinkedEvent", "TimeLimit"]

_POLL_SECONDS: Final = 0.05
"""Two events cannot be waited for at once; a twentieth of a second is soon enough for a person."""


class Either:
    """Set as soon as one of two is; implements `Cancellation`."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Cancellation, second: Cancellation) -> None:
        self._first = first
        self._second = second

    def is_set(self) -> bool:
        return self._first.is_set() or self._second.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else monotonic() + timeout
        while not self.is_set():
            left = _POLL_SECONDS if deadline is None else deadline - monotonic()
            if left <= 0:
                return False
            self._first.wait(min(left, _POLL_SECONDS))
        return True


class TimeLimit:
    """Set after so many seconds; implements `Cancellation`."""

    __slots__ = ("_end",)

    def __init__(self, seconds: float) -> None:
        self._end = monotonic() + seconds

    def is_set(self) -> bool:
        return monotonic() >= self._end

    def wait(self, timeout: float | None = None) -> bool:
        left = max(0.0, self._end - monotonic())
        sleep(left if timeout is None else min(left, timeout))
        return self.is_set()


class LinkedEvent(threading.Event):
    """Set by its own `set`, or as soon as `other` is."""

    def __init__(self, other: Cancellation | None) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or (self._other is not None and self._other.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        if self._other is None:
            return super().wait(timeout)
        deadline = None if timeout is None else monotonic() + timeout
        while not self.is_set():
            left = _POLL_SECONDS if deadline is None else deadline - monotonic()
            if left <= 0:
                return False
            super().wait(min(left, _POLL_SECONDS))
        return True
