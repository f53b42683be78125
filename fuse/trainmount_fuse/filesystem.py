"""The filesystem of one mount, free of FUSE: one method a kernel request, in the order of a file's
life.

`adapter` calls it, tests call it directly. It checks what a request may do and hands on: names to
`namespace`, bytes to `content`, both over the parts in `core`. Methods raise VolumeError or
OSError; `errno` has the numbers. All of them may run at the same time as tasks of one event loop.
A successor over the same settings goes on where a killed one stopped: inode numbers, handles and
local bytes are on disk. docs/concurrency.md tells who may touch what.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import trio

from trainmount_files.errors import VolumeError
from trainmount_files.volume import Volume
from trainmount_fuse.attributes import (
    AttributeChanges,
    Attributes,
    DirEntry,
    OpenFile,
    StatFs,
)
from trainmount_fuse.cache.blocks import BlockCache
from trainmount_fuse.cache.statistics import CacheStatistics
from trainmount_fuse.core import Core, decode_name, state_paths
from trainmount_fuse.memory import MemoryBudget
from trainmount_fuse.names.handles import HandleTable
from trainmount_fuse.names.inodes import Inode, InodeTable
from trainmount_fuse.names.listing import Listing
from trainmount_fuse.names.metadata import Metadata
from trainmount_fuse.names.namespace import Namespace
from trainmount_fuse.names.readings import NAME_MAX_BYTES
from trainmount_fuse.names.spool import Spool
from trainmount_fuse.names.xattrs import ExtendedAttributes
from trainmount_fuse.reads.fetch_process import FetchProcess
from trainmount_fuse.reads.prefetch import Prefetcher
from trainmount_fuse.reads.push import StorePages
from trainmount_fuse.reads.reading import Reading
from trainmount_fuse.settings import MountSettings
from trainmount_fuse.source import look_at_root, source_identity
from trainmount_fuse.state import Intents, get_meta, open_database, set_meta
from trainmount_fuse.workers import TreeLock, Workers
from trainmount_fuse.writes.content import Content
from trainmount_fuse.writes.journal import Journal
from trainmount_fuse.writes.recovery import Recovery
from trainmount_fuse.writes.staging import FilesNotUploaded, Staging
from trainmount_fuse.writes.streaming import Streaming

__all__ = ["FailedFile", "Filesystem"]

log = logging.getLogger(__name__)

_SHARE_OF_ANSWERS: Final = 16
_SHARE_OF_THREADS: Final = 16
"""One part in so many of the mount's memory: for stacks, connections and small things of some
hundred threads that wait for the store.
"""

_STATFS_BLOCK_BYTES: Final = 4096
_STATFS_BYTES: Final = 1 << 50
"""A volume has no size. A pebibyte free keeps installers and `df` content."""

_STATFS_FILES: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class FailedFile:
    """Bytes whose upload failed, after their program was told so. Kept until the next mount tries
    again.
    """

    path: str
    size_bytes: int
    reason: str


class Filesystem:
    """One mount of one volume."""

    def __init__(
        self,
        volume: Volume,
        settings: MountSettings,
        store_pages: StorePages | None = None,
        fetch_process: FetchProcess | None = None,
    ) -> None:
        """Nothing is touched before `start`. The volume stays the caller's to close.

        What is read ahead goes into the kernel's pages by `store_pages`, where there is a kernel,
        and whole small files are fetched by `fetch_process`, where there is one.
        """
        self._fetch_process = fetch_process
        self._store_pages = store_pages
        self._volume = volume
        self._settings = settings
        self._core: Core | None = None
        self._recovered = trio.Event()

    async def start(self) -> None:
        """Take over what the state directory holds, and begin to upload what was left there.

        Raises OSError where the cache or state directory cannot be used.
        """
        process = self._fetch_process
        core = await trio.to_thread.run_sync(_open_core, self._volume, self._settings, process)
        if not core.handles.is_successor:
            core.inodes.delete_all_plain()
        self._core = core
        self._reading = Reading(core, self._store_pages)
        self._content = Content(core, self._reading)
        self._namespace = Namespace(core, self._content)
        self._listing = Listing(core, Spool(core.settings.state_dir / "listings"))
        self._recovery = Recovery(core, self._content)
        trio.lowlevel.spawn_system_task(self._recover, self._recovery.sort())
        if process is not None:
            trio.lowlevel.spawn_system_task(process.attend)

    async def stop(self) -> None:
        """Upload what is not uploaded yet, then free everything.

        Raises FilesNotUploaded, after everything is freed, where something could not be uploaded.
        """
        core = self._started()
        await self.upload_all()
        unsent = core.staging.unsent()
        core.prefetcher.give_up()
        await core.workers.call(core.prefetcher.close)
        core.staging.close()
        core.blocks.close()
        core.inodes.close()
        self._core = None
        if unsent:
            raise FilesNotUploaded(unsent)

    @property
    def core(self) -> Core:
        """The parts, for who looks at the mount as a whole. Raises OSError ENOTCONN."""
        return self._started()

    @property
    def is_read_only(self) -> bool:
        """Nothing can be written, so nothing can be left to send."""
        return self._settings.read_only

    async def upload_all(self) -> None:
        """Upload what is not uploaded yet, and once more what failed before. What could not be is
        still in the staging directory then.
        """
        core = self._started()
        await self._recovered.wait()
        async with trio.open_nursery() as nursery:
            for ino in core.staging.inos():
                nursery.start_soon(self._upload_one, core.inodes.get(ino))
            # Programs were told that these failed; it costs nothing to try once more.
            nursery.start_soon(self._recovery.upload, self._recovery.failed_again())

    # Names and attributes

    async def lookup(self, parent_ino: int, name: bytes) -> Attributes:
        """The attributes of a name; `ino` 0 where it is not there. Counts one lookup of
        the inode.

        The kernel remembers the name of a file for as long as an open may believe what is known:
        usually not at all, so that it looks it up again for each open(2), and where that asked the
        store, `open` need not.
        """
        core = self._started()
        directory = core.directory(parent_ino)
        arrived_at = time.monotonic()
        text = decode_name(name)
        self._reading.begin_early(parent_ino, text)
        max_age = 0.0 if core.is_reopening else core.settings.entry_timeout_seconds
        inode, asked_at = await core.resolve(directory, text, max_age)
        if inode is None:
            return core.negative(asked_at)
        inode.lookup_count += 1
        attributes = core.attributes(inode)
        if inode.is_directory:
            return attributes
        inode.note_looked_up(arrived_at)
        return core.looked_up_for_each_open(attributes)

    async def forget(self, lookups: Iterable[tuple[int, int]]) -> None:
        """The kernel dropped that many lookups of each inode. Numbers we do not know are
        ignored.
        """
        core = self._started()
        core.inodes.forget(lookups, core.is_used)

    async def getattr(self, ino: int, fh: int | None = None) -> Attributes:  # noqa: ARG002
        """An open file shows the version it is open at, or its local bytes."""
        core = self._started()
        inode = core.inodes.get(ino)
        if core.staged(inode) is not None or core.handles.is_open(ino):
            return core.attributes(inode)
        current = await core.refresh(inode, core.settings.attr_timeout_seconds)
        if current is not inode:
            raise OSError(errno.ESTALE, "the name has another inode now")
        return core.attributes(inode)

    async def setattr(
        self,
        ino: int,
        changes: AttributeChanges,
        fh: int | None = None,
    ) -> Attributes:
        """Size is the content's; mode and times are remembered here; owner and group are fixed."""
        core = self._started()
        core.require_writable()
        inode = core.inodes.get(ino)
        if fh is None and core.staged(inode) is None and not core.handles.is_open(ino):
            current = await core.refresh(inode, core.settings.attr_timeout_seconds)
            if current is not inode:
                raise OSError(errno.ESTALE, "the name has another inode now")
        if changes.size is not None:
            await self._content.resize(core.file(ino), changes.size)
        if changes.mode is not None:
            inode.mode = changes.mode & 0o7777
        if changes.atime_ns is not None:
            inode.atime_ns = changes.atime_ns
        if changes.mtime_ns is not None:
            inode.set_mtime_ns = changes.mtime_ns
            inode.set_version = core.shown_version(inode)
        core.inodes.save(inode)
        return core.attributes(inode)

    # Bytes

    async def open(self, ino: int, flags: int) -> OpenFile:
        """Close-to-open: what another node has closed before this call is what the handle reads.

        ESTALE asks the kernel to look the name up again and come back, which it does by itself.
        """
        core = self._started()
        inode = core.file(ino)
        staged = core.staged(inode)
        if staged is not None and staged.is_left and flags & os.O_TRUNC:
            # What is written anew must not be judged by what an earlier daemon's bytes follow on.
            await self._recovery.settle(inode)
        return await self._content.open(inode, flags)

    async def create(
        self, parent_ino: int, name: bytes, mode: int, flags: int
    ) -> tuple[OpenFile, Attributes]:
        """A new file, open. With O_EXCL the store, too, refuses to overwrite (at the
        first close).
        """
        core = self._started()
        directory = core.directory(parent_ino)
        opened, attributes = await self._namespace.create(directory, decode_name(name), mode, flags)
        core.inodes.get(attributes.ino).lookup_count += 1
        return opened, attributes

    async def read(self, fh: int, offset: int, size: int) -> bytes | bytearray | memoryview:
        """Exactly the bytes of the range; fewer only at the end of the file."""
        core = self._started()
        return await self._reading.read(core.handles.get(fh), offset, size)

    async def write(self, fh: int, offset: int, data: bytes | bytearray | memoryview) -> int:
        """Safe from this process's death when it returns; the same again is harmless."""
        core = self._started()
        return await self._content.write(core.handles.get(fh), offset, data)

    async def flush(self, fh: int) -> None:
        """close(2), once a descriptor: the store has the file when it returns, or it raises."""
        core = self._started()
        handle = core.handles.get(fh)
        if handle.is_writable:
            await self._content.upload(core.file(handle.ino))

    async def fsync(self, fh: int, datasync: bool) -> None:  # noqa: ARG002
        """The store has the file when it returns, or it raises."""
        core = self._started()
        await self._content.upload(core.file(core.handles.get(fh).ino))

    async def release(self, fh: int) -> None:
        """The last close of the handle. Again, or of a handle from another mount, is harmless."""
        core = self._started()
        handle = core.handles.find(fh)
        if handle is not None:
            await self._content.release(handle)

    # Directories

    async def opendir(self, ino: int) -> int:
        """A handle to read the directory's entries from."""
        core = self._started()
        return core.handles.open(core.directory(ino).ino, os.O_RDONLY, is_directory=True).fh

    async def readdir(self, fh: int, start_id: int) -> Iterator[DirEntry]:
        """Some entries behind `start_id` (0: from the start, seen anew); none at the end.

        `next_id` means the same for as long as the handle is open and not rewound: in a successor
        and while names come and go. Each entry but `.` and `..` counts one lookup of its inode.
        """
        core = self._started()
        handle = core.handles.get(fh)
        return await self._listing.entries(handle, start_id)

    async def fsyncdir(self, fh: int) -> None:
        """Names are in the store when their operations return: nothing is left to do."""
        self._started().handles.get(fh)

    async def releasedir(self, fh: int) -> None:
        """The directory handle is closed."""
        core = self._started()
        handle = core.handles.find(fh)
        if handle is not None:
            self._listing.close(handle)
            core.handles.release(handle)

    async def mkdir(self, parent_ino: int, name: bytes, mode: int) -> Attributes:
        """A new directory, in the store when it returns. Counts one lookup of the inode."""
        core = self._started()
        attributes = await self._namespace.mkdir(
            core.directory(parent_ino), decode_name(name), mode
        )
        core.inodes.get(attributes.ino).lookup_count += 1
        return attributes

    async def unlink(self, parent_ino: int, name: bytes) -> None:
        """The name is gone at once; open handles live on."""
        core = self._started()
        await self._namespace.unlink(core.directory(parent_ino), decode_name(name))

    async def rmdir(self, parent_ino: int, name: bytes) -> None:
        """Raises ENOTEMPTY for a directory with entries, those not uploaded yet among them."""
        core = self._started()
        await self._namespace.rmdir(core.directory(parent_ino), decode_name(name))

    async def rename(
        self, parent_ino: int, name: bytes, new_parent_ino: int, new_name: bytes, flags: int
    ) -> None:
        """A file moves in one step as far as the store can; a directory file by file."""
        core = self._started()
        await self._namespace.rename(
            core.directory(parent_ino),
            decode_name(name),
            core.directory(new_parent_ino),
            decode_name(new_name),
            flags,
        )

    def give_up_reads(self) -> None:
        """Reads that wait for the store's bytes are EIO from now on. Before `stop`, for programs
        that read on when the mount is to end.
        """
        if self._core is not None:
            self._reading.give_up()

    async def ask_store(self) -> None:
        """One question that only the store can answer. Raises VolumeError. Cancelling leaves it
        alone.
        """
        await trio.to_thread.run_sync(look_at_root, self._volume, abandon_on_cancel=True)

    # What a volume has not, or has in name only

    async def statfs(self) -> StatFs:
        """A volume without end."""
        num_blocks = _STATFS_BYTES // _STATFS_BLOCK_BYTES
        return StatFs(
            block_size=_STATFS_BLOCK_BYTES,
            num_blocks=num_blocks,
            num_free_blocks=num_blocks,
            num_files=_STATFS_FILES,
            num_free_files=_STATFS_FILES,
            name_max=NAME_MAX_BYTES,
        )

    async def getxattr(self, ino: int, name: bytes) -> bytes:
        """What the mount knows of the file, as `user.trainmount.*` (xattrs.py). Else ENODATA."""
        return await ExtendedAttributes(self._started()).get(ino, name)

    async def listxattr(self, ino: int) -> list[bytes]:
        """The names that `getxattr` knows."""
        return await ExtendedAttributes(self._started()).names(ino)

    async def setxattr(self, ino: int, name: bytes, value: bytes) -> None:  # noqa: ARG002
        """A volume keeps no attributes: EOPNOTSUPP, over which mv(1) and cp(1) are silent."""
        ExtendedAttributes(self._started()).refuse_change(ino)

    async def removexattr(self, ino: int, name: bytes) -> None:  # noqa: ARG002
        """As `setxattr`."""
        ExtendedAttributes(self._started()).refuse_change(ino)

    # Seeing

    def failed_files(self) -> list[FailedFile]:
        """Files whose programs were told that the upload failed, and whose bytes are still here."""
        return [
            FailedFile(one.volume_path, one.path.stat().st_size, one.reason)
            for one in self._started().staging.failed()
        ]

    def cache_statistics(self) -> CacheStatistics:
        """A snapshot of the block cache's counters."""
        return self._started().blocks.statistics()

    def _started(self) -> Core:
        if self._core is None:
            raise OSError(errno.ENOTCONN, "the filesystem is not started")
        return self._core

    async def _recover(self, pending: list[Inode]) -> None:
        try:
            await self._recovery.upload(pending)
        finally:
            self._recovered.set()

    async def _upload_one(self, inode: Inode) -> None:
        try:
            await self._content.upload(inode)
        except (VolumeError, OSError) as error:
            fields = {"ino": inode.ino, "reason": str(error)}
            log.error("A file is not uploaded yet; its bytes are kept", extra=fields)


