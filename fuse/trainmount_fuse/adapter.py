"""The only module that speaks pyfuse3: kernel requests in, calls of `Filesystem` out. Used by
session/daemon.py.

An exception other than FUSEError out of a handler ends pyfuse3's loop and with it the mount, so
every handler runs inside `_answering`, which lets nothing else through.
"""

# ruff: noqa: ARG002 - pyfuse3 decides what a handler gets

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final

import pyfuse3
import trio
from pyfuse3 import FileHandleT, FileNameT, FlagT, InodeT, ModeT, RequestContext, XAttrNameT

from trainmount_files.errors import Unavailable, VolumeError
from trainmount_fuse.attributes import AttributeChanges, Attributes, OpenFile
from trainmount_fuse.control.refreshing import StaleNames
from trainmount_fuse.errno import errno_of, errno_of_transfer
from trainmount_fuse.request_counts import RequestCounter
from trainmount_fuse.turns import Library, Turn

if TYPE_CHECKING:
    from trainmount_fuse.filesystem import Filesystem

__all__ = ["FuseAdapter", "RememberedNames", "open_session", "serve_session", "store_pages"]

logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 1 << 20
"""st_blksize: what cp, Python and others read and write at once. The largest request pyfuse3
takes."""

MAX_TASKS: Final = 2048
"""Requests in progress. Above max_background (1024), so that read-ahead cannot keep a lookup
waiting."""

_TURN: Final = Turn()
"""Of the tasks of this process's one session."""

_FUSE_NOTIFY_INC_EPOCH: Final = struct.pack("<IiQ", 16, 8, 0)

_TRANSFERS: Final = frozenset({"read", "write", "flush", "fsync", "release"})


