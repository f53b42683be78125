"""Page-aligned memory for blocks on their way, used again and again: fresh memory would cost a page
fault for every 4 KiB, more than copying the bytes.
"""

from __future__ import annotations

import mmap
import threading
from typing import Final

from trainmount_fuse.memory import MemoryBudget

__all__ = ["Buffer", "BufferPool", "padded_size"]

_PAGE: Final = 4096
_MAX_IDLE_BYTES: Final = 32 << 20


class Buffer:
    """Some memory; who has it from `take` may use it until `put_back`."""

    __slots__ = ("size_bytes", "view")

    def __init__(self, size_bytes: int) -> None:
        # Neither shared, which is slower to fault in, nor of huge pages: a virtual machine takes
        # those from memory that it never used before, and pays its host for each (half as much
        # processor time again for a cold read).
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size_bytes = size_bytes
        self.view = memoryview(memory)


class BufferPool:
    """Buffers that wait to be used again, 32 MiB of them at most, within the mount's memory.
    Thread-safe.
    """

    def __init__(self, memory: MemoryBudget) -> None:
        """What waits is taken from `memory`; whoever has a buffer accounts for it himself."""
        self._memory = memory
        self._lock = threading.Lock()
        self._idle: dict[int, list[Buffer]] = {}
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """What waits to be used again."""
        return self._idle_bytes

    @staticmethod
    def size_for(num_bytes: int) -> int:
        """The size of the buffer that `take` gives: the next power of two."""
        return max(_PAGE, 1 << (num_bytes - 1).bit_length())

    def take(self, num_bytes: int) -> Buffer:
        """At least so many bytes, with anything in them."""
        size = self.size_for(num_bytes)
        with self._lock:
            idle = self._idle.get(size)
            if idle:
                self._idle_bytes -= size
                self._memory.give_back(size)
                return idle.pop()
        return Buffer(size)

    def try_take(self, size_bytes: int) -> Buffer | None:
        """One of exactly that size, with its share of memory; none where a new one has no
        room.
        """
        with self._lock:
            idle = self._idle.get(size_bytes)
            if idle:
                self._idle_bytes -= size_bytes
                return idle.pop()
        return Buffer(size_bytes) if self._memory.try_take(size_bytes) else None

    def put_back(self, buffer: Buffer) -> None:
        """Nobody looks at the buffer any more: the next `take` may give it to somebody else."""
        size = buffer.size_bytes
        with self._lock:
            if self._idle_bytes + size <= _MAX_IDLE_BYTES and self._memory.try_take(size):
                self._idle_bytes += size
                self._idle.setdefault(size, []).append(buffer)

    def trim(self) -> None:
        """Give the memory of all that wait back to the system."""
        with self._lock:
            self._idle.clear()
            self._memory.give_back(self._idle_bytes)
            self._idle_bytes = 0


def padded_size(num_bytes: int) -> int:
    """Up to whole pages, the unit of reading and writing around the kernel's memory."""
    return -(-num_bytes // _PAGE) * _PAGE
