"""What every operation needs: the parts of one mount, and how an inode is brought up to date and
shown.

`filesystem` makes one `Core`; `content`, `namespace` and `recovery` work on it. All methods run on
the event loop's thread.

Versions. An inode that is open shows one version for as long as it is open (its pages in the
kernel are shared by all handles, so two versions in one inode would mix). When the store has
another version while old handles are open, the name gets a new inode and the old one is REPLACED.
Local bytes (staging) win over whatever the store says, until they are uploaded or given up.
"""

from __future__ import annotations

import errno
import math
import stat as stat_module
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from trainmount_files.errors import VolumeError
from trainmount_files.volume import FileStat, Volume
from trainmount_fuse.attributes import ROOT_INO, Attributes
from trainmount_fuse.cache.block_file import FileKey
from trainmount_fuse.cache.blocks import BlockCache
from trainmount_fuse.errno import errno_of_transfer
from trainmount_fuse.memory import MemoryBudget
from trainmount_fuse.names.handles import HandleTable
from trainmount_fuse.names.inodes import Inode, InodeTable, Link
from trainmount_fuse.names.metadata import Metadata
from trainmount_fuse.names.readings import is_valid_name
from trainmount_fuse.reads.prefetch import Prefetcher
from trainmount_fuse.settings import MountSettings
from trainmount_fuse.state import Intents
from trainmount_fuse.workers import TreeLock, Workers
from trainmount_fuse.writes.journal import StagedState, journal_path
from trainmount_fuse.writes.staged_file import StagedFile
from trainmount_fuse.writes.staging import Staging

__all__ = ["Core", "decode_name", "file_key", "state_paths", "transfer_error"]

_SECOND_TRY_SECONDS: Final = 1.0
"""The kernel looks a name up again and opens again at once; longer means another open."""

_YOUNG_NS: Final = 3_000_000_000
"""A second, and what the store's clock may be apart from ours."""


