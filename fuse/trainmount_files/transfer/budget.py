"""How much memory all streams of this process have for parts together. Used by `writer.py`.

Nobody waits for anybody else's memory, which could wait for ever: every stream may have one part
whatever the others hold, and further ones only while there is room.
"""

from __future__ import annotations

import threading
from typing import Final

from trainmount_files.per_process import PerProcess
from trainmount_files.volume import MIB

__all__ = ["STREAM_BYTES", "MemoryBudget", "shared_budget"]

STREAM_BYTES: Final = 24 * MIB
"""Parts of one stream that is left to itself: with what sockets and threads take, 32 MiB."""

_PROCESS_BYTES: Final = 80 * MIB
"""All of them: eight streams at once stay under 128 MiB."""


class MemoryBudget:
    """A number of bytes that are handed out and given back. Any thread may call."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._lock = threading.Lock()

    @property
    def taken_bytes(self) -> int:
        return self._taken_bytes

    def take(self, num_bytes: int) -> None:
        """Take without asking: the first part of a stream."""
        with self._lock:
            self._taken_bytes += num_bytes

    def take_nowait(self, num_bytes: int) -> bool:
        """Take where there is room; never waits."""
        with self._lock:
            if self._taken_bytes + num_bytes > self._limit_bytes:
                return False
            self._taken_bytes += num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._taken_bytes -= num_bytes


_SHARED: Final = PerProcess(lambda: MemoryBudget(_PROCESS_BYTES))


def shared_budget() -> MemoryBudget:
    """The one of this process."""
    return _SHARED.get()
