"""Memory that a child process writes to and this one reads from: no byte that it fetches has to be
sent. Made by `reads.fetch_process` before the fork, handed out by `write_behind`.
"""

from __future__ import annotations

import mmap
from bisect import bisect

from trainmount_fuse.cache.buffers import Buffer, padded_size

__all__ = ["SharedBuffer", "SharedMemory"]


class SharedBuffer(Buffer):
    """A part of a `SharedMemory`; who has it from `try_take` may use it until `put_back`."""

    __slots__ = ("home", "offset")

    def __init__(self, home: SharedMemory, offset: int, view: memoryview) -> None:
        self.home = home
        self.offset = offset
        self.size_bytes = len(view)
        self.view = view


class SharedMemory:
    """Room that this process and those it forks afterwards have in common. Only what is handed out
    takes memory.

    Used under the lock of who hands it out.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError."""
        self._memory = mmap.mmap(-1, num_bytes)
        self.view = memoryview(self._memory)
        # The gaps in the order of their places: where each begins, and where it ends.
        self._starts = [0]
        self._ends = [num_bytes]

    def try_take(self, num_bytes: int) -> SharedBuffer | None:
        """That many bytes in whole pages, in the first gap that is large enough; None where there
        is none.
        """
        size = padded_size(num_bytes)
        gaps = enumerate(zip(self._starts, self._ends, strict=True))
        index = next((index for index, (start, end) in gaps if end - start >= size), None)
        if index is None:
            return None
        start = self._starts[index]
        if self._ends[index] - start == size:
            del self._starts[index], self._ends[index]
        else:
            self._starts[index] = start + size
        return SharedBuffer(self, start, self.view[start : start + size])

    def put_back(self, buffer: SharedBuffer) -> None:
        """Nobody looks at the buffer any more, in no process: its memory is the system's again."""
        start, end = buffer.offset, buffer.offset + buffer.size_bytes
        self._memory.madvise(mmap.MADV_REMOVE, start, buffer.size_bytes)
        index = bisect(self._starts, start)
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        if index + 1 < len(self._starts) and self._starts[index + 1] == end:
            del self._starts[index + 1], self._ends[index]
        if index and self._ends[index - 1] == start:
            del self._starts[index], self._ends[index - 1]