@dataclass(slots=True)
class Core:
    """The parts of one mount."""

    volume: Volume
    settings: MountSettings
    workers: Workers
    memory: MemoryBudget
    """Of bytes on their way: read ahead, waiting for the disk, parts of uploads."""

    answers: MemoryBudget
    """The part of it for bytes that the kernel is about to be sent. Whoever waits for it waits for
    nothing else than the event loop, and may hold what others wait for.
    """

    tree: TreeLock
    """Taken before any inode's lock."""

    inodes: InodeTable
    handles: HandleTable
    intents: Intents
    metadata: Metadata
    blocks: BlockCache
    prefetcher: Prefetcher
    staging: Staging
    made_ns: int
    """When the state of this mount was made: the time of directories, for which a store keeps none.
    """

    reopening_until: float = -math.inf
    """Monotonic time up to which the kernel may look a name up again for an open that was ESTALE.
    It does so once, so that each `lookup` asks the store until then: the open behind it must not
    fail.
    """

    leaving: set[int] = field(default_factory=set)
    """Files whose names are being taken away. The bytes of those that are open are kept here: what
    the store has at the name meanwhile is not theirs. An open of another waits.
    """

    def directory(self, ino: int) -> Inode:
        """Raises OSError ENOTDIR, ESTALE."""
        inode = self.inodes.get(ino)
        if not inode.is_directory:
            raise OSError(errno.ENOTDIR, "not a directory")
        return inode

    def file(self, ino: int) -> Inode:
        """Raises OSError EISDIR, ESTALE."""
        inode = self.inodes.get(ino)
        if inode.is_directory:
            raise OSError(errno.EISDIR, "is a directory")
        return inode

    def require_writable(self) -> None:
        """Raises OSError EROFS."""
        if self.settings.read_only:
            raise OSError(errno.EROFS, "the mount is read-only")

    def staged(self, inode: Inode) -> StagedFile | None:
        """The local bytes of the inode; None where the store's are all there is."""
        return self.staging.find(inode.ino)

    def unsent(self, inode: Inode) -> StagedFile | None:
        """The local bytes of the inode where the store lacks them, or soon will: what the store
        says does not count then.
        """
        staged = self.staged(inode)
        if staged is None or inode.ino in self.leaving or staged.state is not StagedState.CLEAN:
            return staged
        # Between the store's answer and what follows from it here, the inode is still told to be
        # what the store had before.
        is_noted = inode.stat is not None and inode.stat.version == staged.base_version
        return None if is_noted else staged

    def staged_child(self, directory: Inode, name: str) -> Inode | None:
        """The inode at a name whose local bytes the store does not have yet, or not as they are."""
        child = self.inodes.find_child(directory.ino, name)
        if child is not None and self.unsent(child) is not None:
            return child
        return None

    def staged_children(self, directory: Inode) -> list[Inode]:
        """Every inode in the directory with local bytes that the store lacks."""
        found = [self.inodes.get(ino) for ino in self.staging.inos()]
        here = [one for one in found if one.link is Link.LINKED]
        return [one for one in here if one.parent_ino == directory.ino and self.unsent(one)]

    async def resolve(
        self, directory: Inode, name: str, max_age_seconds: float
    ) -> tuple[Inode | None, float]:
        """The inode at a name, or None and when it was known not to be there.

        Raises VolumeError, OSError.
        """
        now = time.monotonic()
        child = self.inodes.find_child(directory.ino, name)
        if child is not None and self.unsent(child) is not None:
            return child, now
        is_fresh = child is not None and now - child.checked_at < max_age_seconds
        if child is not None and child.stat is not None and is_fresh:
            return child, child.checked_at
        stat, asked_at = await self.metadata.find(directory, name, max_age_seconds)
        # Made here while the store was asked.
        local = self.staged_child(directory, name)
        if local is not None:
            return local, asked_at
        if stat is None:
            if child is not None:
                child.checked_at = -math.inf
            return None, asked_at
        return self.adopt(directory, name, stat, asked_at), asked_at

    def adopt(self, directory: Inode, name: str, stat: FileStat, asked_at: float) -> Inode:
        """Believe what the store said at `asked_at`; returns the inode that the name has now."""
        inode = self.inodes.ensure_child(directory.ino, name, is_directory=stat.is_directory)
        if asked_at < inode.checked_at:
            return inode
        if not inode.is_directory and self.unsent(inode) is not None:
            return inode
        known = inode.stat
        if known is not None and known.version != stat.version:
            # Always another inode: of two answers that tell one inode's size, the kernel may
            # believe the older, and two that open at once would mix new bytes with the old size.
            before = inode
            self.inodes.detach(before, Link.REPLACED)
            inode = self.inodes.ensure_child(directory.ino, name, is_directory=False)
            inode.mode, inode.looked_up_at = before.mode, before.looked_up_at
        elif known is not None and not stat.is_directory and _is_same_file(known, stat):
            # A store may tell one file's time in different resolutions; the first one stands.
            stat = known
        inode.stat, inode.checked_at = stat, asked_at
        return inode

    async def refresh(self, inode: Inode, max_age_seconds: float) -> Inode:
        """The inode that the name of `inode` has, at most that old: often the same one.

        Raises OSError ENOENT where the name is gone, ESTALE; VolumeError.
        """
        is_fresh = time.monotonic() - inode.checked_at < max_age_seconds
        if inode.ino == ROOT_INO or (is_fresh and inode.stat is not None):
            return inode
        if inode.link is not Link.LINKED:
            raise OSError(errno.ESTALE, "the name of this inode is gone")
        directory = self.inodes.get(inode.parent_ino)
        current, _asked_at = await self.resolve(directory, inode.name, max_age_seconds)
        if current is None:
            raise OSError(errno.ENOENT, "no such file or directory")
        return current

    @property
    def is_reopening(self) -> bool:
        """Whether some open may be the second try of one that was ESTALE."""
        return time.monotonic() < self.reopening_until

    def look_up_again(self, reason: str) -> OSError:
        """The ESTALE of an `open` upon which the kernel looks the name up and opens once more."""
        self.reopening_until = time.monotonic() + _SECOND_TRY_SECONDS
        return OSError(errno.ESTALE, reason)

    def doubt(self, inode: Inode) -> None:
        """Something showed that the store has another file there than we know of: ask next time."""
        inode.checked_at = -math.inf
        if inode.link is Link.LINKED and inode.ino != ROOT_INO:
            self.metadata.note_unknown(inode.parent_ino, inode.name)

    def is_used(self, inode: Inode) -> bool:
        """Whether anybody here needs the inode although the kernel may have forgotten it."""
        return (
            inode.is_locked
            or self.handles.is_open(inode.ino)
            or self.staging.find(inode.ino) is not None
        )

    def negative(self, asked_at: float) -> Attributes:
        """The answer for a name that was not there at `asked_at`."""
        age = time.monotonic() - asked_at
        timeout = max(0.0, self.settings.negative_timeout_seconds - age)
        return Attributes(0, entry_timeout_seconds=timeout)

    def is_young(self, stat: FileStat) -> bool:
        """Whether another content may get the same version yet: the second is not over in which
        this one was stored. Until then nothing that is cached under the version is sure.
        """
        is_coarse = self.volume.capabilities.coarse_versions
        return is_coarse and time.time_ns() - stat.mtime_ns < _YOUNG_NS

    def shown_version(self, inode: Inode) -> str:
        """The version whose content the inode shows; empty for local bytes that the store lacks."""
        staged = self.staged(inode)
        if inode.stat is None or (staged is not None and staged.state is not StagedState.CLEAN):
            return ""
        return inode.stat.version

    def attributes(self, inode: Inode) -> Attributes:
        """What `stat` shows now; from here on the kernel knows this version of it."""
        if inode.is_directory:
            return self._directory_attributes(inode)
        staged = self.staged(inode)
        age = max(0.0, time.monotonic() - inode.checked_at)
        attr_timeout = self.settings.attr_timeout_seconds
        if staged is not None:
            size, mtime_ns = staged.size_bytes, staged.mtime_ns
            # The store gives the file another time when it arrives there, which then stays: editors
            # take a time that changes after their `close` for a change by others.
            age = attr_timeout = 0.0
            if inode.stat is not None and self.unsent(inode) is None:
                mtime_ns = inode.stat.mtime_ns
        elif inode.stat is not None:
            size, mtime_ns = inode.stat.size_bytes, inode.stat.mtime_ns
            if not self.handles.is_open(inode.ino):
                attr_timeout = max(0.0, attr_timeout - age)
        else:
            raise OSError(errno.ESTALE, "nothing is known of this inode any more")
        version = self.shown_version(inode)
        versions = {version}
        if staged is not None:
            # A local change takes a set time away: what is left was set on these bytes.
            versions |= {"", "" if inode.stat is None else inode.stat.version}
        if inode.set_mtime_ns is not None and inode.set_version in versions:
            mtime_ns = inode.set_mtime_ns
        inode.told = version
        mode = self.settings.file_mode if inode.mode is None else inode.mode
        return Attributes(
            ino=inode.ino,
            mode=stat_module.S_IFREG | mode,
            nlink=1 if inode.link is Link.LINKED else 0,
            uid=self.settings.uid,
            gid=self.settings.gid,
            size=size,
            atime_ns=mtime_ns if inode.atime_ns is None else inode.atime_ns,
            mtime_ns=mtime_ns,
            ctime_ns=mtime_ns,
            entry_timeout_seconds=max(0.0, self.settings.entry_timeout_seconds - age),
            attr_timeout_seconds=attr_timeout,
        )

    def looked_up_for_each_open(self, attributes: Attributes) -> Attributes:
        """The same of a file, with a name that the kernel remembers no longer than an open may
        believe what is known: usually not at all.
        """
        timeout = min(attributes.entry_timeout_seconds, self.settings.open_timeout_seconds)
        return replace(attributes, entry_timeout_seconds=timeout)

    def _directory_attributes(self, inode: Inode) -> Attributes:
        age = max(0.0, time.monotonic() - inode.checked_at) if inode.ino != ROOT_INO else 0.0
        mtime_ns = self.made_ns
        if inode.set_mtime_ns is not None:
            mtime_ns = inode.set_mtime_ns
        elif inode.stat is not None and inode.stat.mtime_ns:
            mtime_ns = inode.stat.mtime_ns
        mode = self.settings.directory_mode if inode.mode is None else inode.mode
        return Attributes(
            ino=inode.ino,
            mode=stat_module.S_IFDIR | mode,
            nlink=2 if inode.link is Link.LINKED else 0,
            uid=self.settings.uid,
            gid=self.settings.gid,
            atime_ns=mtime_ns if inode.atime_ns is None else inode.atime_ns,
            mtime_ns=mtime_ns,
            ctime_ns=mtime_ns,
            entry_timeout_seconds=max(0.0, self.settings.entry_timeout_seconds - age),
            attr_timeout_seconds=max(0.0, self.settings.attr_timeout_seconds - age),
        )


def file_key(stat: FileStat) -> FileKey:
    """Under what the block cache keeps this version of the file."""
    return FileKey(stat.path, stat.version, stat.size_bytes, stat.mtime_ns)


def _is_same_file(known: FileStat, stat: FileStat) -> bool:
    return known.version == stat.version and known.path == stat.path


def decode_name(name: bytes) -> str:
    """A name from the kernel as a name in a volume. Raises OSError ENAMETOOLONG, EILSEQ, EINVAL."""
    if len(name) > 255:
        raise OSError(errno.ENAMETOOLONG, "a name has at most 255 bytes")
    try:
        text = name.decode()
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, "names in a volume are UTF-8") from error
    if not is_valid_name(text):
        raise OSError(errno.EINVAL, "not a name")
    return text


def transfer_error(error: VolumeError) -> OSError:
    """An error of moving bytes, inside an operation on names, as the program should see it."""
    return OSError(errno_of_transfer(error), str(error))


def state_paths(state_dir: Path) -> tuple[Path, Path, Path]:
    """Where a mount keeps its two databases and its staging files."""
    return state_dir / "state.db", journal_path(state_dir), state_dir / "staging"
