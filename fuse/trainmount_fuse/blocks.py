"""The block cache on disk: which blocks of which versions are here, fetching those that are not,
and the bound.

`filesystem` reads through it, `prefetch` fills it ahead. Every method may be called from any
thread. What is cached survives a remount. Least recently used pieces go first, in extents of 16
blocks, whether or not the file is open: a reader notices and fetches again. Bytes are checked
against their checksum when they come from the disk for the first time in a process and whenever
the kernel no longer has them in memory.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmount_files.volume import ByteRange
from trainmount_fuse.block_file import BlockFile, FileKey

__all__ = ["BlockCache", "CacheStatistics", "Fetch", "OnFetched"]

log = logging.getLogger(__name__)

Fetch = Callable[[ByteRange, memoryview], None]
"""Fills the buffer with exactly that range of the right version, or raises."""

OnFetched = Callable[[int, memoryview], None]
"""Told of each range that came from the store, in the thread that fetched it, as soon as it is
there: its offset in the file and its bytes, which are valid during the call only. Must not raise.
"""

_EXTENT_BLOCKS: Final = 16
_WHOLE_FILE: Final = -1
"""Extent number of a file from an earlier mount that was not opened yet: all of it at once."""

_MAX_IDLE_FILES: Final = 256
_FLOOR_CHECK_BYTES: Final = 64 << 20
_MAX_ATTEMPTS: Final = 8
_RWF_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters since the start, and what is on disk now."""

    cached_bytes: int
    fetched_bytes: int
    evicted_bytes: int
    num_bad_blocks: int
    """Blocks whose bytes on disk were not what had been written; each was fetched again."""


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
    ) -> None:
        """Take over what an earlier mount left. Raises OSError where `directory` cannot be used."""
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._block_size_bytes = block_size_bytes
        self._max_fetch_blocks = max(1, max_fetch_bytes // block_size_bytes)
        self._floor_bytes = free_disk_floor_bytes
        # Guards everything below. Taken before a file's lock, never after it.
        self._lock = threading.RLock()
        self._files: OrderedDict[str, BlockFile] = OrderedDict()
        self._extents: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._cached_bytes = 0
        self._fetched_bytes = 0
        self._evicted_bytes = 0
        self._num_bad_blocks = 0
        self._bytes_until_floor_check = 0
        self._is_low_on_disk = False
        directory.mkdir(parents=True, exist_ok=True)
        self._take_over()

    def open(self, key: FileKey) -> BlockFile:
        """The cached file, to be given back by `release`. Raises OSError."""
        digest = key.digest(self._block_size_bytes)
        with self._lock:
            file = self._files.get(digest)
            if file is None:
                file = BlockFile(self._directory, key, self._block_size_bytes)
                self._files[digest] = file
                self._cached_bytes -= self._extents.pop((digest, _WHOLE_FILE), 0)
                self._count(file, file.present())
            self._files.move_to_end(digest)
            file.users += 1
            return file

    def release(self, file: BlockFile) -> None:
        """Give back what `open` gave."""
        with self._lock:
            file.users -= 1
            self._close_idle()

    def retain(self, file: BlockFile) -> None:
        """One more `release` will come."""
        with self._lock:
            file.users += 1

    def read_nowait(self, file: BlockFile, offset: int, size: int) -> bytes | None:
        """The bytes, if they are here, checked, and in memory; else None. Never waits for a disk.

        The range must not be empty and must lie inside the file.
        """
        first, last = self._span(offset, size)
        evictions = file.num_evictions
        if not file.has(first, last) or file.is_verified.find(0, first, last + 1) >= 0:
            return None
        if not _is_resident(file.data_fd, offset, size):
            return None
        data = os.pread(file.data_fd, size, offset)
        if len(data) != size or file.num_evictions != evictions:
            return None
        with self._lock:
            self._touch(file, first)
        return data

    def read(
        self,
        file: BlockFile,
        offset: int,
        size: int,
        fetch: Fetch,
        *,
        on_fetched: OnFetched | None = None,
    ) -> bytes | bytearray:
        """Exactly that range, which must not be empty and must lie inside the file. Waits.

        Raises:
            what `fetch` raises.
        """
        first, last = self._span(offset, size)
        for _attempt in range(_MAX_ATTEMPTS):
            evictions = file.num_evictions
            try:
                fetched = self.ensure(file, first, last, fetch, on_fetched=on_fetched)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                break
            if not self._all_sound(file, [i for i in range(first, last + 1) if i not in fetched]):
                continue
            data = os.pread(file.data_fd, size, offset)
            if len(data) == size and file.has(first, last) and file.num_evictions == evictions:
                with self._lock:
                    self._touch(file, first)
                return data
        # No room to keep it, or thrown out as fast as it comes: the reader still gets its bytes.
        buffer = bytearray(size)
        fetch(ByteRange(offset, offset + size), memoryview(buffer))
        if on_fetched is not None:
            on_fetched(offset, memoryview(buffer))
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
        """Have the blocks `first` to `last`, both included, on disk; returns those fetched here.

        A block that another thread is fetching is waited for, not fetched twice.

        Raises:
            OSError: ENOSPC where nothing more can be kept.
            what `fetch` raises.
        """
        fetched: set[int] = set()
        wanted: list[int] = list(range(first, last + 1))
        while wanted:
            with file.lock:
                wanted = [index for index in wanted if not file.has(index, index)]
                mine = [index for index in wanted if index not in file.in_flight]
                others = {i: file.in_flight[i] for i in wanted if i in file.in_flight}
                ended = threading.Event()
                for index in mine:
                    file.in_flight[index] = ended
            try:
                for run in _runs(mine, self._max_fetch_blocks):
                    self._fetch_run(file, run, fetch, on_fetched)
                    fetched.update(run)
            finally:
                with file.lock:
                    for index in mine:
                        del file.in_flight[index]
                ended.set()
            # Own fetches end before others are waited for, so two threads never wait for each
            # other.
            for event in others.values():
                event.wait()
            wanted = list(others)
        return fetched

    def rekey(self, old: FileKey, new: FileKey) -> None:
        """The content of `old` is now that of `new`; what cannot be moved is fetched
        again later.
        """
        if old.size_bytes != new.size_bytes or old == new:
            return
        try:
            file = self.open(old)
        except OSError:
            return
        try:
            with self._lock, file.lock:
                present = file.present()
                digest = new.digest(self._block_size_bytes)
                if not present or digest in self._files:
                    return
                self._cached_bytes -= self._extents.pop((digest, _WHOLE_FILE), 0)
                self._uncount(file, present)
                self._files.pop(file.digest, None)
                try:
                    file.move(self._directory, new)
                finally:
                    self._files[file.digest] = file
                    self._count(file, present)
        except OSError:
            log.warning("Cached blocks could not follow a rename", exc_info=True)
        finally:
            self.release(file)

    def drop(self, key: FileKey) -> None:
        """Free everything kept of a version that nobody will ask for again."""
        digest = key.digest(self._block_size_bytes)
        with self._lock:
            if digest in self._files:
                self._evict_file(self._files[digest])
            elif (digest, _WHOLE_FILE) in self._extents:
                self._evict_unopened(digest)

    def cached_bytes_of(self, file: BlockFile) -> int:
        """Bytes of the file that are here."""
        return sum(file.length_of(index) for index in file.present())

    def free_space(self, needed_bytes: int) -> bool:
        """Throw out blocks until `needed_bytes` more fit above the floor; false where
        they cannot.
        """
        with self._lock:
            while _free_bytes(self._directory) - needed_bytes < self._floor_bytes:
                if not self._evict_oldest():
                    return False
            return True

    def statistics(self) -> CacheStatistics:
        """A snapshot."""
        with self._lock:
            return CacheStatistics(
                cached_bytes=self._cached_bytes,
                fetched_bytes=self._fetched_bytes,
                evicted_bytes=self._evicted_bytes,
                num_bad_blocks=self._num_bad_blocks,
            )

    def close(self) -> None:
        """Close every file. No other call may follow or be under way."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _span(self, offset: int, size: int) -> tuple[int, int]:
        return offset // self._block_size_bytes, (offset + size - 1) // self._block_size_bytes

    def _fetch_run(
        self, file: BlockFile, run: list[int], fetch: Fetch, on_fetched: OnFetched | None
    ) -> None:
        start = run[0] * self._block_size_bytes
        end = run[-1] * self._block_size_bytes + file.length_of(run[-1])
        # Room before bytes: what cannot be kept must not be asked for.
        self._make_room(end - start)
        buffer = memoryview(bytearray(end - start))
        fetch(ByteRange(start, end), buffer)
        if on_fetched is not None:
            on_fetched(start, buffer)
        with self._lock:
            self._fetched_bytes += end - start
        checksums = file.write(run[0], buffer)
        with self._lock, file.lock:
            file.mark_present(run[0], checksums)
            self._count(file, run)

    def _all_sound(self, file: BlockFile, indices: list[int]) -> bool:
        """Whether the blocks on disk are what was written; those that are not are thrown out."""
        num_bad = 0
        for index in indices:
            if file.is_sound(index):
                file.is_verified[index] = 1
            else:
                num_bad += 1
                self._discard_bad(file, index)
        return num_bad == 0

    def _discard_bad(self, file: BlockFile, index: int) -> None:
        with self._lock, file.lock:
            # Thrown out meanwhile, or being written again: then it was not bad, only not there.
            if file.has(index, index) and not file.is_sound(index):
                self._num_bad_blocks += 1
                log.warning(
                    "Cached block was damaged", extra={"path": file.key.path, "block": index}
                )
                self._uncount(file, file.clear(index, index))

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            while self._cached_bytes + num_bytes > self._capacity_bytes:
                if not self._evict_oldest():
                    raise OSError(errno.ENOSPC, "the block cache is too small for this read")
            self._bytes_until_floor_check -= num_bytes
            if self._is_low_on_disk or self._bytes_until_floor_check <= 0:
                self._bytes_until_floor_check = _FLOOR_CHECK_BYTES
                self._is_low_on_disk = not self.free_space(num_bytes)
                if self._is_low_on_disk:
                    raise OSError(errno.ENOSPC, "the cache's disk is at its reserve")

    def _count(self, file: BlockFile, indices: list[int]) -> None:
        for index in indices:
            extent = (file.digest, index // _EXTENT_BLOCKS)
            self._extents[extent] = self._extents.get(extent, 0) + file.length_of(index)
            self._cached_bytes += file.length_of(index)
        if indices:
            self._touch(file, indices[0])

    def _uncount(self, file: BlockFile, indices: list[int]) -> None:
        for index in indices:
            extent = (file.digest, index // _EXTENT_BLOCKS)
            left = self._extents.get(extent, 0) - file.length_of(index)
            self._cached_bytes -= file.length_of(index)
            if left > 0:
                self._extents[extent] = left
            else:
                self._extents.pop(extent, None)

    def _touch(self, file: BlockFile, index: int) -> None:
        extent = (file.digest, index // _EXTENT_BLOCKS)
        if extent in self._extents:
            self._extents.move_to_end(extent)

    def _evict_oldest(self) -> bool:
        """Throw out one extent; false where nothing is left."""
        for digest, number in self._extents:
            file = self._files.get(digest)
            if file is None:
                self._evict_unopened(digest)
                return True
            with file.lock:
                first = number * _EXTENT_BLOCKS
                last = min(first + _EXTENT_BLOCKS, file.num_blocks) - 1
                self._evicted(file, file.clear(first, last))
            if file.users == 0 and not file.present():
                self._forget_file(file)
            return True
        return False

    def _evicted(self, file: BlockFile, gone: list[int]) -> None:
        self._uncount(file, gone)
        self._evicted_bytes += sum(file.length_of(index) for index in gone)

    def _evict_file(self, file: BlockFile) -> None:
        with file.lock:
            if file.num_blocks:
                self._evicted(file, file.clear(0, file.num_blocks - 1))
        if file.users == 0:
            self._forget_file(file)

    def _forget_file(self, file: BlockFile) -> None:
        self._files.pop(file.digest, None)
        file.unlink()
        file.close()

    def _evict_unopened(self, digest: str) -> None:
        freed = self._extents.pop((digest, _WHOLE_FILE), 0)
        self._cached_bytes -= freed
        self._evicted_bytes += freed
        for suffix in (".index", ".data"):
            (self._directory / digest[:2] / f"{digest}{suffix}").unlink(missing_ok=True)

    def _close_idle(self) -> None:
        if len(self._files) <= _MAX_IDLE_FILES:
            return
        idle = [file for file in self._files.values() if file.users == 0]
        for file in idle[: len(self._files) - _MAX_IDLE_FILES]:
            present = file.present()
            if not present:
                self._forget_file(file)
                continue
            self._uncount(file, present)
            size = sum(file.length_of(index) for index in present)
            self._extents[file.digest, _WHOLE_FILE] = size
            self._cached_bytes += size
            del self._files[file.digest]
            file.close()

    def _take_over(self) -> None:
        found: list[tuple[float, str, int]] = []
        for index in self._directory.glob("??/*.index"):
            data = index.with_suffix(".data")
            try:
                size = data.stat().st_blocks * 512
                found.append((index.stat().st_mtime, index.stem, size))
            except FileNotFoundError:
                index.unlink(missing_ok=True)
        for _time, digest, size in sorted(found):
            self._extents[digest, _WHOLE_FILE] = size
            self._cached_bytes += size


def _runs(indices: list[int], max_length: int) -> list[list[int]]:
    """Ascending numbers cut into runs without gaps, none longer than `max_length`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1 and len(runs[-1]) < max_length:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _is_resident(fd: int, offset: int, size: int) -> bool:
    """Whether the first and last byte of the range are in the kernel's memory.

    Blocks go in and out of it whole enough that the ends speak for the middle; where not, a read
    waits for the disk once.
    """
    probe = bytearray(1)
    try:
        return (
            os.preadv(fd, [probe], offset, _RWF_NOWAIT) == 1
            and os.preadv(fd, [probe], offset + size - 1, _RWF_NOWAIT) == 1
        )
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return True
        raise


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
