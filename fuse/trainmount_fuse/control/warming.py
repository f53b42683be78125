"""`warm`: bring files into the block cache before they are read. Called by `commands`, in a thread.

What is brought in stays within the cache's bound and the disk's reserve: a file that does not fit
beside those before it is not begun, for it would only throw them out again.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from trainmount_files.errors import (
    Cancelled,
    LocalError,
    NotFound,
    PreconditionFailed,
    Unavailable,
    VolumeError,
)
from trainmount_files.trees import Report
from trainmount_files.trees.crew import Crew
from trainmount_files.volume import ByteRange, FileStat
from trainmount_fuse.control.selection import Selection
from trainmount_fuse.core import Core, file_key

__all__ = ["Warming"]

_PARALLELISM: Final = 32
"""Ranges under way at once; 20 ms of latency and 100 KB a file want as many."""

_MAX_UNAVAILABLE: Final = 3
"""Files in a row that the store did not answer for, after minutes of trying each: it is down."""

_FLUSH_SECONDS: Final = 60.0
"""How long the cache's disk is waited for at the end."""

_MAX_NAMED: Final = 100

_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class _File:
    """A file on its way in. `num_left` and `is_given_up` are guarded by the warming's lock."""

    stat: FileStat
    num_left: int
    """Ranges that have not ended."""

    is_second_try: bool
    is_given_up: bool = False


