"""State that must not be shared with a forked child: sockets, caches with locks, token refreshers.

DataLoader workers are forked while other threads hold locks and connections; each process makes its
own on first use.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

__all__ = ["PerProcess"]

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that is made once in each process. Any thread may ask."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._value: T | None = None
        self._lock = threading.Lock()
        _ALL.add(self)

    def get(self) -> T:
        value = self._value
        if value is not None:
            return value
        with self._lock:
            if self._value is None:
                self._value = self._make()
            return self._value

    def peek(self) -> T | None:
        """The value where this process has made it."""
        return self._value

    def _forget(self) -> None:
        # The lock may have been held by a thread that the child does not have.
        self._lock = threading.Lock()
        self._value = None


_ALL: Final[weakref.WeakSet[PerProcess[Any]]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for known in list(_ALL):
        known._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
