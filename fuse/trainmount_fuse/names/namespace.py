"""Operations on names: create, mkdir, unlink, rmdir, rename. Called by `filesystem`.

Each takes a share of the tree's lock, then the directories' locks, then the files', the lower
number first. A request may be a repetition of one that a dead daemon carried out or had begun:
what it would have done is written down before (`Intents`), and every step may be done again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from trainmount_files.errors import NotADirectory, NotFound, Unsupported, VolumeError
from trainmount_files.volume import FileStat, Volume
from trainmount_fuse.attributes import ROOT_INO, Attributes, OpenFile
from trainmount_fuse.core import Core, file_key
from trainmount_fuse.names.inodes import Inode, Link
from trainmount_fuse.names.moving import move_tree
from trainmount_fuse.writes.content import Content
from trainmount_fuse.writes.staging import remote_stat

__all__ = ["RENAME_NOREPLACE", "Namespace"]

RENAME_NOREPLACE: Final = 1
"""Flag of renameat2(2); the others have no meaning for a volume."""

_PERMISSION_BITS: Final = 0o7777


class Namespace:
    """The names of one mount."""

    def __init__(self, core: Core, content: Content) -> None:
        self._core = core
        self._content = content

    async def create(
        self, directory: Inode, name: str, mode: int, flags: int
    ) -> tuple[OpenFile, Attributes]:
        """A new file, open; the store learns of it at the first close. Raises
        VolumeError, OSError.
        """
        core = self._core
        core.require_writable()
        async with core.tree.shared(), directory.lock:
            child, _asked_at = await core.resolve(directory, name, 0.0)
            is_claimed = core.intents.claim("create", directory.ino, name) is not None
            if child is None:
                return await self._create_new(directory, name, mode, flags)
        if child.is_directory:
            raise OSError(errno.EISDIR, "is a directory")
        staged, given = core.staged(child), core.handles.newest(child.ino)
        if is_claimed and staged is not None and given is not None:
            # Nobody can have closed a handle that the kernel was never told of.
            return OpenFile(given.fh), core.attributes(child)
        # Made by a predecessor that died before it wrote a handle down; its empty file may have
        # been uploaded since.
        is_empty = child.stat is not None and child.stat.size_bytes == 0
        is_ours = is_claimed and (staged is not None or is_empty)
        if flags & os.O_EXCL and not is_ours:
            raise OSError(errno.EEXIST, "file exists")
        # Made elsewhere since the kernel looked: its size is told together with the handle.
        core.attributes(child)
        opened = await self._content.open(child, flags)
        return opened, core.attributes(child)

    async def mkdir(self, directory: Inode, name: str, mode: int) -> Attributes:
        """Raises OSError EEXIST; VolumeError."""
        core = self._core
        core.require_writable()
        async with core.tree.shared(), directory.lock:
            child, _asked_at = await core.resolve(directory, name, 0.0)
            if child is not None:
                claimed = core.intents.claim("mkdir", directory.ino, name)
                if claimed is None or not child.is_directory:
                    raise OSError(errno.EEXIST, "file exists")
                return core.attributes(child)
            path = _joined(core.inodes.path_of(directory), name)
            with self._intending("mkdir", directory, name):
                await core.workers.call(core.volume.make_directory, path)
            stat = FileStat(path, is_directory=True, mtime_ns=time.time_ns())
            child = core.adopt(directory, name, stat, time.monotonic())
            child.mode = mode & _PERMISSION_BITS
            core.inodes.save(child)
            core.metadata.note_present(directory.ino, name, stat)
            return core.attributes(child)

    async def unlink(self, directory: Inode, name: str) -> None:
        """Raises OSError ENOENT, EISDIR; VolumeError."""
        core = self._core
        core.require_writable()
        async with core.tree.shared(), directory.lock:
            child, _asked_at = await core.resolve(
                directory, name, core.settings.entry_timeout_seconds
            )
            if child is None:
                child = self._claimed_removal("unlink", directory, name)
                if child is None:
                    return
            if child.is_directory:
                raise OSError(errno.EISDIR, "is a directory")
            with self._intending("unlink", directory, name, leaving=child):
                async with child.lock:
                    await self._unlink_file(child)
                await self._keep(directory)

    async def rmdir(self, directory: Inode, name: str) -> None:
        """Raises OSError ENOENT, ENOTDIR, ENOTEMPTY; VolumeError."""
        core = self._core
        core.require_writable()
        async with core.tree.shared(), directory.lock:
            child, _asked_at = await core.resolve(
                directory, name, core.settings.entry_timeout_seconds
            )
            if child is None:
                child = self._claimed_removal("rmdir", directory, name)
                if child is None:
                    return
            if not child.is_directory:
                if not core.volume.capabilities.keeps_directories:
                    # The kernel asks for directories only: this one ended with its last file, and
                    # the bucket has a file of its name, which shows now.
                    return
                raise OSError(errno.ENOTDIR, "not a directory")
            if core.staged_children(child):
                raise OSError(errno.ENOTEMPTY, "directory not empty")
            path = core.inodes.path_of(child)
            with self._intending("rmdir", directory, name):
                try:
                    await core.workers.call(core.volume.remove_directory, path)
                except NotADirectory:
                    if not core.metadata.is_emptied(directory.ino, name):
                        raise
            core.metadata.note_removed_directory(directory.ino, name)
            core.inodes.detach(child, Link.UNLINKED)
            await self._keep(directory)

    async def rename(
        self, old_parent: Inode, old_name: str, new_parent: Inode, new_name: str, flags: int
    ) -> None:
        """Raises OSError as rename(2), EINVAL for flags other than RENAME_NOREPLACE, EXDEV where
        the store cannot move it, from one volume to another, or a directory is too large;
        VolumeError.
        """
        try:
            await self._rename(old_parent, old_name, new_parent, new_name, flags)
        except Unsupported as error:
            # mv(1) and shutil.move then copy.
            raise OSError(errno.EXDEV, error.reason) from error

    async def _rename(
        self, old_parent: Inode, old_name: str, new_parent: Inode, new_name: str, flags: int
    ) -> None:
        core = self._core
        core.require_writable()
        if flags & ~RENAME_NOREPLACE:
            raise OSError(errno.EINVAL, "a volume cannot exchange names")
        async with core.tree.shared(), _locked(old_parent, new_parent):
            source, target, is_repeated = await self._ends(
                old_parent, old_name, new_parent, new_name
            )
            if source is None or source is target:
                return
            if target is not None and flags & RENAME_NOREPLACE and not is_repeated:
                raise OSError(errno.EEXIST, "file exists")
            _check_kinds(source, target)
            if not source.is_directory:
                argument = f"{new_parent.ino}/{new_name}"
                with self._intending("rename", old_parent, old_name, argument, leaving=target):
                    async with _locked(source, target):
                        await self._rename_file(
                            source, new_parent, new_name, target, is_repeated=is_repeated
                        )
                    await self._keep(old_parent)
                return
        # Uploads below the directory would go to names that are on the move, so all of them wait.
        async with core.tree.exclusive():
            await self._rename_directory(
                (old_parent, old_name), (new_parent, new_name), is_repeated=is_repeated
            )

    async def _create_new(
        self, directory: Inode, name: str, mode: int, flags: int
    ) -> tuple[OpenFile, Attributes]:
        core = self._core
        path = _joined(core.inodes.path_of(directory), name)
        inode = core.inodes.ensure_child(directory.ino, name, is_directory=False)
        inode.stat = inode.told = inode.cached = inode.set_mtime_ns = None
        inode.mode = mode & _PERMISSION_BITS
        with self._intending("create", directory, name):
            async with inode.lock:
                create = partial(
                    core.staging.create,
                    inode.ino,
                    path,
                    base_version=None,
                    exclusive=bool(flags & os.O_EXCL),
                )
                await core.workers.call(create)
        handle = core.handles.open(inode.ino, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
        core.inodes.save(inode)
        return OpenFile(handle.fh), core.attributes(inode)

    async def _unlink_file(self, child: Inode) -> None:
        core = self._core
        await self._content.keep_for_handles(child)
        staged = core.staged(child)
        if staged is None or staged.base_version is not None:
            # Gone by another hand, or by a predecessor's: it is gone, which was the wish.
            with suppress(NotFound):
                await core.workers.call(core.volume.delete, core.inodes.path_of(child))
        self._removed(child)
        await self._content.let_go(child)

    async def _rename_file(
        self,
        source: Inode,
        new_parent: Inode,
        new_name: str,
        target: Inode | None,
        *,
        is_repeated: bool,
    ) -> None:
        core = self._core
        if target is not None:
            await self._content.keep_for_handles(target)
        staged = core.staged(source)
        old_path = core.inodes.path_of(source)
        new_path = _joined(core.inodes.path_of(new_parent), new_name)
        stat: FileStat | None = None
        if staged is None or staged.base_version is not None:
            try:
                stat = await core.workers.call(self._content.move, source, old_path, new_path)
            except NotFound:
                if staged is None or not is_repeated:
                    raise
                # A predecessor did it, or had written down what the file will follow on.
                stat = await core.workers.call(remote_stat, core.volume, new_path)
            if stat is not None:
                await self._content.drop_namesakes(stat)
        if target is not None:
            self._removed(target)
            await self._content.let_go(target)
        if (lost := core.inodes.find_child(new_parent.ino, new_name)) not in (None, source):
            core.inodes.detach(lost, Link.UNLINKED)
        if staged is not None:
            # Not uploaded yet: its upload will follow on what the target has in the store.
            follows = stat if stat is not None or target is None else target.stat
            base = None if follows is None else follows.version
            await core.workers.call(
                partial(core.staging.moved, staged, new_path, base_version=base)
            )
        self._moved(source, new_parent, new_name, stat)

    def _moved(self, inode: Inode, new_parent: Inode, new_name: str, stat: FileStat | None) -> None:
        core = self._core
        core.metadata.note_absent(inode.parent_ino, inode.name)
        core.inodes.move(inode, new_parent.ino, new_name)
        if stat is None:
            core.metadata.note_unknown(new_parent.ino, new_name)
            return
        known = inode.stat
        if known is not None and known.size_bytes == stat.size_bytes:
            # The content is the same under whatever version, for us and for the kernel.
            core.blocks.rekey(file_key(known), file_key(stat))
            inode.told = stat.version if inode.told == known.version else inode.told
            inode.cached = stat.version if inode.cached == known.version else inode.cached
            if inode.set_version == known.version:
                inode.set_version = stat.version
        inode.stat, inode.checked_at = stat, time.monotonic()
        core.inodes.save(inode)
        core.metadata.note_present(new_parent.ino, new_name, stat)

    async def _rename_directory(
        self, old: tuple[Inode, str], new: tuple[Inode, str], *, is_repeated: bool
    ) -> None:
        """A volume moves files only: make the new directories, move each file, remove
        the old ones.
        """
        core = self._core
        (old_parent, old_name), (new_parent, new_name) = old, new
        source, _ = await core.resolve(old_parent, old_name, 0.0)
        target, _ = await core.resolve(new_parent, new_name, 0.0)
        if source is None:
            raise OSError(errno.ENOENT, "no such directory")
        _check_kinds(source, target)
        if core.inodes.is_below(new_parent, source.ino):
            raise OSError(errno.EINVAL, "a directory cannot move into itself")
        old_path = core.inodes.path_of(source)
        new_path = _joined(core.inodes.path_of(new_parent), new_name)
        if target is not None and not is_repeated:
            listing = await core.workers.call(core.volume.list_page, new_path)
            if listing.entries or listing.next_page_token or core.staged_children(target):
                raise OSError(errno.ENOTEMPTY, "directory not empty")
        argument = f"{new_parent.ino}/{new_name}"
        with self._intending("rename", old_parent, old_name, argument):
            try:
                limit = core.settings.rename_max_entries
                await core.workers.call(move_tree, core.volume, old_path, new_path, limit)
            finally:
                # Whatever was moved until an error: nothing known of names is certain.
                core.metadata.clear()
            if target is not None:
                core.inodes.detach(target, Link.UNLINKED)
            core.inodes.move(source, new_parent.ino, new_name)
            for ino in core.staging.inos():
                await self._follow_staged(core.inodes.get(ino), source)
            await self._follow_moved(old_path, new_path)

    async def _follow_staged(self, inode: Inode, moved_directory: Inode) -> None:
        """Local bytes below a moved directory go to another path."""
        core = self._core
        staged = core.staged(inode)
        if staged is None or not core.inodes.is_below(inode, moved_directory.ino):
            return
        path = core.inodes.path_of(inode)
        moved = partial(core.staging.moved, staged, path, base_version=staged.base_version)
        await core.workers.call(moved)

    async def _follow_moved(self, old_path: str, new_path: str) -> None:
        """What is known of files below a moved directory has another path, and perhaps another
        version.
        """
        core = self._core
        prefix = f"{old_path}/"
        for ino in core.handles.open_inos():
            # Those that a predecessor opened may not be in memory yet.
            with suppress(OSError):
                core.inodes.get(ino)
        for inode in core.inodes.in_memory():
            known = inode.stat
            if known is None or not known.path.startswith(prefix):
                continue
            path = f"{new_path}/{known.path.removeprefix(prefix)}"
            inode.checked_at = float("-inf")
            is_told = core.handles.is_open(inode.ino) or inode.set_mtime_ns is not None
            if inode.is_directory or not is_told:
                inode.stat = None
                continue
            moved = replace(known, path=path)
            try:
                now = await core.workers.call(core.volume.stat, path)
                moved = now if now.size_bytes == known.size_bytes else moved
            except VolumeError:
                # Whoever reads on gets the error then.
                pass
            core.blocks.rekey(file_key(known), file_key(moved))
            inode.told = moved.version if inode.told == known.version else inode.told
            inode.cached = moved.version if inode.cached == known.version else inode.cached
            if inode.set_version == known.version:
                inode.set_version = moved.version
            inode.stat = moved
            core.inodes.save(inode)

    async def _keep(self, directory: Inode) -> None:
        """A name in the directory went away: the directory stays, also in a bucket, where one that
        nobody made ends with its last file.
        """
        core = self._core
        if core.volume.capabilities.keeps_directories or directory.ino == ROOT_INO:
            return
        if core.metadata.listed(directory.ino)[0]:
            return
        path = core.inodes.path_of(directory)
        if not await core.workers.call(_keep_directory, core.volume, path):
            core.metadata.note_emptied(directory.parent_ino, directory.name)

    def _removed(self, inode: Inode) -> None:
        core = self._core
        core.metadata.note_absent(inode.parent_ino, inode.name)
        if inode.stat is not None and not (inode.is_directory or core.handles.is_open(inode.ino)):
            core.blocks.drop(file_key(inode.stat))
        core.inodes.detach(inode, Link.UNLINKED)

    def _claimed_removal(self, operation: str, directory: Inode, name: str) -> Inode | None:
        """The name is gone. If a predecessor removed it, finish its work here and go on as if done.

        Raises OSError ENOENT where nobody did. Always returns None: nothing is left to remove.
        """
        core = self._core
        if core.intents.claim(operation, directory.ino, name) is None:
            raise OSError(errno.ENOENT, "no such file or directory")
        left = core.inodes.find_child(directory.ino, name)
        if left is not None:
            self._removed(left)
        return None

    async def _ends(
        self, old_parent: Inode, old_name: str, new_parent: Inode, new_name: str
    ) -> tuple[Inode | None, Inode | None, bool]:
        """Source, target, and whether a predecessor had begun this rename.

        No source means that it had ended it, too. Raises OSError ENOENT.
        """
        core = self._core
        age = core.settings.entry_timeout_seconds
        source, _ = await core.resolve(old_parent, old_name, age)
        target, _ = await core.resolve(new_parent, new_name, age)
        argument = core.intents.claim("rename", old_parent.ino, old_name)
        is_repeated = argument == f"{new_parent.ino}/{new_name}"
        if source is not None:
            return source, target, is_repeated
        if not is_repeated:
            raise OSError(errno.ENOENT, "no such file or directory")
        left = core.inodes.find_child(old_parent.ino, old_name)
        if left is not None:
            if target is not None and target is not left:
                core.inodes.detach(target, Link.UNLINKED)
                async with target.lock:
                    await self._content.let_go(target)
            core.metadata.note_absent(old_parent.ino, old_name)
            core.inodes.move(left, new_parent.ino, new_name)
            core.metadata.note_unknown(new_parent.ino, new_name)
            left.stat = _moved(left.stat, None if target is None else target.stat)
            core.inodes.save(left)
        return None, None, True

    @contextmanager
    def _intending(
        self,
        operation: str,
        directory: Inode,
        name: str,
        argument: str = "",
        leaving: Inode | None = None,
    ) -> Iterator[None]:
        """Written down while it happens and afterwards; not if it was refused."""
        row_id = self._core.intents.note(operation, directory.ino, name, argument)
        try:
            yield
        except (VolumeError, OSError):
            self._core.intents.retract(row_id)
            if leaving is not None:
                self._core.leaving.discard(leaving.ino)
            raise
        self._core.intents.ended(row_id)


@asynccontextmanager
async def _locked(*inodes: Inode | None) -> AsyncIterator[None]:
    """Their locks, each once, the lower number first."""
    unique = {inode.ino: inode for inode in inodes if inode is not None}
    async with AsyncExitStack() as stack:
        for ino in sorted(unique):
            await stack.enter_async_context(unique[ino].lock)
        yield


def _check_kinds(source: Inode, target: Inode | None) -> None:
    if target is None:
        return
    if source.is_directory and not target.is_directory:
        raise OSError(errno.ENOTDIR, "the target is not a directory")
    if target.is_directory and not source.is_directory:
        raise OSError(errno.EISDIR, "the target is a directory")


def _moved(before: FileStat | None, now: FileStat | None) -> FileStat | None:
    """What a file is that a predecessor renamed, if what the store has at the new name is that."""
    if before is None or now is None or now.is_directory or now.version != before.version:
        return None
    return now


def _joined(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def _keep_directory(volume: Volume, path: str) -> bool:
    """False where a file of the same name stands in the way."""
    try:
        return volume.stat(path).is_directory
    except NotFound:
        volume.make_directory(path)
        return True
