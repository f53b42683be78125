"""How large the parts of a stream of unknown length are, and the memory they stand in. Used by
`writer.py`.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Final

from trainmount_files.transfer.budget import STREAM_BYTES, MemoryBudget
from trainmount_files.volume import MIB, Capabilities

__all__ = ["Part", "PartSizes", "anonymous"]

_STEPS: Final = 10
"""Part sizes double so many times at most: from 6 MiB to the 4 GiB that a store may take."""


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Part `n` of a stream has `size_of(n)` bytes; the last one fewer."""

    first_bytes: int
    max_part_bytes: int
    max_parts: int

    @classmethod
    def of(
        cls,
        capabilities: Capabilities,
        *,
        part_bytes: int | None,
        parallelism: int,
        size_bytes: int | None,
    ) -> PartSizes:
        """`part_bytes` is the caller's wish, `size_bytes` the whole size where it is known.

        Raises:
            ValueError: the store takes no parts of that size.
        """
        least, most = capabilities.min_part_bytes, capabilities.max_part_bytes
        if part_bytes is not None and not least <= part_bytes <= most:
            raise ValueError(f"part_bytes must be from {least} to {most}, got {part_bytes}")
        # One more is being filled than is on its way.
        wish = part_bytes or min(capabilities.part_bytes, STREAM_BYTES // (parallelism + 1))
        if size_bytes is not None:
            # Rounded up to a whole MiB, so that parts are not odd for nothing.
            needed = -(-size_bytes // capabilities.max_parts)
            if needed > wish:
                wish = -(-needed // MIB) * MIB
        return cls(min(max(wish, least), most), most, capabilities.max_parts)

    def size_of(self, part_number: int) -> int:
        """Doubles after each tenth of the parts: a long stream neither runs out of parts nor needs
        large ones from the start.
        """
        step = (part_number - 1) * _STEPS // self.max_parts
        return min(self.first_bytes << step, self.max_part_bytes)

    @property
    def total_bytes(self) -> int:
        """The longest stream."""
        return sum(self.size_of(number) for number in range(1, self.max_parts + 1))


class Part:
    """A part that is being filled, or sent. Used by one thread at a time.

    What is larger than a stream's memory stands in a nameless file of the temporary directory.
    """

    def __init__(self, size_bytes: int, budget: MemoryBudget) -> None:
        """The caller has taken `Part.memory_of(size_bytes)` from the budget."""
        self.size_bytes = size_bytes
        self.filled = 0
        self._budget = budget
        self._memory = self.memory_of(size_bytes)
        self._bytes = anonymous(size_bytes) if self._memory else _in_a_file(size_bytes)

    @staticmethod
    def memory_of(size_bytes: int) -> int:
        return size_bytes if size_bytes <= STREAM_BYTES else 0

    @property
    def is_full(self) -> bool:
        return self.filled == self.size_bytes

    def fill(self, data: memoryview) -> int:
        """Take in what there is room for; how many bytes that was."""
        count = min(len(data), self.size_bytes - self.filled)
        self._bytes[self.filled : self.filled + count] = data[:count]
        self.filled += count
        return count

    def content(self) -> memoryview:
        return memoryview(self._bytes)[: self.filled]

    def free(self) -> None:
        """Give the memory back; may be repeated."""
        # It goes with the last view of it: a failed request may have one in its traceback.
        self._bytes = _NOTHING
        self._budget.give_back(self._memory)
        self._memory = self.size_bytes = self.filled = 0


_NOTHING: Final = mmap.mmap(-1, 1)


def anonymous(size_bytes: int) -> mmap.mmap:
    """Memory that is taken page by page as it is written, and given back to the system as a whole:
    the allocator would keep it for its threads.
    """
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _in_a_file(size_bytes: int) -> mmap.mmap:
    with tempfile.TemporaryFile() as file:
        # All of it at once: a page for which the disk has no room would end the process.
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)