class FuseAdapter(pyfuse3.Operations):  # type: ignore[misc, unused-ignore]
    """Translates between pyfuse3's types and the filesystem's plain ones, and errors to numbers."""

    # "." and ".." are never looked up: nobody exports this over NFS.
    supports_dot_lookup = False
    # The kernel would hold written data back and own size and times, which breaks close-to-open
    # between nodes.
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, filesystem: Filesystem) -> None:
        super().__init__()
        self._filesystem = filesystem
        self.requests = RequestCounter()
        """What the kernel asked for since the start."""

    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._answering("lookup", parent_inode):
            return _entry(await self._filesystem.lookup(parent_inode, name))

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        try:
            with self._answering("forget", 0):
                await self._filesystem.forget(list(inode_list))
        except pyfuse3.FUSEError:
            # Nobody waits for an answer; the cause is in the log.
            return

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> pyfuse3.EntryAttributes:
        with self._answering("getattr", inode):
            return _entry(await self._filesystem.getattr(inode, None))

    async def setattr(
        self,
        inode: InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> pyfuse3.EntryAttributes:
        with self._answering("setattr", inode):
            changes = AttributeChanges(
                size=attr.st_size if fields.update_size else None,
                mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
                uid=attr.st_uid if fields.update_uid else None,
                gid=attr.st_gid if fields.update_gid else None,
                atime_ns=attr.st_atime_ns if fields.update_atime else None,
                mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            )
            return _entry(await self._filesystem.setattr(inode, changes, fh))

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> pyfuse3.FileInfo:
        with self._answering("open", inode):
            return _file_info(await self._filesystem.open(inode, flags))

    async def create(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        mode: ModeT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        with self._answering("create", parent_inode):
            opened, attributes = await self._filesystem.create(parent_inode, name, mode, flags)
            return _file_info(opened), _entry(attributes)

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        with self._answering("read", fh):
            # Any contiguous buffer is sent as it is, without a copy.
            return await self._filesystem.read(fh, off, size)  # type: ignore[return-value, unused-ignore]

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        with self._answering("write", fh):
            return await self._filesystem.write(fh, off, buf)

    async def flush(self, fh: FileHandleT) -> None:
        if self._filesystem.is_read_only:
            # The kernel sends no other one then, and close(2) waits for nothing.
            raise pyfuse3.FUSEError(errno.ENOSYS)
        with self._answering("flush", fh):
            await self._filesystem.flush(fh)

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        with self._answering("fsync", fh):
            await self._filesystem.fsync(fh, datasync)

    async def release(self, fh: FileHandleT) -> None:
        with self._answering("release", fh):
            await self._filesystem.release(fh)

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        with self._answering("opendir", inode):
            return FileHandleT(await self._filesystem.opendir(inode))

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        with self._answering("readdir", fh):
            for entry in await self._filesystem.readdir(fh, start_id):
                if not pyfuse3.readdir_reply(
                    token, entry.name, _entry(entry.attributes), entry.next_id
                ):
                    break

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        with self._answering("fsyncdir", fh):
            await self._filesystem.fsyncdir(fh)

    async def releasedir(self, fh: FileHandleT) -> None:
        with self._answering("releasedir", fh):
            await self._filesystem.releasedir(fh)

    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._answering("mkdir", parent_inode):
            return _entry(await self._filesystem.mkdir(parent_inode, name, mode))

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        with self._answering("unlink", parent_inode):
            await self._filesystem.unlink(parent_inode, name)

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        with self._answering("rmdir", parent_inode):
            await self._filesystem.rmdir(parent_inode, name)

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        with self._answering("rename", parent_inode_old):
            await self._filesystem.rename(
                parent_inode_old, name_old, parent_inode_new, name_new, flags
            )

    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        with self._answering("statfs", 0):
            values = await self._filesystem.statfs()
            answer = pyfuse3.StatvfsData()
            answer.f_bsize = answer.f_frsize = values.block_size
            answer.f_blocks = values.num_blocks
            answer.f_bfree = answer.f_bavail = values.num_free_blocks
            answer.f_files = values.num_files
            answer.f_ffree = answer.f_favail = values.num_free_files
            answer.f_namemax = values.name_max
            return answer

    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        if not name.startswith(b"user."):
            # The kernel itself asks for `security.*` and `system.*`, often.
            raise pyfuse3.FUSEError(errno.ENODATA)
        with self._answering("getxattr", inode):
            return await self._filesystem.getxattr(inode, name)

    async def setxattr(
        self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext
    ) -> None:
        with self._answering("setxattr", inode):
            await self._filesystem.setxattr(inode, name, value)

    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        with self._answering("listxattr", inode):
            return [XAttrNameT(name) for name in await self._filesystem.listxattr(inode)]

    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        with self._answering("removexattr", inode):
            await self._filesystem.removexattr(inode, name)

    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        with self._answering("readlink", inode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._answering("symlink", parent_inode):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    async def link(
        self,
        inode: InodeT,
        new_parent_inode: InodeT,
        new_name: FileNameT,
        ctx: RequestContext,
    ) -> pyfuse3.EntryAttributes:
        with self._answering("link", inode):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    async def mknod(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        mode: ModeT,
        rdev: int,
        ctx: RequestContext,
    ) -> pyfuse3.EntryAttributes:
        with self._answering("mknod", parent_inode):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def _answering(self, operation: str, ino_or_fh: int) -> _Answering:
        return _Answering(self.requests, operation, ino_or_fh)


class _Answering:
    """Counts a request and lets only FUSEError out. A class: a generator would cost a tenth of a
    request.
    """

    __slots__ = ("_began_ns", "_ino_or_fh", "_operation", "_requests")

    def __init__(self, requests: RequestCounter, operation: str, ino_or_fh: int) -> None:
        self._requests = requests
        self._operation = operation
        self._ino_or_fh = ino_or_fh

    def __enter__(self) -> None:
        self._began_ns = time.perf_counter_ns()
        self._requests.num_in_progress += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        requests, operation = self._requests, self._operation
        try:
            if isinstance(error, pyfuse3.FUSEError):
                requests.note_error(operation, error.errno)
            elif isinstance(error, Exception):
                code = _code_of(error, operation, self._ino_or_fh)
                requests.note_error(operation, code)
                raise pyfuse3.FUSEError(code) from error
        finally:
            requests.num_in_progress -= 1
            requests.note(operation, time.perf_counter_ns() - self._began_ns)


def store_pages(ino: int, offset: int, data: memoryview) -> None:
    """Put bytes into the kernel's pages of an inode (push.py says when one may). Not from the event
    loop's thread: this waits for pages that the kernel asks us for. Raises OSError."""
    # The interpreter's lock is given up meanwhile.
    pyfuse3.notify_store(InodeT(ino), offset, data)  # type: ignore[arg-type, unused-ignore]


def open_session(adapter: FuseAdapter, fd: int) -> None:
    """Prepare this process's one FUSE session on an open descriptor, which pyfuse3 goes on to use
    by its number."""
    pyfuse3.trio = Library(_TURN)  # type: ignore[attr-defined]
    pyfuse3.init(adapter, f"/dev/fd/{fd}", set())


class RememberedNames:
    """What the kernel remembers of this process's one session, for whoever wants it forgotten."""

    def __init__(self, fd: int) -> None:
        """`fd` is the session's own."""
        self._fd = fd

    async def forget(self, stale: StaleNames) -> None:
        """Let the kernel ask again for these names and their attributes. Pages stay, and nothing
        waits for one that a read holds."""
        if stale.is_everything and self._begin_epoch():
            return
        # In a thread, since the kernel waits for requests in the same directory, which we answer.
        await trio.to_thread.run_sync(_invalidate, stale.names, abandon_on_cancel=True)

    def _begin_epoch(self) -> bool:
        """Every name at once, which kernels can since 6.16."""
        try:
            os.write(self._fd, _FUSE_NOTIFY_INC_EPOCH)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        return True


def _invalidate(names: Sequence[tuple[int, bytes, int]]) -> None:
    for parent_ino, name, ino in names:
        # The kernel may never have known them, or may have forgotten them already.
        with suppress(FileNotFoundError):
            pyfuse3.invalidate_entry(InodeT(parent_ino), FileNameT(name))
        if ino:
            with suppress(FileNotFoundError):
                pyfuse3.invalidate_inode(InodeT(ino), attr_only=True)


async def serve_session() -> None:
    """Answer requests until the mount is gone. Cancel to stop; requests in progress are answered
    first."""
    trio.lowlevel.add_instrument(_TURN)
    while await _lost_a_race():
        # A program that is killed takes back a request between our seeing it and reading it.
        # libfuse reports that as EAGAIN and pyfuse3 ends its loop over it, although nothing is
        # wrong.
        logger.info("a request was taken back while it was read, serving on")


async def _lost_a_race() -> bool:
    try:
        await pyfuse3.main(max_tasks=MAX_TASKS)
    except BaseExceptionGroup as group:
        rest = group.split(lambda error: isinstance(error, BlockingIOError))[1]
        if rest is not None:
            raise rest from None
        return True
    return False


def _code_of(error: Exception, operation: str, ino_or_fh: int) -> int:
    """The number that the program sees, after whoever reads the log has seen what is unusual."""
    if isinstance(error, VolumeError | OSError | sqlite3.OperationalError):
        code = errno_of_transfer(error) if operation in _TRANSFERS else errno_of(error)
        if isinstance(error, Unavailable) or code == errno.EIO:
            logger.warning(
                "a request failed",
                extra={"operation": operation, "errno": code, "reason": str(error)},
            )
        else:
            logger.debug(
                "a request was refused",
                extra={"operation": operation, "on": ino_or_fh, "errno": code},
            )
        return code
    logger.error(
        "a request failed in a way nobody planned for",
        extra={"operation": operation, "on": ino_or_fh},
        exc_info=error,
    )
    return errno.EIO


def _entry(attributes: Attributes) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = attributes.ino
    # pyfuse3's own defaults would let the kernel believe names and sizes for five minutes.
    entry.entry_timeout = attributes.entry_timeout_seconds
    entry.attr_timeout = attributes.attr_timeout_seconds
    entry.st_mode = attributes.mode
    entry.st_nlink = attributes.nlink
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_size = attributes.size
    entry.st_blksize = BLOCK_BYTES
    entry.st_blocks = -(-attributes.size // 512)
    entry.st_atime_ns = attributes.atime_ns
    entry.st_mtime_ns = attributes.mtime_ns
    entry.st_ctime_ns = attributes.ctime_ns
    return entry


def _file_info(opened: OpenFile) -> pyfuse3.FileInfo:
    return pyfuse3.FileInfo(
        fh=FileHandleT(opened.fh), keep_cache=opened.keep_cache, direct_io=opened.direct_io
    )
