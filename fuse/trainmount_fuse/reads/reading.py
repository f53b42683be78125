"""Reading the bytes of a file: local bytes, cached blocks, or the store. Called by `filesystem`.

Reads wait for no lock. What the store is asked for waits in threads of its own, a few for each
file: a store that says nothing holds up neither names nor bytes that are here.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from functools import partial
from typing import Final

import trio

from trainmount_files.errors import Cancelled, NotFound, PreconditionFailed, VolumeError
from trainmount_files.volume import ByteRange, FileStat
from trainmount_fuse.cache.block_file import BlockFile
from trainmount_fuse.cache.blocks import Fetch
from trainmount_fuse.core import Core, file_key
from trainmount_fuse.memory import MemoryBudget
from trainmount_fuse.names.handles import Handle
from trainmount_fuse.names.inodes import Inode, Link
from trainmount_fuse.reads.next_files import Folder, NextFiles
from trainmount_fuse.reads.push import Pages, StorePages
from trainmount_fuse.reads.read_patterns import Streams
from trainmount_fuse.workers import Workers

__all__ = ["Reading"]

log = logging.getLogger(__name__)

_MAX_STORE_READS: Final = 256
"""Threads that wait for the store because a program waits for bytes."""

_MAX_STORE_READS_OF_A_FILE: Final = 8
"""As many ranges at once carry all that one connection to a store can; more would only keep other
files waiting where the store is silent.
"""

_SCATTERED_SHARE: Final = 4
"""Of the cache, one part in so many may hold files of a directory that were guessed in no order and
not read yet: others are not thrown out for guesses.
"""

_SAME_FAILURE_SECONDS: Final = 1.0
"""The kernel asks again at once for a page that it could not read ahead. Where finding out took
long, the answer is the same.
"""


class _Room:
    """The memory of an answer, from the moment that a thread makes it until the event loop sends
    it. Many reads may be answered at once, and one is sent at a time.
    """

    def __init__(self, memory: MemoryBudget, num_bytes: int) -> None:
        self._memory = memory
        self._num_bytes = num_bytes
        self._is_taken = False

    def take(self) -> None:
        if not self._is_taken:
            self._memory.take(self._num_bytes)
            self._is_taken = True

    def give_back(self) -> None:
        if self._is_taken:
            self._memory.give_back(self._num_bytes)


class _OpenFile:
    """An inode that is being read, at one version. State of the event loop's thread."""

    def __init__(self, file: BlockFile, pages: Pages | None) -> None:
        self.file = file
        self.pages = pages
        self.store_reads = trio.CapacityLimiter(_MAX_STORE_READS_OF_A_FILE)
        self.failure: tuple[int, int, float, OSError | VolumeError] | None = None
        """The last range that failed after a long time, and until when that counts."""