def _open_core(volume: Volume, settings: MountSettings, fetch_process: FetchProcess | None) -> Core:
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    state_path, journal_path, staging_path = state_paths(settings.state_dir)
    schema = Intents.SCHEMA + InodeTable.SCHEMA + HandleTable.SCHEMA
    database, _is_whole = open_database(state_path, schema, durable=False)
    if get_meta(database, "made_ns") is None:
        set_meta(database, "made_ns", str(time.time_ns()))
    memory, journal = MemoryBudget(settings.memory_bytes), Journal(journal_path)
    memory.split_off(settings.memory_bytes // _SHARE_OF_THREADS)
    answers = memory.split_off(settings.memory_bytes // _SHARE_OF_ANSWERS)
    blocks = BlockCache(
        settings.cache_dir / "blocks",
        capacity_bytes=settings.cache_size_bytes,
        block_size_bytes=settings.block_size_bytes,
        max_fetch_bytes=settings.prefetch_fetch_bytes,
        free_disk_floor_bytes=settings.free_disk_floor_bytes,
        source=source_identity(settings, os.environ),
        memory=memory,
    )
    workers = Workers(settings.num_worker_threads)
    inodes = InodeTable(database, settings.state_dir / "inodes")
    return Core(
        volume=volume,
        settings=settings,
        workers=workers,
        memory=memory,
        answers=answers,
        tree=TreeLock(),
        inodes=inodes,
        handles=HandleTable(database, settings.mount_id, settings.state_dir / "handles"),
        intents=Intents(database),
        metadata=Metadata(volume, workers, inodes, settings),
        blocks=blocks,
        prefetcher=Prefetcher(
            blocks,
            max_bytes=settings.prefetch_max_bytes,
            fetch_bytes=settings.prefetch_fetch_bytes,
            block_size_bytes=settings.block_size_bytes,
            num_threads=settings.num_prefetch_threads,
            process=fetch_process,
        ),
        staging=Staging(
            staging_path,
            journal,
            streaming=Streaming(volume, journal, memory, from_bytes=settings.stream_from_bytes),
            free_disk_floor_bytes=settings.free_disk_floor_bytes,
            free_space=blocks.free_space,
        ),
        made_ns=int(get_meta(database, "made_ns") or 0),
    )
