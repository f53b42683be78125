"""How much memory one mount has for bytes on their way: read ahead, waiting to be written to the
cache, parts of an upload. One object a mount, `Core.memory`; any thread may call.

Every buffer whose size depends on load is taken from it first. Who can do without, as read-ahead
can, asks with `try_take`; who cannot waits in `take`, in order of arrival, and goes before those
who only try.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

from trainmount_files.errors import Cancelled

__all__ = [
    "DEFAULT_BYTES",
    "MemoryBudget",
    "MemoryStatistics",
    "bound_allocator",
    "keep_freed_memory",
    "return_free_memory",
]

DEFAULT_BYTES: Final = 256 << 20
"""Four readers with full windows of 64 MiB."""

_POLL_SECONDS: Final = 0.1
"""How often a waiter looks whether it was cancelled; being given memory wakes it at once."""


# glibc's mallopt; malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_OWN_MAPPING_BYTES: Final = 128 << 10
"""What is larger goes back to the system when it is freed. glibc begins with this too, but raises
it to the largest that was ever freed.
"""

_KEPT_BYTES: Final = 32 << 20
"""The same while large files are written: the C library's own largest. Pages that come anew for
each MiB that a program writes, and for each part of an upload, take as long as copying it.
"""

_MAX_ARENAS: Final = 2
"""Otherwise some hundred threads have some ten, and each keeps what its busiest moment took."""


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """What is taken now, and counters since the start."""

    limit_bytes: int
    used_bytes: int
    peak_bytes: int
    num_waits: int
    """Calls of `take` that did not get their memory at once."""


class MemoryBudget:
    """A number of bytes that are handed out and given back."""

    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._peak_bytes = 0
        self._num_waits = 0
        self._parts: list[MemoryBudget] = []
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @property
    def used_bytes(self) -> int:
        """What is taken and not given back yet."""
        return self._used_bytes + sum(part.used_bytes for part in self._parts)

    @property
    def peak_bytes(self) -> int:
        """The most that was taken at once."""
        return self._peak_bytes

    @property
    def is_short(self) -> bool:
        """Somebody waits: memory that is only held in case should be given back."""
        return bool(self._waiting)

    def split_off(self, num_bytes: int) -> MemoryBudget:
        """A part for a purpose of its own that nobody else takes from. Before anybody waits."""
        part = MemoryBudget(num_bytes)
        with self._changed:
            self._parts.append(part)
        return part

    def try_take(self, num_bytes: int) -> bool:
        """Take where there is room and nobody waits for it; never waits."""
        with self._changed:
            if self._waiting or not self._fits(num_bytes):
                return False
            self._take(num_bytes)
            return True

    def take(self, num_bytes: int, cancelled: threading.Event | None = None) -> None:
        """Take as soon as there is room. More than the limit is given to who is alone with it.

        Whoever holds memory must be able to give it back without taking more, or two could wait
        for each other.

        Raises:
            Cancelled: `cancelled` was set, at most 0.1 s ago; nothing is taken.
        """
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                if self._waiting[0] is not turn or not self._fits(num_bytes):
                    self._num_waits += 1
                while self._waiting[0] is not turn or not self._fits(num_bytes):
                    if cancelled is not None and cancelled.is_set():
                        raise Cancelled("read", "", "nobody waits for the bytes any more")
                    self._changed.wait(None if cancelled is None else _POLL_SECONDS)
                self._take(num_bytes)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def give_back(self, num_bytes: int) -> None:
        """What was taken, or a part of it, is free again."""
        with self._changed:
            self._used_bytes -= num_bytes
            if self._waiting:
                self._changed.notify_all()

    def statistics(self) -> MemoryStatistics:
        """A snapshot."""
        with self._changed:
            return MemoryStatistics(
                limit_bytes=self._limit_bytes,
                used_bytes=self.used_bytes,
                peak_bytes=self._peak_bytes,
                num_waits=self._num_waits
                + sum(part.statistics().num_waits for part in self._parts),
            )

    def _fits(self, num_bytes: int) -> bool:
        limit_bytes = self._limit_bytes - sum(part._limit_bytes for part in self._parts)
        return not self._used_bytes or self._used_bytes + num_bytes <= limit_bytes

    def _take(self, num_bytes: int) -> None:
        self._used_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)


def bound_allocator() -> None:
    """Let the C library keep little of what is freed: before a process starts its threads, and
    again after `keep_freed_memory`. Does nothing where the library is not glibc.
    """
    _set_allocator(_OWN_MAPPING_BYTES)


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, up to some ten MiB a heap, for what is needed next;
    until `bound_allocator`.
    """
    _set_allocator(_KEPT_BYTES)


def _set_allocator(kept_bytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)
        mallopt(_M_MMAP_THRESHOLD, kept_bytes)
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)


def return_free_memory() -> None:
    """Give whole pages that are free to the system, wherever they lie. Takes milliseconds; does
    nothing where the library is not glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