class Reading:
    """The reads of all open files of one mount."""

    def __init__(self, core: Core, store_pages: StorePages | None = None) -> None:
        """Without `store_pages`, nothing is put into the kernel's pages."""
        self._core = core
        self._store_pages = store_pages
        self._open: dict[int, _OpenFile] = {}
        """By inode. The event loop's thread only, like all state here."""

        self._closing: dict[int, list[Pages]] = {}
        """Pages of inodes that were let go while a push was under way."""

        self._next_files = NextFiles()
        self._store_workers = Workers(_MAX_STORE_READS)
        self._ending = threading.Event()

    async def read(self, handle: Handle, offset: int, size: int) -> bytes | bytearray | memoryview:
        """The bytes there are of the range, all of one version. Raises VolumeError, OSError."""
        core = self._core
        inode = core.file(handle.ino)
        staged = core.staged(inode)
        if staged is not None:
            return await core.workers.call(core.staging.read, staged, offset, size)
        stat = inode.stat
        if stat is None:
            raise OSError(errno.ESTALE, "the file was given up")
        size = min(size, stat.size_bytes - offset)
        if size <= 0:
            return b""
        opened = self._opened(inode, stat)
        self._look_ahead(handle, inode, stat, opened, offset, size)
        if opened.pages is not None:
            left_out = opened.pages.hole(offset, size)
            if left_out is not None:
                return left_out
            opened.pages.note_read(offset, size)
        data = core.blocks.read_nowait(opened.file, offset, size)
        if data is not None:
            return data
        return await self._read_slowly(inode, stat, opened, offset, size)

    def begin_early(self, directory_ino: int, name: str) -> None:
        """The store is about to be asked for a name that a program looks up: where files of the
        directory are being read, this one's bytes come meanwhile.
        """
        files, core = self._next_files, self._core
        folder = files.find(directory_ino)
        if folder is None or not core.prefetcher.max_bytes or not files.is_likely(folder, name):
            return
        entries, _listed_at = core.metadata.listed(directory_ino)
        num_bytes = self._fetch_small_file(folder, entries.get(name))
        if num_bytes:
            files.note_looked_up(folder, name, num_bytes)

    def let_go(self, ino: int) -> None:
        """Nobody has the inode open any more."""
        opened = self._open.pop(ino, None)
        if opened is None:
            return
        self._core.blocks.release(opened.file)
        self._close_pages(ino, opened)

    async def stop_pushing(self, ino: int) -> None:
        """When this returns, nothing fetched before is put into the inode's pages any more.

        Before somebody writes to the file or cuts it. While it has a writer, or local bytes, no
        push begins.
        """
        opened = self._open.get(ino)
        if opened is not None:
            self._close_pages(ino, opened)
        await self.settle(ino)

    async def settle(self, ino: int) -> None:
        """Wait for pushes of the version that the inode had when nobody had it open any more.

        Before it is opened: its pages are of another version from then on.
        """
        for pages in self._closing.pop(ino, ()):
            if pages.is_busy:
                await self._core.workers.call(pages.wait)

    def give_up(self) -> None:
        """Nobody waits for the store's bytes any more: reads that do are EIO. The mount ends."""
        self._ending.set()
        self._core.prefetcher.give_up()
        handles = self._core.handles
        for fh in handles.open_fhs():
            handles.get(fh).streams.cancelled.set()
        self._next_files.give_up()

    def fetch_with(self, stat: FileStat, cancel: threading.Event | None) -> Fetch:
        """Fills buffers from this version of the file, until `cancel` is set."""

        def fetch(byte_range: ByteRange, buffer: memoryview) -> None:
            self._core.volume.read_into(
                stat.path, byte_range, buffer, version=stat.version, cancel=cancel
            )

        return fetch

    def _opened(self, inode: Inode, stat: FileStat) -> _OpenFile:
        """The inode's file at the version that it has now."""
        opened = self._open.get(inode.ino)
        key = file_key(stat)
        if opened is None or opened.file.key != key:
            if opened is not None:
                self.let_go(inode.ino)
            opened = _OpenFile(self._core.blocks.open(key), None)
            self._open[inode.ino] = opened
        if opened.pages is None and self._takes_pushes(inode):
            assert self._store_pages is not None
            opened.pages = Pages(
                inode.ino,
                self._store_pages,
                self._core.prefetcher.pushes,
                opened.file.num_blocks,
                opened.file.block_size_bytes,
            )
        return opened

    def _takes_pushes(self, inode: Inode) -> bool:
        return self._store_pages is not None and not self._core.handles.has_writer(inode.ino)

    def _close_pages(self, ino: int, opened: _OpenFile) -> None:
        pages = opened.pages
        if pages is None:
            return
        opened.pages = None
        pages.close()
        if pages.is_busy:
            busy = [one for one in self._closing.get(ino, ()) if one.is_busy]
            self._closing[ino] = [*busy, pages]

    def _look_ahead(
        self,
        handle: Handle,
        inode: Inode,
        stat: FileStat,
        opened: _OpenFile,
        offset: int,
        size: int,
    ) -> None:
        is_first = not handle.streams.streams
        behind_end = self._core.prefetcher.advance(
            handle.streams,
            opened.file,
            offset,
            size,
            partial(self.fetch_with, stat),
            opened.pages,
        )
        if inode.link is Link.LINKED and (behind_end or is_first):
            self._look_at_next_files(inode, is_first=is_first, is_near_end=behind_end > 0)

    def _look_at_next_files(self, inode: Inode, *, is_first: bool, is_near_end: bool) -> None:
        core = self._core
        entries, listed_at = core.metadata.listed(inode.parent_ino)
        files = self._next_files
        if is_first:
            folder = files.begin(inode.parent_ino, inode.name, entries, listed_at)
        else:
            folder = files.find(inode.parent_ino)
        if folder is None:
            return
        core.prefetcher.note_used(files.take_used(folder, inode.name))
        core.prefetcher.note_wasted(files.take_passed(folder))
        room = core.prefetcher.max_bytes - sum(folder.expected.values())
        for name in files.wanted(folder) if is_near_end else ():
            num_bytes = self._fetch_file(folder.streams, entries.get(name), room)
            if num_bytes is None:
                return
            files.note_asked(folder, name, num_bytes)
            room -= num_bytes
        max_scattered = core.settings.cache_size_bytes // _SCATTERED_SHARE if is_first else 0
        for name in files.scattered(folder, max_scattered) if core.prefetcher.max_bytes else ():
            num_bytes = self._fetch_small_file(folder, entries.get(name))
            if num_bytes is None:
                return
            files.note_scattered(folder, name, num_bytes)

    def _fetch_small_file(self, folder: Folder, stat: FileStat | None) -> int | None:
        """As `_fetch_file`, of a whole file; 0 also for one that is too large to be guessed in no
        order.
        """
        max_bytes = self._core.settings.prefetch_fetch_bytes
        if stat is not None and stat.size_bytes > max_bytes:
            return 0
        return self._fetch_file(folder.scattered_streams, stat, max_bytes)

    def _fetch_file(self, streams: Streams, stat: FileStat | None, room: int) -> int | None:
        """Have the first bytes of a file fetched; how many, 0 where there are none, None where
        nothing more can be fetched now.
        """
        core = self._core
        if room <= 0 or stat is None or stat.is_directory:
            return None
        file = core.blocks.open(file_key(stat))
        try:
            num_bytes = min(stat.size_bytes, core.settings.prefetch_fetch_bytes)
            if file.has(0, (num_bytes - 1) // core.settings.block_size_bytes):
                core.prefetcher.load_file(file, num_bytes)
                return num_bytes
            fetch_with = partial(self.fetch_with, stat)
            is_asked = core.prefetcher.fetch_file(streams, file, num_bytes, fetch_with)
            return num_bytes if is_asked else None
        finally:
            core.blocks.release(file)

    async def _read_slowly(
        self, inode: Inode, stat: FileStat, opened: _OpenFile, offset: int, size: int
    ) -> bytes | bytearray | memoryview:
        """From the disk or the store, in a thread."""
        core = self._core
        _raise_same_failure(opened, offset)
        block = core.settings.block_size_bytes
        is_here = opened.file.has(offset // block, (offset + size - 1) // block)
        fetch = self.fetch_with(stat, self._ending)
        room = _Room(core.answers, size)
        blocks = core.blocks
        read = partial(blocks.read, opened.file, offset, size, fetch, before_copy=room.take)
        pages = opened.pages
        core.blocks.retain(opened.file)
        if pages is not None:
            pages.begin_read(offset, size)
        began = time.monotonic()
        try:
            if is_here:
                return await core.workers.call(read)
            await core.prefetcher.fetch_small_file(opened.file)
            data = blocks.read_nowait(opened.file, offset, size, is_hit=False)
            if data is not None:
                return data
            async with opened.store_reads:
                return await self._store_workers.call(read)
        except (PreconditionFailed, NotFound) as error:
            core.doubt(inode)
            raise OSError(errno.ESTALE, str(error)) from error
        except Cancelled as error:
            raise OSError(errno.EIO, "the mount ends") from error
        except (VolumeError, OSError) as error:
            now = time.monotonic()
            if now - began > _SAME_FAILURE_SECONDS:
                opened.failure = (offset, offset + size, now + _SAME_FAILURE_SECONDS, error)
            raise
        finally:
            # The caller sends what is returned before anything else runs.
            room.give_back()
            if pages is not None:
                pages.end_read(offset, size)
            core.blocks.release(opened.file)


def _raise_same_failure(opened: _OpenFile, offset: int) -> None:
    if opened.failure is None:
        return
    start, end, until, error = opened.failure
    if time.monotonic() > until:
        opened.failure = None
    elif start <= offset < end:
        raise error
