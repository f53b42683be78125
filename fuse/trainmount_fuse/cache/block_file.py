"""One version of one file as this process sees it: which of its blocks are in memory, being
fetched, or on disk. Only `blocks` makes these.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field

from trainmount_fuse.cache.buffers import Buffer, padded_size
from trainmount_fuse.cache.cache_table import BlockKey, Place
from trainmount_fuse.cache.shared_cells import SharedCells

__all__ = ["BlockFile", "FileKey", "HeldRange"]


@dataclass(frozen=True, slots=True)
class FileKey:
    """What a cached file is the content of, within its source."""

    path: str
    version: str
    size_bytes: int

    stored_at_ns: int = field(default=0, compare=False)
    """When the store got it; 0 where nobody knows."""

    def name(self, source: str, block_size_bytes: int) -> tuple[int, int]:
        """128 bits that stand for it. Another source or block size is another file."""
        parts = (source, self.path, self.version, str(self.size_bytes), str(block_size_bytes))
        digest = hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


class HeldRange:
    """Fetched blocks that are in memory. Belongs to `write_behind`, whose lock guards it."""

    __slots__ = (
        "buffer",
        "file",
        "first",
        "has_claim",
        "is_ahead",
        "is_dropped",
        "is_let_go",
        "is_touched",
        "is_writing",
        "last",
        "num_pins",
        "num_unread_bytes",
        "written_at",
        "written_file",
    )

    def __init__(self, file: BlockFile, first: int, last: int, buffer: Buffer) -> None:
        self.file = file
        self.first = first
        self.last = last
        self.buffer = buffer
        self.num_unread_bytes = file.offset_of(last) + file.length_of(last) - file.offset_of(first)
        """What no reader has taken yet."""

        self.num_pins = 0
        """Who looks at the bytes without the lock: the buffer is not used again meanwhile."""

        self.is_let_go = False
        self.is_ahead = False
        """Nobody asked for the bytes yet when they were fetched."""

        self.is_touched = False
        """A reader took some."""

        self.has_claim = False
        self.is_writing = False
        self.is_dropped = False
        self.written_file = file
        """Whose blocks are published while `is_writing`; `file` may change meanwhile."""

        self.written_at = 0.0

    @property
    def may_be_lost(self) -> bool:
        """Losing the bytes costs nobody a second fetch now."""
        return self.num_unread_bytes <= 0 or (self.is_touched and not self.is_ahead)

    def view(self, index: int) -> memoryview:
        """The bytes of a block."""
        start = self.file.offset_of(index) - self.file.offset_of(self.first)
        return self.buffer.view[start : start + self.file.length_of(index)]

    def padded_view(self, first: int, last: int) -> memoryview:
        """The bytes of some of the blocks, up to a whole page."""
        file = self.file
        start = file.offset_of(first) - file.offset_of(self.first)
        end = file.offset_of(last) - file.offset_of(self.first) + file.length_of(last)
        return self.buffer.view[start : padded_size(end)]


class BlockFile:
    """The blocks of one `FileKey`."""

    def __init__(
        self,
        key: FileKey,
        name: tuple[int, int],
        block_size_bytes: int,
        cells: SharedCells | None,
    ) -> None:
        self.key = key
        self.name = name
        self.block_size_bytes = block_size_bytes
        self.num_blocks = -(-key.size_bytes // block_size_bytes)
        self.users = 0
        """Open inodes and running fetches that hold this object; guarded by the cache's lock."""

        self.lock = threading.Lock()
        """Guards `in_flight` and `held`; never held during a disk access."""

        self.in_flight: dict[int, threading.Event] = {}
        """Blocks that some thread is fetching; the event is set when it has ended, well or not."""

        self.held: dict[int, HeldRange] = {}
        """Blocks that are in memory. Their bytes are looked at under `lock` only, so that a buffer
        which is in no `held` any more can be used again.
        """

        self.verified: dict[int, Place] = {}
        """Places whose bytes had the right checksum when this process read them through the
        kernel's memory, where they may be still.
        """

        self._cells = cells

    def has(self, first: int, last: int) -> bool:
        """Whether the blocks `first` to `last`, both included, are here. Touches no disk; any
        thread may ask.
        """
        return all(
            index in self.held or self.place_of(index) is not None
            for index in range(first, last + 1)
        )

    def place_of(self, index: int) -> Place | None:
        """Where a block is on disk."""
        if self._cells is None:
            return None
        place = self.verified.get(index)
        if place is not None:
            if self._cells.is_current(place):
                return place
            self.verified.pop(index, None)
        place = self._cells.find(self.block_key(index))
        # A wrong length is a damaged table.
        return place if place is not None and place.length == self.length_of(index) else None

    def block_key(self, index: int) -> BlockKey:
        """The block's name in the table."""
        return BlockKey(*self.name, index)

    def offset_of(self, index: int) -> int:
        """Where a block begins."""
        return index * self.block_size_bytes

    def length_of(self, index: int) -> int:
        """Bytes of a block; only the last is shorter."""
        return min(self.block_size_bytes, self.key.size_bytes - index * self.block_size_bytes)
