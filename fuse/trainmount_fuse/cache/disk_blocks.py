"""Blocks out of the cache file, checked. Called by `blocks`."""

from __future__ import annotations

import logging
import threading
from typing import Final

import xxhash

from trainmount_fuse.cache.block_file import BlockFile, HeldRange
from trainmount_fuse.cache.buffers import BufferPool, padded_size
from trainmount_fuse.cache.cache_table import Place
from trainmount_fuse.cache.shared_cells import SharedCells

__all__ = ["DiskBlocks"]

log = logging.getLogger(__name__)

_MAX_DISK_READS: Final = 8
"""Blocks being read from disk at once, each in a buffer of a block: more makes no disk faster."""

_DIRECT_BYTES: Final = 512 << 10
"""Whole blocks from this size on are read around the kernel's memory: the kernel keeps them for the
mount itself, once is enough. Smaller ones lie side by side, and its read-ahead brings the next.
"""

_SMALL_BYTES: Final = 256 << 10
"""Up to here a block is read and checked in the event loop, in some 0.05 ms."""


class DiskBlocks:
    """What is on disk of the files of one mount. Any thread; a damaged block is forgotten."""

    def __init__(self, cells: SharedCells | None, pool: BufferPool) -> None:
        self._cells = cells
        self._pool = pool
        self._reads = threading.BoundedSemaphore(_MAX_DISK_READS)
        self._lock = threading.Lock()
        self.num_bad_blocks = 0

    def will_need(self, file: BlockFile, last: int) -> None:
        """Let the kernel read the blocks up to `last` that are on disk. Waits for none."""
        for index in range(last + 1):
            place = None if index in file.held else file.place_of(index)
            if place is not None and self._cells is not None:
                # What comes from the disk now was not checked yet.
                file.verified.pop(index, None)
                self._cells.will_need(place)

    def copy_small(self, file: BlockFile, index: int, start: int, size: int) -> memoryview | None:
        """Of a block that costs less to check than to hand on to a thread, if the kernel has it."""
        place = file.place_of(index)
        if self._cells is None or place is None or place.length > _SMALL_BYTES:
            return None
        data = memoryview(bytearray(place.length))
        self._cells.touch(place)
        is_here = self._cells.read_nowait(place, 0, data)
        if not is_here or xxhash.xxh3_64_intdigest(data) != place.checksum:
            # A thread finds out which, and what to do.
            return None
        if not self._cells.is_current(place):
            return None
        file.verified[index] = place
        return data[start : start + size]

    def copy(self, file: BlockFile, index: int, place: Place, start: int, into: memoryview) -> bool:
        """Fill `into` from `start` of a block on; whether its bytes are right and still its own."""
        around = place.length == len(into) >= _DIRECT_BYTES
        size = padded_size(place.length)
        with self._reads:
            buffer = self._pool.take(size)
            is_right = self._read(file, index, place, buffer.view[:size], around)
            if is_right:
                into[:] = buffer.view[start : start + len(into)]
            self._pool.put_back(buffer)
        if is_right and not around:
            file.verified[index] = place
        return is_right

    def load(self, file: BlockFile, first: int, loaded: HeldRange) -> int | None:
        """Fill the range from `first` on with blocks that stand together, or with one: how many, 0
        for failure, None where the first is not on disk alone.
        """
        places: list[Place] = []
        for index in range(first, loaded.last + 1):
            place = None if index in file.held else file.place_of(index)
            if place is None:
                break
            if places and (place.length < _DIRECT_BYTES or not place.follows(places[-1])):
                break
            places.append(place)
            if place.length < _DIRECT_BYTES:
                break
        if not places or self._cells is None:
            return None
        if len(places) > 1:
            pages = loaded.padded_view(first, first + len(places) - 1)
            if self._cells.read_together(places, pages):
                return len(places)
        # One by one, to find the one that is damaged.
        self._cells.touch(places[0])
        around = places[0].length >= _DIRECT_BYTES
        pages = loaded.padded_view(first, first)
        return int(self._read(file, first, places[0], pages, around))

    def _read(
        self, file: BlockFile, index: int, place: Place, pages: memoryview, around: bool
    ) -> bool:
        """Whether the pages are the block's now."""
        assert self._cells is not None
        try:
            is_right = self._cells.read(place, pages, around_memory=around)
        except OSError as error:
            log.warning("The block cache cannot be read", extra={"error": str(error)})
            is_right = False
        if not self._cells.is_current(place):
            return False
        if not is_right:
            self._forget(file, index, place)
        return is_right

    def _forget(self, file: BlockFile, index: int, place: Place) -> None:
        assert self._cells is not None
        key = file.block_key(index)
        with self._lock:
            file.verified.pop(index, None)
            # Found by another thread too, or written anew meanwhile: then it is not there.
            if self._cells.find(key) != place:
                return
            self.num_bad_blocks += 1
            try:
                self._cells.remove([key])
            except OSError:
                log.debug("A damaged block stays until it is thrown out", exc_info=True)
        log.warning("Cached block was damaged", extra={"path": file.key.path, "block": index})
