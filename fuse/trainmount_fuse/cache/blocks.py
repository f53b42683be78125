"""The block cache: which blocks of which versions are here, fetching those that are not, and the
bound.

`reading` reads through it, `prefetch` fills it ahead. Every method may be called from any thread.
Blocks are readable from memory as soon as they have come, and are put on disk behind the reader
(`write_behind`). What is on disk survives a remount and is shared by all mounts of the user that
have the same cache directory (`shared_cells`); what was used longest ago goes first, in cells of
4 MiB, whether or not a file is open: a reader notices and fetches again. Bytes are checked
against their checksum when they come from the disk for the first time in a process and whenever
the kernel no longer has them in memory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trainmount_files.volume import ByteRange
from trainmount_fuse.cache.block_file import BlockFile, FileKey, HeldRange
from trainmount_fuse.cache.buffers import padded_size
from trainmount_fuse.cache.disk_blocks import DiskBlocks
from trainmount_fuse.cache.fetching import Fetch, Fetching, OnFetched
from trainmount_fuse.cache.shared_cells import SharedCells
from trainmount_fuse.cache.shared_memory import SharedMemory
from trainmount_fuse.cache.statistics import CacheStatistics
from trainmount_fuse.cache.write_behind import WriteBehind
from trainmount_fuse.memory import MemoryBudget

__all__ = ["BlockCache", "Fetch", "OnFetched"]

log = logging.getLogger(__name__)

_CELL_BYTES: Final = 4 << 20
"""Small enough that little of use goes with what is old, large enough that a cache of a terabyte
has few of them. Mounts share a cache file if their cells are of one size: all with a bound of
256 MiB or more whose blocks are not larger than this and divide it.
"""

_MIN_CELLS: Final = 64

_PAGE: Final = 4096
_MAX_IDLE_FILES: Final = 1024
_MAX_ATTEMPTS: Final = 8
_CLOSE_SECONDS: Final = 5.0
_REMOVED_AT_ONCE: Final = 256


class BlockCache:
    """All cached blocks of one mount."""

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int,
        block_size_bytes: int,
        max_fetch_bytes: int,
        free_disk_floor_bytes: int,
        source: str = "",
        memory: MemoryBudget | None = None,
        cell_bytes: int = _CELL_BYTES,
    ) -> None:
        """Join what other mounts of `directory` use, and what earlier ones left.

        `source` tells apart volumes that have files of the same path and version. A directory that
        cannot be used is no error: then nothing is kept on disk.
        """
        self._directory = directory
        self._block_size_bytes = block_size_bytes
        self._floor_bytes = free_disk_floor_bytes
        self._source = source
        block = padded_size(block_size_bytes)
        cell_bytes = max(block, min(cell_bytes, capacity_bytes // _MIN_CELLS) // block * block)
        self._cell_bytes = cell_bytes
        self._cells = _joined(directory, cell_bytes, capacity_bytes, free_disk_floor_bytes)
        self._memory = memory or MemoryBudget()
        self._held = WriteBehind(self._cells, self._memory)
        max_blocks = max(1, max_fetch_bytes // block_size_bytes)
        self._fetching = Fetching(self._cells, self._held, max_blocks)
        self._disk = DiskBlocks(self._cells, self._held.pool)
        # Guards everything below. Taken before all other locks of the cache, never after them.
        self._lock = threading.Lock()
        self._files: dict[tuple[int, int], BlockFile] = {}
        self._idle: OrderedDict[tuple[int, int], BlockFile] = OrderedDict()
        self._is_closed = False
        self._num_hits = 0
        self._num_misses = 0
        self._dropped_bytes = 0

    def open(self, key: FileKey) -> BlockFile:
        """The cached file, to be given back by `release`. Touches no disk."""
        name = key.name(self._source, self._block_size_bytes)
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = BlockFile(key, name, self._block_size_bytes, self._cells)
                self._files[name] = file
            self._idle.pop(name, None)
            file.users += 1
            return file

    def release(self, file: BlockFile) -> None:
        """Give back what `open` gave."""
        with self._lock:
            file.users -= 1
            if file.users:
                return
            self._idle[file.name] = file
            if len(self._idle) > _MAX_IDLE_FILES:
                name, oldest = self._idle.popitem(last=False)
                if oldest.held:
                    self._idle[name] = oldest
                else:
                    del self._files[name]

    def retain(self, file: BlockFile) -> None:
        """One more `release` will come."""
        with self._lock:
            self._idle.pop(file.name, None)
            file.users += 1

    def read_nowait(
        self, file: BlockFile, offset: int, size: int, *, is_hit: bool = True
    ) -> bytes | bytearray | memoryview | None:
        """The bytes, if they are here, checked, and in memory; else None. Never waits for a disk.
        Counts as a read that needed nothing from the store, or with `is_hit` false as one that did.

        The range must not be empty and must lie inside the file.
        """
        data = self._copy(file, offset, size, can_wait=False)
        if data is not None:
            self._count_read(is_hit=is_hit)
        return data

    def read(
        self,
        file: BlockFile,
        offset: int,
        size: int,
        fetch: Fetch,
        *,
        before_copy: Callable[[], None] | None = None,
    ) -> bytes | bytearray | memoryview:
        """Exactly that range, which must not be empty and must lie inside the file. Waits, but for
        no disk where the store can give the bytes. `before_copy` is called, maybe more than once,
        when nothing is waited for any more and the answer takes memory of its own.

        Raises:
            what `fetch` raises.
        """
        first, last = self._span(offset, size)
        has_missed = False
        for _attempt in range(_MAX_ATTEMPTS):
            has_missed |= bool(self._fetching.have(file, first, last, fetch, None, is_ahead=False))
            if before_copy is not None:
                before_copy()
            data = self._copy(file, offset, size, can_wait=True)
            if data is not None:
                self._count_read(is_hit=not has_missed)
                return data
        # Thrown out as fast as it comes: the reader still gets its bytes.
        self._memory.take(size)
        try:
            buffer = bytearray(size)
            fetch(ByteRange(offset, offset + size), memoryview(buffer))
        finally:
            self._memory.give_back(size)
        self._count_read(is_hit=False)
        return buffer

    def ensure(
        self,
        file: BlockFile,
        first: int,
        last: int,
        fetch: Fetch,
        *,
        on_fetched: OnFetched | None = None,
    ) -> set[int]:
        """Have the blocks `first` to `last`, both included, here; returns those fetched now.

        A block that another thread or mount is fetching is waited for, not fetched twice. Waits
        for memory before it fetches, so that blocks come as fast as they are read or written.

        Raises:
            OSError: ENOSPC after 10 s without memory.
            what `fetch` raises.
        """
        return self._fetching.have(file, first, last, fetch, on_fetched, is_ahead=True)

    def will_need(self, file: BlockFile, last: int) -> None:
        """Read-ahead from the disk, for blocks up to `last` that are here. Never waits for it."""
        self._disk.will_need(file, last)

    def begin_fetch(
        self, file: BlockFile, first: int, last: int, shared: SharedMemory
    ) -> HeldRange | None:
        """A part of `shared` for another process to fetch the blocks into, until `end_fetch`. Never
        waits; None where a block is here or on its way, or where there is no room now.
        """
        return self._fetching.begin(file, first, last, shared)

    def end_fetch(self, held: HeldRange, *, is_there: bool) -> None:
        """Nobody writes there any more; whether the bytes have come."""
        self._fetching.end(held, is_there=is_there)

    def load(self, file: BlockFile, first: int, last: int, on_loaded: OnFetched) -> bool:
        """Tell of the bytes of blocks that are here, in one piece; false, and nothing is told,
        where one is not. Read-ahead from the disk: waits for memory as `ensure` does.

        Raises:
            OSError: ENOSPC after 10 s without memory.
        """
        loaded = self._held.take(file, first, last, is_ahead=True)
        try:
            size = loaded.num_unread_bytes
            index = first
            while index <= last:
                num_blocks = self._load_run(file, index, loaded)
                if not num_blocks:
                    return False
                index += num_blocks
            on_loaded(file.offset_of(first), loaded.buffer.view[:size])
            return True
        finally:
            self._held.discard(loaded)

    def rekey(self, old: FileKey, new: FileKey) -> None:
        """The content of `old` is now that of `new`; what cannot be moved is fetched
        again later.
        """
        if old.size_bytes != new.size_bytes or old == new:
            return
        source, destination = self.open(old), self.open(new)
        try:
            self._held.rekey(source, destination)
            if self._cells is not None:
                keys = [(source.block_key(i), destination.block_key(i)) for i in _all(source)]
                for start in range(0, len(keys), _REMOVED_AT_ONCE):
                    self._cells.rename(keys[start : start + _REMOVED_AT_ONCE])
        except OSError:
            log.warning("Cached blocks could not follow a rename", exc_info=True)
        finally:
            self.release(source)
            self.release(destination)

    def drop(self, key: FileKey) -> None:
        """Free everything kept of a version that nobody will ask for again."""
        file = self.open(key)
        try:
            num_bytes = self.cached_bytes_of(file)
            with self._lock:
                self._dropped_bytes += num_bytes
            self._held.drop(file)
            if self._cells is not None:
                keys = [file.block_key(index) for index in _all(file)]
                for start in range(0, len(keys), _REMOVED_AT_ONCE):
                    self._cells.remove(keys[start : start + _REMOVED_AT_ONCE])
                self._held.tidy_soon()
        except OSError:
            log.warning("Cached blocks could not be dropped", exc_info=True)
        finally:
            file.verified.clear()
            self.release(file)

    def cached_bytes_of(self, file: BlockFile) -> int:
        """Bytes of the file that are here."""
        return sum(file.length_of(index) for index in _all(file) if file.has(index, index))

    def space_for(self, size_bytes: int) -> int:
        """Space that a file of that size takes at most, with what is lost where blocks do not fill
        a cell.
        """
        block, cell = self._block_size_bytes, self._cell_bytes
        num_whole, tail = size_bytes // block, padded_size(size_bytes % block)
        if not num_whole:
            return -(-tail * cell // (cell - tail + _PAGE))
        return num_whole * block + tail + (block if tail and cell > block else 0)

    def free_space(self, needed_bytes: int) -> bool:
        """Throw out blocks until `needed_bytes` more fit above the floor; false where
        they cannot.
        """
        try:
            if self._cells is not None:
                return self._cells.free_space(needed_bytes)
            status = os.statvfs(self._directory)
        except OSError:
            return False
        return status.f_bavail * status.f_frsize - needed_bytes >= self._floor_bytes

    def flush(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Wait until what is held is on disk or lost; false where it is not after that time."""
        return self._held.flush(seconds)

    def statistics(self) -> CacheStatistics:
        """A snapshot."""
        cells = self._cells
        return CacheStatistics(
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            cached_bytes=0 if cells is None else cells.live_bytes(),
            space_bytes=0 if cells is None else cells.space_bytes(),
            limit_bytes=0 if cells is None else cells.limit_bytes,
            fetched_bytes=self._fetching.fetched_bytes,
            evicted_bytes=self._dropped_bytes + (0 if cells is None else cells.evicted_bytes),
            num_bad_blocks=self._disk.num_bad_blocks,
            num_files=len(self._files),
            held_bytes=self._held.held_bytes,
            dropped_bytes=self._held.dropped_bytes,
        )

    def close(self) -> None:
        """Write what is held, for 5 s at most, and leave. No other call but this may follow or be
        under way.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._held.close(_CLOSE_SECONDS)
        if self._cells is not None:
            self._cells.close()

    def _span(self, offset: int, size: int) -> tuple[int, int]:
        return offset // self._block_size_bytes, (offset + size - 1) // self._block_size_bytes

    def _count_read(self, *, is_hit: bool) -> None:
        with self._lock:
            self._num_hits += is_hit
            self._num_misses += not is_hit

    def _copy(
        self, file: BlockFile, offset: int, size: int, *, can_wait: bool
    ) -> bytes | bytearray | memoryview | None:
        first, last = self._span(offset, size)
        if first == last:
            start = offset - file.offset_of(first)
            with file.lock:
                held = file.held.get(first)
                data = None if held is None else bytes(held.view(first)[start : start + size])
            if held is not None:
                self._was_read(held, size)
                return data
            if not can_wait and first not in file.verified:
                return self._disk.copy_small(file, first, start, size)
        if not can_wait and not all(
            i in file.held or i in file.verified for i in range(first, last + 1)
        ):
            return None
        buffer = bytearray(size)
        view = memoryview(buffer)
        is_whole = True
        for index in range(first, last + 1):
            at = file.offset_of(index)
            start = max(0, offset - at)
            end = min(file.length_of(index), offset + size - at)
            into = view[at + start - offset : at + end - offset]
            # To the end, so that all that are bad are fetched again together.
            is_whole &= self._copy_block(file, index, start, into, can_wait=can_wait)
        return buffer if is_whole else None

    def _copy_block(
        self, file: BlockFile, index: int, start: int, into: memoryview, *, can_wait: bool
    ) -> bool:
        with file.lock:
            held = file.held.get(index)
            if held is not None:
                into[:] = held.view(index)[start : start + len(into)]
        if held is not None:
            self._was_read(held, len(into))
            return True
        place = file.place_of(index)
        if place is None or self._cells is None:
            return False
        self._cells.touch(place)
        if index in file.verified and self._cells.read_nowait(place, start, into):
            return self._cells.is_current(place)
        return can_wait and self._disk.copy(file, index, place, start, into)

    def _load_run(self, file: BlockFile, first: int, loaded: HeldRange) -> int:
        """Read blocks from `first` on that stand together, or one; how many, 0 for failure."""
        num_blocks = self._disk.load(file, first, loaded)
        if num_blocks is not None:
            return num_blocks
        return int(self._copy_block(file, first, 0, loaded.view(first), can_wait=True))

    def _was_read(self, held: HeldRange, num_bytes: int) -> None:
        held.is_touched = True
        held.num_unread_bytes -= num_bytes
        if held.num_unread_bytes <= 0:
            self._held.was_read(held)


def _joined(
    directory: Path, cell_bytes: int, capacity_bytes: int, free_disk_floor_bytes: int
) -> SharedCells | None:
    try:
        return SharedCells(
            directory,
            cell_bytes=cell_bytes,
            capacity_bytes=capacity_bytes,
            free_disk_floor_bytes=free_disk_floor_bytes,
        )
    except OSError as error:
        fields = {"directory": str(directory), "error": str(error)}
        log.warning("The cache directory cannot be used; nothing is kept on disk", extra=fields)
        return None


def _all(file: BlockFile) -> range:
    return range(file.num_blocks)
