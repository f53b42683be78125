"""Reading the bytes of a file: local bytes, cached blocks, or the store. Called by `filesystem`.

Reads wait for no lock.
"""

from __future__ import annotations

import errno
import logging
import threading
from functools import partial

from trainmount_files.errors import NotFound, PreconditionFailed
from trainmount_files.volume import ByteRange, FileStat
from trainmount_fuse.block_file import BlockFile
from trainmount_fuse.blocks import Fetch
from trainmount_fuse.core import Core, file_key
from trainmount_fuse.handles import Handle
from trainmount_fuse.inodes import Inode

__all__ = ["Reading"]

log = logging.getLogger(__name__)


class Reading:
    """The reads of all open files of one mount."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._files: dict[int, BlockFile] = {}
        """Cached file of each open inode that was read; the event loop's thread only."""

    async def read(self, handle: Handle, offset: int, size: int) -> bytes | bytearray:
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
        file = await self._cached_file(inode, stat)
        if file is None:
            return await self._read_past_cache(inode, stat, offset, size)
        core.prefetcher.advance(handle.streams, file, offset, size, partial(self.fetch_with, stat))
        data = core.blocks.read_nowait(file, offset, size)
        if data is not None:
            return data
        core.blocks.retain(file)
        try:
            fetch = self.fetch_with(stat, None)
            return await core.workers.call(core.blocks.read, file, offset, size, fetch)
        except (PreconditionFailed, NotFound) as error:
            core.doubt(inode)
            raise OSError(errno.ESTALE, str(error)) from error
        finally:
            core.blocks.release(file)

    def let_go(self, ino: int) -> None:
        """Nobody has the inode open any more."""
        file = self._files.pop(ino, None)
        if file is not None:
            self._core.blocks.release(file)

    async def _cached_file(self, inode: Inode, stat: FileStat) -> BlockFile | None:
        """The inode's file in the block cache; None where the cache cannot be used."""
        core = self._core
        key = file_key(stat)
        file = self._files.get(inode.ino)
        if file is not None and file.key == key:
            return file
        try:
            opened = await core.workers.call(core.blocks.open, key)
        except OSError:
            log.warning("The block cache cannot be used; reading past it", exc_info=True)
            return None
        # Another read may have come first, or the last handle gone, while this one waited.
        previous = self._files.get(inode.ino)
        if previous is opened:
            core.blocks.release(opened)
        else:
            self._files[inode.ino] = opened
            if previous is not None:
                core.blocks.release(previous)
        return opened

    async def _read_past_cache(
        self, inode: Inode, stat: FileStat, offset: int, size: int
    ) -> bytearray:
        buffer = bytearray(size)
        fetch = self.fetch_with(stat, None)
        try:
            await self._core.workers.call(
                fetch, ByteRange(offset, offset + size), memoryview(buffer)
            )
        except (PreconditionFailed, NotFound) as error:
            self._core.doubt(inode)
            raise OSError(errno.ESTALE, str(error)) from error
        return buffer

    def fetch_with(self, stat: FileStat, cancel: threading.Event | None) -> Fetch:
        """Fills buffers from this version of the file, until `cancel` is set."""

        def fetch(byte_range: ByteRange, buffer: memoryview) -> None:
            self._core.volume.read_into(
                stat.path, byte_range, buffer, version=stat.version, cancel=cancel
            )

        return fetch