class Warming:
    """One run. `report` may be read while it goes on."""

    def __init__(self, core: Core, cancel: threading.Event) -> None:
        self._core = core
        self.report = Report()
        self.num_unfit = 0
        """Files that were not begun because they do not fit."""
        self.unfit_bytes = 0
        self.unfit_paths: list[str] = []
        """The first of them."""
        self.full_reason = ""
        """Why files do not fit; empty where all do."""
        self._crew = Crew("warm", _PARALLELISM, cancel)
        self._lock = threading.Lock()
        # All guarded by the lock.
        self._taken_bytes = 0
        self._warmed: list[FileStat] = []
        self._num_unavailable = 0

    def run(self, patterns: Sequence[str]) -> None:
        """Bring in what the patterns mean; what could not be is in `report` and `unfit_paths`.

        Raises:
            Cancelled: the event was set; what was brought in stays.
            VolumeError: the store is down, or takes our credentials no more.
        """
        blocks = self._core.blocks
        before = blocks.statistics()
        selection = Selection(self._core.volume, self._crew, self.report, self._file)
        self._crew.run(partial(selection.start, patterns))
        blocks.flush(_FLUSH_SECONDS)
        now = blocks.statistics()
        # Held to be written is not kept yet.
        if (now.evicted_bytes, now.dropped_bytes) != (before.evicted_bytes, before.dropped_bytes):
            self._name_those_thrown_out()

    def _file(self, stat: FileStat, *, is_second_try: bool = False) -> None:
        if not is_second_try:
            self.report.found(1, stat.size_bytes)
        if not self._fits(stat):
            return
        ranges = self._ranges(stat)
        file = _File(stat, len(ranges), is_second_try)
        if not ranges:
            self._ended(file)
        for first, last in ranges:
            self._crew.add(partial(self._range, file, first, last))

    def _ranges(self, stat: FileStat) -> list[tuple[int, int]]:
        """Numbers of the first and last block of each range."""
        settings = self._core.settings
        num_blocks = -(-stat.size_bytes // settings.block_size_bytes)
        step = settings.prefetch_fetch_bytes // settings.block_size_bytes
        return [(first, min(first + step, num_blocks) - 1) for first in range(0, num_blocks, step)]

    def _fits(self, stat: FileStat) -> bool:
        settings = self._core.settings
        needed = self._core.blocks.space_for(stat.size_bytes)
        with self._lock:
            cache = self._core.blocks.statistics()
            room = cache.limit_bytes
            reason = f"the cache is too small for all (--cache-size is {room})"
            free = _free_bytes(settings.cache_dir) - settings.free_disk_floor_bytes
            # Whatever else is cached makes room.
            on_disk = max(0, free) + cache.space_bytes
            if on_disk < room:
                room = on_disk
                reason = "the disk of the cache is at its reserve"
            if self._taken_bytes + needed <= room:
                self._taken_bytes += needed
                return True
            self._leave_out(stat, reason)
            return False

    def _leave_out(self, stat: FileStat, reason: str) -> None:
        """The lock is held."""
        self.full_reason = reason
        self.num_unfit += 1
        self.unfit_bytes += stat.size_bytes
        if len(self.unfit_paths) < _MAX_NAMED:
            self.unfit_paths.append(stat.path)

    def _range(self, file: _File, first: int, last: int) -> None:
        if file.is_given_up:
            return
        try:
            self._fetch(file.stat, first, last)
        except (PreconditionFailed, NotFound) as error:
            if self._give_up(file):
                self._try_again(file, error)
        except VolumeError as error:
            if self._give_up(file):
                self._failed(file.stat, error)
        except OSError as error:
            if self._give_up(file):
                self._could_not_keep(file.stat, error)
        else:
            with self._lock:
                self._num_unavailable = 0
                file.num_left -= 1
                is_whole = not file.num_left and not file.is_given_up
            self.report.moved(self._length(file.stat, first, last))
            if is_whole:
                self._ended(file)

    def _fetch(self, stat: FileStat, first: int, last: int) -> None:
        core, stop = self._core, self._crew.stop

        def fetch(byte_range: ByteRange, buffer: memoryview) -> None:
            core.volume.read_into(stat.path, byte_range, buffer, version=stat.version, cancel=stop)

        file = core.blocks.open(file_key(stat))
        try:
            core.blocks.ensure(file, first, last, fetch)
        finally:
            core.blocks.release(file)

    def _length(self, stat: FileStat, first: int, last: int) -> int:
        block_size = self._core.settings.block_size_bytes
        return min((last + 1) * block_size, stat.size_bytes) - first * block_size

    def _give_up(self, file: _File) -> bool:
        """True for the first of a file's ranges that cannot be had."""
        with self._lock:
            is_first = not file.is_given_up
            file.is_given_up = True
            if is_first:
                self._taken_bytes -= self._core.blocks.space_for(file.stat.size_bytes)
            return is_first

    def _try_again(self, file: _File, error: VolumeError) -> None:
        """The file is another one than was listed: once more, with what is there now."""
        path = file.stat.path
        try:
            found = self._core.volume.stat(path)
            if file.is_second_try or found.is_directory:
                raise error
            self._file(found, is_second_try=True)
        except VolumeError as last_error:
            self._failed(file.stat, last_error)

    def _failed(self, stat: FileStat, error: VolumeError) -> None:
        if isinstance(error, Cancelled):
            return
        self.report.failed(stat.path, error)
        if isinstance(error, Unavailable):
            with self._lock:
                self._num_unavailable += 1
                is_down = self._num_unavailable >= _MAX_UNAVAILABLE
            if is_down:
                raise error

    def _could_not_keep(self, stat: FileStat, error: OSError) -> None:
        if error.errno in _NO_SPACE:
            with self._lock:
                self._leave_out(stat, error.strerror or "the cache's disk is full")
            return
        reason = f"the cache cannot keep it: {error.strerror or error}"
        self.report.failed(stat.path, LocalError("warm", stat.path, reason, error.errno))

    def _ended(self, file: _File) -> None:
        self.report.done()
        with self._lock:
            self._warmed.append(file.stat)

    def _name_those_thrown_out(self) -> None:
        """Readers, or another `warm`, needed the room more."""
        blocks = self._core.blocks
        for stat in self._warmed:
            file = blocks.open(file_key(stat))
            try:
                is_whole = blocks.cached_bytes_of(file) == stat.size_bytes
            finally:
                blocks.release(file)
            if not is_whole:
                reason = "was thrown out again, for other files needed the room"
                self.report.failed(stat.path, LocalError("warm", stat.path, reason, errno.ENOSPC))


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
