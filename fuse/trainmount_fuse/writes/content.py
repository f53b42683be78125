"""Operations on the bytes of a file: open, write, truncate, upload, release. Called by
`filesystem`.

Whatever changes a file's bytes or uploads them holds the inode's lock, and
an upload a share of the tree's, so that an upload is of one state of the file and goes to the name
it has.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from contextlib import suppress
from functools import partial
from typing import Final

from trainmount_files.errors import NotFound, PreconditionFailed, VolumeError
from trainmount_files.volume import MIB, ByteRange, FileStat
from trainmount_fuse.attributes import OpenFile
from trainmount_fuse.core import Core, file_key, transfer_error
from trainmount_fuse.names.handles import Handle
from trainmount_fuse.names.inodes import Inode, Link
from trainmount_fuse.reads.prefetch import Streams
from trainmount_fuse.reads.reading import Reading
from trainmount_fuse.writes.journal import StagedState
from trainmount_fuse.writes.staged_file import StagedFile
from trainmount_fuse.writes.staging import LATER_VERSION

__all__ = ["Content"]

log = logging.getLogger(__name__)

_KEPT_BYTES: Final = 64 * MIB
"""Open files up to this size are fetched whole when their name goes away."""

_MAX_DOUBTED_BYTES: Final = 4 << 20
"""Of a file written here that is fetched anew where its version does not tell who wrote it last."""

_ADOPTED_SHARE: Final = 4
"""An uploaded file stays as cached blocks if it takes at most one part in so many of the cache."""


class Content:
    """The bytes of all files of one mount."""

    def __init__(self, core: Core, reading: Reading) -> None:
        self._core = core
        self._reading = reading

    async def open(self, inode: Inode, flags: int) -> OpenFile:
        """A handle on the version that the store has now, or on the local bytes.

        Raises OSError ESTALE where the kernel's idea of the file is out of date: it then looks the
        name up again and opens once more, with the right size from the start.
        """
        core = self._core
        truncates = bool(flags & os.O_TRUNC)
        if truncates or flags & os.O_ACCMODE != os.O_RDONLY:
            core.require_writable()
        while True:
            if core.unsent(inode) is None:
                await self._validate(inode, flags)
            if not core.handles.is_open(inode.ino):
                await self._reading.settle(inode.ino)
                await self._drop_doubtful(inode)
            if inode.ino not in core.leaving or core.staged(inode) is not None:
                break
            if not inode.is_locked:
                # Nobody is at it: a predecessor had done it, and the name was given anew.
                core.leaving.discard(inode.ino)
                break
            # Too late to keep its bytes for this handle: what comes of its name decides.
            async with inode.lock:
                pass
        handle = core.handles.open(inode.ino, flags)
        if handle.is_writable:
            # After the handle, so that no push begins; before its first write, which a push would
            # undo.
            await self._reading.stop_pushing(inode.ino)
        if truncates:
            try:
                async with inode.lock:
                    # Also where it is empty: `: > stamp` is how programs set a time.
                    await self._cut(inode, 0)
            except BaseException:
                core.handles.release(handle)
                raise
        # The kernel's pages follow local writes by themselves.
        version = "" if inode.stat is None else inode.stat.version
        keep_cache = core.staged(inode) is not None or inode.cached == version
        inode.cached = version
        core.inodes.save(inode)
        return OpenFile(handle.fh, keep_cache=keep_cache)

    async def _drop_doubtful(self, inode: Inode) -> None:
        """Nobody has it open: forget what may be the content of a namesake of its version."""
        core = self._core
        stat = inode.stat
        if stat is None or core.staged(inode) is not None:
            return
        is_young = core.is_young(stat)
        if is_young or inode.was_young:
            inode.cached = None
            await core.workers.call(core.blocks.drop, file_key(stat))
        inode.was_young = is_young

    async def write(self, handle: Handle, offset: int, data: bytes | bytearray | memoryview) -> int:
        """Put the bytes into the local copy; how many are in the operating system then, fewer than
        all only where the disk is full.
        """
        core = self._core
        if not handle.is_writable:
            raise OSError(errno.EBADF, "not open for writing")
        inode = core.file(handle.ino)
        staged = core.staged(inode)
        if staged is not None and not inode.lock.locked():
            # No await from here to the answer, so this is as good as having the lock.
            written = core.staging.write_nowait(staged, offset, data)
            if written is not None:
                self._forget_set_time(inode)
                return written
        async with inode.lock:
            staged = await self._ensure_staged(inode)
            written = await core.workers.call(core.staging.write, staged, offset, data)
            self._forget_set_time(inode)
        return written

    async def resize(self, inode: Inode, size: int) -> None:
        """truncate(2): where no writer is open, the store has the new size when this returns."""
        core = self._core
        try:
            async with core.tree.shared(), inode.lock:
                await self._truncate(inode, size)
                if core.handles.has_writer(inode.ino) or inode.link is not Link.LINKED:
                    return
                try:
                    await self._upload(inode)
                finally:
                    await self.retire(inode)
        except VolumeError as error:
            raise transfer_error(error) from error

    async def upload(self, inode: Inode) -> None:
        """close(2) and fsync(2): the store has the local bytes when this returns.

        Nothing is sent when the store has them already, or when the name is gone. Raises
        VolumeError, OSError; the bytes stay.
        """
        staged = self._core.staged(inode)
        if staged is None or staged.state is not StagedState.DIRTY:
            return
        async with self._core.tree.shared(), inode.lock:
            await self._upload(inode)

    async def release(self, handle: Handle) -> None:
        """The kernel is done with the handle; after the last one of a file, its local bytes go."""
        core = self._core
        handle.streams.cancelled.set()
        core.handles.release(handle)
        if core.handles.is_open(handle.ino):
            return
        try:
            inode = core.inodes.get(handle.ino)
        except OSError:
            # The number was lost with the state database; there is nothing to let go.
            return
        if core.staged(inode) is not None:
            async with core.tree.shared(), inode.lock:
                await self._finish(inode)
        if core.handles.is_open(handle.ino):
            return
        self._reading.let_go(handle.ino)
        if inode.stat is not None and (inode.link is Link.UNLINKED or inode.was_young):
            # Kept for the handles until now.
            core.blocks.drop(file_key(inode.stat))
        if inode.link is not Link.LINKED and not inode.lookup_count:
            core.inodes.drop(inode)

    async def keep_for_handles(self, inode: Inode) -> None:
        """The name goes away while the file is open: have its bytes here, unless they are many.

        Of a larger file the handles read what is cached, and get ESTALE for the rest: rm(1) must
        not wait for gigabytes to come. The inode's lock is held.
        """
        core = self._core
        core.leaving.add(inode.ino)
        if core.staged(inode) is not None or not core.handles.is_open(inode.ino):
            return
        if inode.stat is None or inode.stat.size_bytes > _KEPT_BYTES:
            return
        try:
            await self._ensure_staged(inode)
        except (VolumeError, OSError):
            # Unlinking must not fail for want of space here; the handles get ESTALE instead.
            log.warning("An open file that is removed could not be kept", exc_info=True)

    def move(self, inode: Inode, path: str, new_path: str) -> FileStat:
        """In a worker thread, with the inode's lock held: `Volume.rename`, which takes the bytes
        from here where the store would have them come and go, and most of them are here.
        """
        core = self._core
        if not core.volume.capabilities.renames_through_client:
            return core.volume.rename(path, new_path)
        before = core.volume.stat(path)
        staged = core.staged(inode)
        if not before.is_directory and self._has_most_of(before, staged):
            try:
                return self._move_from_here(before, new_path, staged)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
        return core.volume.rename(path, new_path)

    def _has_most_of(self, stat: FileStat, staged: StagedFile | None) -> bool:
        core = self._core
        if staged is not None and staged.state is StagedState.CLEAN:
            return staged.base_version == stat.version
        if core.is_young(stat) and stat.size_bytes <= _MAX_DOUBTED_BYTES:
            return False
        file = core.blocks.open(file_key(stat))
        try:
            return core.blocks.cached_bytes_of(file) * 2 > stat.size_bytes
        finally:
            core.blocks.release(file)

    def _move_from_here(
        self, before: FileStat, new_path: str, staged: StagedFile | None
    ) -> FileStat:
        core = self._core
        with core.staging.nameless() as copy:
            if staged is not None and staged.state is StagedState.CLEAN:
                source = staged.descriptor()
            else:
                source = copy.fileno()
                self._copy_into(before, before.size_bytes, source)
            with open(source, "rb", closefd=False) as file:
                stored = core.volume.upload(new_path, file, before.size_bytes)
        if core.volume.stat(before.path).version != before.version:
            reason = "the file has changed; it was left in place"
            raise PreconditionFailed("rename", before.path, reason)
        core.volume.delete(before.path)
        return stored

    async def let_go(self, inode: Inode) -> None:
        """The name is gone: local bytes live on for open handles only. The inode's lock is held."""
        core = self._core
        core.leaving.discard(inode.ino)
        staged = core.staged(inode)
        if staged is None:
            return
        if core.handles.is_open(inode.ino):
            await core.workers.call(core.staging.orphan, staged)
        else:
            core.staging.withdraw(staged)
            await core.workers.call(core.staging.discard, staged)

    async def _validate(self, inode: Inode, flags: int) -> None:
        core = self._core
        is_asked = inode.take_lookup() and inode.stat is not None
        if inode.link is not Link.LINKED:
            is_reader = flags & os.O_ACCMODE == os.O_RDONLY
            if inode.link is Link.REPLACED and is_asked and is_reader and core.is_reopening:
                # Another program has found the next version since. A second try gets the one that
                # it looked up, as if it had been first.
                return
            raise core.look_up_again("the name has another file now")
        current = inode
        if is_asked:
            core.metadata.note_opened(inode.parent_ino)
        else:
            try:
                current = await core.refresh(inode, core.settings.open_timeout_seconds)
            except FileNotFoundError as error:
                # Looked up again, the name is missing, and with O_CREAT it is made.
                raise core.look_up_again("the name has gone since it was looked up") from error
        if core.unsent(current) is not None and current is inode:
            return
        is_known = current.stat is not None and current.told == current.stat.version
        # A size that the kernel has wrong does not matter to who cuts the file to nothing.
        if current is not inode or not (is_known or flags & os.O_TRUNC):
            raise core.look_up_again("the file has changed since it was looked up")

    async def _truncate(self, inode: Inode, size: int) -> None:
        is_here = self._core.staged(inode) is not None
        if is_here or inode.stat is None or inode.stat.size_bytes != size:
            await self._cut(inode, size)

    def _forget_set_time(self, inode: Inode) -> None:
        """The content is another now, for a successor as well."""
        if inode.set_mtime_ns is not None:
            inode.set_mtime_ns = None
            self._core.inodes.save(inode)

    async def _cut(self, inode: Inode, size: int) -> None:
        core = self._core
        staged = await self._ensure_staged(inode, keep_bytes=size)
        await core.workers.call(core.staging.truncate, staged, size)
        self._forget_set_time(inode)

    async def _ensure_staged(self, inode: Inode, keep_bytes: int | None = None) -> StagedFile:
        """Local bytes of the inode, from the store where there are none. The inode's
        lock is held.
        """
        core = self._core
        staged = core.staged(inode)
        if staged is not None and inode.link is not Link.REPLACED:
            return staged
        stat = inode.stat
        if inode.link is not Link.LINKED or stat is None:
            raise OSError(errno.ESTALE, "the file was replaced while it was open")
        length = stat.size_bytes if keep_bytes is None else min(keep_bytes, stat.size_bytes)
        create = partial(
            core.staging.create,
            inode.ino,
            core.inodes.path_of(inode),
            base_version=stat.version,
            is_dirty=False,
            copy_into=partial(self._copy_into, stat, length) if length else None,
        )
        try:
            staged = await core.workers.call(create)
        except (PreconditionFailed, NotFound) as error:
            core.doubt(inode)
            raise OSError(errno.ESTALE, str(error)) from error
        # Cut without being open, or losing its name: `open` has not done it.
        await self._reading.stop_pushing(inode.ino)
        return staged

    def _copy_into(self, stat: FileStat, length: int, fd: int) -> None:
        """In a worker thread: the first `length` bytes of the store's file, through the block
        cache.
        """
        core = self._core
        core.staging.reserve(length)
        step = core.settings.prefetch_fetch_bytes
        fetch = self._reading.fetch_with(stat, None)
        streams = Streams()
        file = core.blocks.open(file_key(stat))
        try:
            for offset in range(0, length, step):
                size = min(step, length - offset)
                core.prefetcher.advance(
                    streams, file, offset, size, partial(self._reading.fetch_with, stat)
                )
                rest = memoryview(core.blocks.read(file, offset, size, fetch))
                while rest:
                    written = os.pwrite(fd, rest, offset)
                    rest, offset = rest[written:], offset + written
        finally:
            streams.cancelled.set()
            core.blocks.release(file)

    async def _upload(self, inode: Inode) -> None:
        """Send local bytes that the store lacks. The tree is shared and the inode's lock
        is held.
        """
        core = self._core
        staged = core.staged(inode)
        if staged is None or staged.state is not StagedState.DIRTY:
            return
        if inode.link is not Link.LINKED:
            return
        path = core.inodes.path_of(inode)
        try:
            upload = core.staging.upload_left if staged.is_left else core.staging.upload
            stat = await core.workers.call(upload, staged, core.volume, path)
            if stat is None:
                # Kept as failed; the next mount puts the bytes beside what the store has.
                raise OSError(errno.ESTALE, LATER_VERSION)
        except (VolumeError, OSError) as error:
            staged.error = error
            raise
        await self.drop_namesakes(stat)
        self.note_uploaded(inode, stat)

    async def drop_namesakes(self, stat: FileStat) -> None:
        """Before `stat`, which was just made here, is believed: what is cached under its version is
        another content's. Some stores tell versions apart by size and whole second.
        """
        await self._core.workers.call(self._core.blocks.drop, file_key(stat))

    def note_uploaded(self, inode: Inode, stat: FileStat) -> None:
        """The store has the inode's local bytes as this version, and so does the kernel."""
        core = self._core
        if inode.set_mtime_ns is not None and inode.set_version == "":
            inode.set_version = stat.version
        inode.stat, inode.checked_at = stat, time.monotonic()
        inode.told = inode.cached = stat.version
        # Two nodes do not put large files of one size into one second.
        inode.was_young = core.is_young(stat) and stat.size_bytes <= _MAX_DOUBTED_BYTES
        core.metadata.note_present(inode.parent_ino, inode.name, stat)
        staged = core.staged(inode)
        if staged is not None and staged.size_bytes != stat.size_bytes:
            # The store was asked after it had the bytes, and another node's are there by then.
            inode.told = inode.cached = None
            core.doubt(inode)
        core.inodes.save(inode)

    async def _finish(self, inode: Inode) -> None:
        """Nobody has the file open: upload what no close has sent, then let the local bytes go."""
        core = self._core
        staged = core.staged(inode)
        if staged is None or core.handles.is_open(inode.ino):
            return
        if staged.state is StagedState.DIRTY and staged.error is None:
            # Written through a mapping after the last close; nobody is left to be told of an error.
            with suppress(VolumeError, OSError):
                await self._upload(inode)
        await self.retire(inode)

    async def retire(self, inode: Inode) -> None:
        """Local bytes that nobody has open go: they are uploaded, or failed. The inode's lock is
        held.
        """
        core = self._core
        staged = core.staged(inode)
        if staged is not None and staged.state is StagedState.CLEAN and inode.stat is not None:
            await core.workers.call(self._keep_as_blocks, staged, inode.stat)
        # From here to `withdraw` there must be no await: an open in between would read a closed
        # file.
        if staged is None or core.handles.is_open(inode.ino):
            return
        core.staging.withdraw(staged)
        if staged.state is not StagedState.DIRTY:
            await core.workers.call(core.staging.discard, staged)
            return
        reason = str(staged.error)
        log.error(
            "A file could not be uploaded; its bytes are kept",
            extra={"path": staged.volume_path, "reason": reason},
        )
        inode.stat = inode.told = inode.cached = None
        core.doubt(inode)
        await core.workers.call(core.staging.fail, staged, reason)

    def _keep_as_blocks(self, staged: StagedFile, stat: FileStat) -> None:
        """In a worker thread: what was just uploaded is likely to be read next."""
        core = self._core
        if not 0 < stat.size_bytes <= core.settings.cache_size_bytes // _ADOPTED_SHARE:
            return
        if stat.size_bytes != staged.size_bytes:
            # Another node's file has taken its place.
            return

        def fetch(byte_range: ByteRange, buffer: memoryview) -> None:
            if os.preadv(staged.descriptor(), [buffer], byte_range.start) != len(byte_range):
                raise OSError(errno.EIO, "the staging file is shorter than what was uploaded")

        # A cache that is full or broken only means that the bytes are fetched again.
        with suppress(OSError):
            file = core.blocks.open(file_key(stat))
            try:
                core.blocks.ensure(file, 0, file.num_blocks - 1, fetch)
            finally:
                core.blocks.release(file)
