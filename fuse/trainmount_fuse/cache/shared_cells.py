"""The file that holds the cached bytes of a directory, shared by every process of the user that
mounts something with that cache directory.

One file is one truth: its table (`cache_table`), its locks and its bytes stand and fall together,
so a file that is removed while it is used goes on serving those who have it open, and nobody else.
A cell is handed to one process (`begin_cell`), written, its blocks published one by one, and
sealed. Cells of a process that died are sealed by the next that joins. Any thread may call.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import xxhash

from trainmount_fuse.cache.cache_table import BlockKey, CacheTable, CellState, Geometry, Place
from trainmount_fuse.cache.range_locks import RangeLocks

__all__ = ["MUTEX", "SharedCells"]

log = logging.getLogger(__name__)

# Ranges of locks, where no byte of the file will ever be.
MUTEX: Final = 1 << 62
"""Whoever changes the table holds this byte."""

_MEMBERS: Final = MUTEX + 1
_CLAIMS: Final = 1 << 61
_CLAIMED_BLOCKS: Final = 1 << 20
_CLAIMED_FILES: Final = 1 << 40

_MUTEX_SECONDS: Final = 2.0
"""A process that was stopped while it changed the table must not stop the others: they do without
the cache meanwhile.
"""

_MUTEX_POLL_SECONDS: Final = 0.0002
_MADE_SECONDS: Final = 1.5
"""How long another process may take to look for the file or make it. Longer than that, this mount
keeps nothing on disk: its programs wait meanwhile.
"""

_MADE_POLL_SECONDS: Final = 0.005
_MAX_TRIMMED: Final = 64
"""Cells given back to the disk in one go, so that nobody holds the mutex for long."""

_RWF_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class SharedCells:
    """One cache file, as one process sees it."""

    def __init__(
        self,
        directory: Path,
        *,
        cell_bytes: int,
        capacity_bytes: int,
        free_disk_floor_bytes: int,
    ) -> None:
        """Join the file, or make it. Raises OSError where that cannot be."""
        self._directory = directory
        self._cell_bytes = cell_bytes
        self._floor_bytes = free_disk_floor_bytes
        # Threads first, then processes.
        self._thread_mutex = threading.Lock()
        self._victims: deque[tuple[int, int]] = deque()
        self._evicted_bytes = 0
        path = directory / f"blocks-{cell_bytes}.cache"
        with _made_alone(directory):
            fd, geometry = _open_file(path, capacity_bytes, cell_bytes)
        self._fd = fd
        try:
            self._data_at = geometry.table_bytes
            # What stands behind a block may just be written, around the kernel's memory: what the
            # kernel read of it by itself would be taken for damage later.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            # Around the kernel's memory; the same descriptor where that cannot be.
            self._direct_fd = _open_direct(fd)
            self._table = CacheTable(fd, geometry)
            self._locks = RangeLocks(fd)
            with self._mutex():
                self._owner = self._join()
                self._table.set_limit(self._owner, capacity_bytes)
        except BaseException:
            os.close(fd)
            raise

    @property
    def cell_bytes(self) -> int:
        """Size of a cell, the unit of eviction."""
        return self._cell_bytes

    @property
    def evicted_bytes(self) -> int:
        """What this process threw out."""
        return self._evicted_bytes

    def close(self) -> None:
        """Leave. No other call may follow or be under way."""
        with self._mutex():
            self._seal_cells_of(self._owner)
            self._table.set_limit(self._owner, 0)
        self._table.close()
        if self._direct_fd != self._fd:
            os.close(self._direct_fd)
        os.close(self._fd)

    def return_memory(self) -> None:
        """Nobody asks for much now: do without the table in memory of our own."""
        self._table.let_pages_go()

    def find(self, key: BlockKey) -> Place | None:
        """Where a block is, whoever put it there; None where it is not."""
        return self._table.find(key)

    def is_current(self, place: Place) -> bool:
        """Whether the place has still the same bytes: what was read there before this is right."""
        return self._table.is_current(place)

    def touch(self, place: Place) -> None:
        """The place was used just now."""
        self._table.touch(place.cell)

    def write(self, cell: int, offset: int, pages: list[memoryview]) -> None:
        """Put whole pages of page-aligned memory into a cell of ours, one piece behind the other.

        Raises OSError.
        """
        position = self._position(cell) + offset
        try:
            written = os.pwritev(self._direct_fd, pages, position)
        except OSError as error:
            if error.errno != errno.EINVAL or self._direct_fd == self._fd:
                raise
            # A file system that opens files so, but does not write them.
            os.close(self._direct_fd)
            self._direct_fd = self._fd
            written = os.pwritev(self._direct_fd, pages, position)
        if written != sum(map(len, pages)):
            raise OSError(errno.ENOSPC, "the block cache's disk took a part of a write")

    def read(self, place: Place, pages: memoryview, *, around_memory: bool) -> bool:
        """Fill page-aligned memory with a block and what is left of its last page; false where the
        bytes are not there or not right. `around_memory`: leave no copy in the kernel.

        Wrong bytes mean nothing where the place is not current any more.
        """
        position = self._position(place.cell) + place.offset
        fd = self._direct_fd if around_memory else self._fd
        if os.preadv(fd, [pages], position) < place.length:
            return False
        return xxhash.xxh3_64_intdigest(pages[: place.length]) == place.checksum

    def read_together(self, places: list[Place], pages: memoryview) -> bool:
        """As `read`, around the kernel's memory, blocks that stand one behind the other; whether
        all are there, right and current.
        """
        self.touch(places[0])
        position = self._position(places[0].cell) + places[0].offset
        if os.preadv(self._direct_fd, [pages], position) < len(pages):
            return False
        start = places[0].offset
        return all(
            xxhash.xxh3_64_intdigest(pages[one.offset - start :][: one.length]) == one.checksum
            and self._table.is_current(one)
            for one in places
        )

    def read_nowait(self, place: Place, start: int, into: memoryview) -> bool:
        """Fill `into` from `start` of a block on, if the kernel has it in memory."""
        position = self._position(place.cell) + place.offset + start
        try:
            return os.preadv(self._fd, [into], position, _RWF_NOWAIT) == len(into)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                return False
            raise

    def will_need(self, place: Place) -> None:
        """Let the kernel begin to read a block into its memory."""
        position = self._position(place.cell) + place.offset
        os.posix_fadvise(self._fd, position, place.length, os.POSIX_FADV_WILLNEED)

    def begin_cell(self) -> tuple[int, int]:
        """A cell to fill, and its generation; what was used longest ago makes room for it.

        Raises:
            OSError: ENOSPC where none can be had within the bounds.
        """
        with self._mutex():
            self._shrink()
            cell = self._table.first_in(CellState.EMPTY)
            if cell is None:
                cell = self._new_cell()
            if cell is None:
                cell = self._oldest_cell()
            if cell is None:
                raise OSError(errno.ENOSPC, "the block cache is full of blocks being written")
            return cell, self._table.begin(cell, self._owner)

    def publish(self, cell: int, entries: list[tuple[BlockKey, Place]]) -> None:
        """The bytes of these blocks stand in a cell of ours. Raises OSError."""
        with self._mutex():
            if self._table.state(cell) == self._owner:
                for key, place in entries:
                    self._table.insert(key, place)

    def seal_cell(self, cell: int) -> None:
        """Nothing more comes into a cell of ours.

        Raises OSError; then whoever joins next does it.
        """
        with self._mutex():
            if self._table.state(cell) == self._owner:
                is_full = self._table.live_bytes(cell) > 0
                self._table.end(cell, CellState.FULL if is_full else CellState.EMPTY)

    def remove(self, keys: list[BlockKey]) -> int:
        """Forget blocks; returns their bytes. Cells that have no block left become empty.

        Raises OSError.
        """
        num_bytes = 0
        with self._mutex():
            for key in keys:
                place = self._table.remove(key)
                if place is None:
                    continue
                num_bytes += place.length
                is_full = self._table.state(place.cell) == CellState.FULL
                if is_full and not self._table.live_bytes(place.cell):
                    self._table.end(place.cell, CellState.EMPTY)
        return num_bytes

    def rename(self, keys: list[tuple[BlockKey, BlockKey]]) -> None:
        """What the first of each pair names, the second names from now on. Raises OSError."""
        with self._mutex():
            for old, new in keys:
                place = self._table.remove(old)
                if place is not None:
                    self._table.insert(new, place)

    def live_bytes(self) -> int:
        """Bytes of all blocks of all files."""
        return self._table.total_live_bytes()

    def space_bytes(self) -> int:
        """Space that all cells take on disk, at most."""
        states = self._table.states()
        return (len(states) - states.count(CellState.FREE)) * self._cell_bytes

    @property
    def limit_bytes(self) -> int:
        """The bound of `space_bytes`: the largest that a living process was given."""
        return self._table.limit_bytes

    def free_space(self, needed_bytes: int) -> bool:
        """Give cells back to the disk until `needed_bytes` more fit above the floor."""
        while _free_bytes(self._fd) - needed_bytes < self._floor_bytes:
            with self._mutex():
                if not self._give_back(_MAX_TRIMMED, can_evict=True):
                    return False
        return True

    def trim(self) -> None:
        """Give back empty cells, and what is above the bound or below the disk's floor, some at a
        time.
        """
        with self._mutex():
            self._give_back(_MAX_TRIMMED, can_evict=False)
            self._shrink()
        if _free_bytes(self._fd) < self._floor_bytes:
            with self._mutex():
                self._give_back(_MAX_TRIMMED, can_evict=True)

    def try_claim(self, key: BlockKey, num_blocks: int) -> bool:
        """Say that this process fetches the blocks from `key` on; false where another does.

        A claim ends with `give_up_claim` or with the process. The hash of the file stands for it:
        two files are taken for one rarely, and wait for each other for nothing then.
        """
        return self._locks.try_lock(_claim(key), num_blocks)

    def give_up_claim(self, key: BlockKey, num_blocks: int) -> None:
        """The blocks are here, or will not come."""
        self._locks.unlock(_claim(key), num_blocks)

    def _position(self, cell: int) -> int:
        return self._data_at + cell * self._cell_bytes

    @contextmanager
    def _mutex(self) -> Iterator[None]:
        deadline = time.monotonic() + _MUTEX_SECONDS
        if not self._thread_mutex.acquire(timeout=_MUTEX_SECONDS):
            raise OSError(errno.EBUSY, "the block cache is being changed")
        try:
            while not self._locks.try_lock(MUTEX):
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, "another process is changing the block cache")
                time.sleep(_MUTEX_POLL_SECONDS)
            try:
                yield
            finally:
                self._locks.unlock(MUTEX)
        finally:
            self._thread_mutex.release()

    def _join(self) -> int:
        """A number that no living process has. Cells of the dead are sealed."""
        ours = 0
        for owner in range(CellState.FIRST_OWNER, CellState.LAST_OWNER + 1):
            is_known = self._table.limit_of(owner) or self._table.first_in(owner) is not None
            if (ours and not is_known) or not self._locks.try_lock(_MEMBERS + owner):
                continue
            self._seal_cells_of(owner)
            self._table.set_limit(owner, 0)
            if ours:
                self._locks.unlock(_MEMBERS + owner)
            else:
                ours = owner
        if not ours:
            raise OSError(errno.EUSERS, "too many mounts share the cache directory")
        return ours

    def _seal_cells_of(self, owner: int) -> None:
        while (cell := self._table.first_in(owner)) is not None:
            self._table.end(cell, CellState.FULL)

    def _new_cell(self) -> int | None:
        """One that takes more space on disk, if it may."""
        free = _free_bytes(self._fd)
        if free < self._floor_bytes:
            self._give_back(_MAX_TRIMMED, can_evict=True)
            free = _free_bytes(self._fd)
            if free < self._floor_bytes:
                raise OSError(errno.ENOSPC, "the cache's disk is at its reserve")
        if free - self._cell_bytes < self._floor_bytes:
            return None
        if self.space_bytes() + self._cell_bytes > self._table.limit_bytes:
            return None
        return self._table.first_in(CellState.FREE)

    def _oldest_cell(self) -> int | None:
        """The full cell that was used longest ago."""
        for is_chosen_now in (False, True):
            if is_chosen_now:
                states, uses = self._table.states(), self._table.uses()
                full = [(uses[i], i) for i, state in enumerate(states) if state == CellState.FULL]
                # Looking through all for each would cost more than the reading of large caches.
                self._victims.extend(heapq.nsmallest(max(1, len(full) // 32), full))
            while self._victims:
                used, cell = self._victims.popleft()
                # Used since it was chosen: then it is not the oldest any more.
                is_oldest = is_chosen_now or self._table.used_at(cell) == used
                if self._table.state(cell) == CellState.FULL and is_oldest:
                    self._evicted_bytes += self._table.live_bytes(cell)
                    return cell
        return None

    def _shrink(self) -> None:
        """Give back some of what is above the bound: a mount with a larger one has ended."""
        excess = self.space_bytes() - self._table.limit_bytes
        if excess > 0:
            num_cells = min(_MAX_TRIMMED, -(-excess // self._cell_bytes))
            self._give_back(num_cells, can_evict=True)

    def _give_back(self, max_cells: int, *, can_evict: bool) -> int:
        """Make holes of cells; how many. Empty ones go first."""
        for number in range(max_cells):
            cell = self._table.first_in(CellState.EMPTY)
            if cell is None and can_evict:
                cell = self._oldest_cell()
            if cell is None:
                return number
            self._table.end(cell, CellState.FREE)
            mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
            # Where the file system has no holes, the space comes back when the file is removed.
            _libc.fallocate(self._fd, mode, self._position(cell), self._cell_bytes)
        return max_cells


def _claim(key: BlockKey) -> int:
    return _CLAIMS + key.low % _CLAIMED_FILES * _CLAIMED_BLOCKS + key.number


@contextmanager
def _made_alone(directory: Path) -> Iterator[None]:
    """Only one process looks for the file or makes it. Raises OSError where another does not end.

    A process that was killed keeps the lock for as long as the kernel holds one of its threads.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the cache directory belongs to another user")
        deadline = time.monotonic() + _MADE_SECONDS
        while not _try_flock(fd):
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, "another process is opening the cache and does not end")
            time.sleep(_MADE_POLL_SECONDS)
        yield
    finally:
        os.close(fd)


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_file(path: Path, capacity_bytes: int, cell_bytes: int) -> tuple[int, Geometry]:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
    except (FileNotFoundError, IsADirectoryError):
        return _make_file(path, capacity_bytes, cell_bytes)
    is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    geometry = Geometry.read(fd) if is_file else None
    if geometry is not None and geometry.cell_bytes == cell_bytes:
        if geometry.num_cells * cell_bytes >= capacity_bytes:
            return fd, geometry
        log.warning("The block cache begins anew: its table is too small for the new bound")
    else:
        log.warning("The block cache begins anew: its file is damaged")
    os.close(fd)
    return _make_file(path, capacity_bytes, cell_bytes)


def _make_file(path: Path, capacity_bytes: int, cell_bytes: int) -> tuple[int, Geometry]:
    geometry = Geometry.for_capacity(capacity_bytes, cell_bytes)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # A mapped page without space on disk would end the process when it is written.
        os.posix_fallocate(fd, 0, geometry.table_bytes)
        os.pwrite(fd, geometry.to_header(), 0)
        new.rename(path)
    except BaseException:
        os.close(fd)
        new.unlink(missing_ok=True)
        raise
    return fd, geometry


def _open_direct(fd: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        # Not every file system has it; the kernel's memory is in between then.
        return fd


def _free_bytes(fd: int) -> int:
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize
