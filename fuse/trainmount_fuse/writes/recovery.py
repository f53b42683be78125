"""What a mount does with local bytes that an earlier daemon left. Called by `filesystem` at start.

Files that still have open handles wait for their programs. The others are uploaded, unless the
store has something else there now than what they follow on: nobody may overwrite what came later
with what came before, so they go beside it, under a name that tells when. What cannot be uploaded
stays here as failed.
"""

from __future__ import annotations

import errno
import logging

from trainmount_files.errors import VolumeError
from trainmount_fuse.core import Core
from trainmount_fuse.names.inodes import Inode, Link
from trainmount_fuse.writes.content import Content
from trainmount_fuse.writes.journal import StagedState
from trainmount_fuse.writes.staged_file import StagedFile
from trainmount_fuse.writes.staging import LATER_VERSION

__all__ = ["Recovery"]

log = logging.getLogger(__name__)


class Recovery:
    """The leftovers of one mount."""

    def __init__(self, core: Core, content: Content) -> None:
        self._core = core
        self._content = content

    def sort(self) -> list[Inode]:
        """Before the first request: give leftovers their inodes, drop what nobody needs.

        Returns the inodes whose bytes `upload` is to send.
        """
        core = self._core
        pending: list[Inode] = []
        leaving = core.intents.leaving()
        for ino in core.staging.inos():
            staged = core.staging.find(ino)
            if staged is None:
                continue
            is_open = core.handles.is_open(ino)
            if staged.state is StagedState.DIRTY and self._is_unlinked(ino):
                # The predecessor died between the two: what is at the path now is another file.
                core.staging.orphan(staged)
            if staged.state is StagedState.ORPHAN or staged.state is StagedState.CLEAN:
                if not is_open:
                    core.staging.drop_leftover(staged)
                elif core.inodes.name_of(ino) in leaving:
                    core.leaving.add(ino)
                continue
            inode = self._inode_of(staged)
            if not is_open:
                staged.is_left = True
                pending.append(inode)
        if not core.handles.is_successor:
            pending.extend(self.failed_again())
        return pending

    async def upload(self, pending: list[Inode]) -> None:
        """Send them, one after the other. An error leaves a file as failed, and the
        others go on. Before them, what a dead daemon had begun is aborted.
        """
        try:
            await self._core.workers.call(self._core.staging.abandon_left)
        except Exception:
            log.exception("What an earlier daemon had begun to upload is not aborted yet")
        for inode in pending:
            await self.settle(inode)

    async def settle(self, inode: Inode) -> None:
        """Send what was left of the inode, if it is still here and nobody has it open."""
        try:
            await self._upload_one(inode)
        except Exception:
            log.exception("A file left by an earlier daemon is not uploaded yet")

    async def _upload_one(self, inode: Inode) -> None:
        core = self._core
        async with core.tree.shared(), inode.lock:
            staged = core.staged(inode)
            if staged is None or staged.state is not StagedState.DIRTY:
                return
            if inode.link is not Link.LINKED or core.handles.is_open(inode.ino):
                return
            fields = {"path": staged.volume_path}
            try:
                stat = await core.workers.call(
                    core.staging.upload_left, staged, core.volume, staged.volume_path
                )
            except (VolumeError, OSError) as error:
                staged.error = error
            else:
                if stat is None:
                    await self._put_beside(inode, staged)
                    return
                await self._content.drop_namesakes(stat)
                self._content.note_uploaded(inode, stat)
                # The kernel may have pages of what the store had until now.
                inode.told = inode.cached = None
                log.info("A file left by an earlier daemon was uploaded", extra=fields)
            await self._content.retire(inode)

    async def _put_beside(self, inode: Inode, staged: StagedFile) -> None:
        core = self._core
        if core.handles.is_open(inode.ino):
            # Whoever opened it meanwhile reads on; the next mount tries again.
            staged.error = OSError(errno.ESTALE, LATER_VERSION)
            return
        core.staging.withdraw(staged)
        inode.stat = inode.told = inode.cached = None
        core.doubt(inode)
        fields = {"path": staged.volume_path}
        try:
            kept_path = await core.workers.call(core.staging.upload_beside, staged, core.volume)
        except (VolumeError, OSError) as error:
            await core.workers.call(
                core.staging.fail, staged, f"{LATER_VERSION}; beside it: {error}"
            )
            return
        core.metadata.note_unknown(inode.parent_ino, kept_path.rpartition("/")[2])
        log.warning(
            "Bytes left here do not follow on what the store has; they were put beside it",
            extra=fields | {"kept_path": kept_path},
        )

    def failed_again(self) -> list[Inode]:
        """Files whose upload failed before are local bytes once more; `upload` is to send them."""
        core = self._core
        found: list[Inode] = []
        for staged in core.staging.failed():
            inode = self._inode_at(staged.volume_path)
            # Who reads the store's file goes on to; two contents in one inode would mix.
            if core.staging.find(inode.ino) is None and not core.handles.is_open(inode.ino):
                core.staging.adopt_failed(staged, inode.ino)
                found.append(inode)
        return found

    def _is_unlinked(self, ino: int) -> bool:
        try:
            return self._core.inodes.get(ino).link is Link.UNLINKED
        except OSError:
            return False

    def _inode_of(self, staged: StagedFile) -> Inode:
        core = self._core
        try:
            inode = core.inodes.get(staged.ino)
            # Under another name, a predecessor died in a rename, and the kernel repeats that.
            is_same = core.inodes.path_of(inode) == staged.volume_path
            if not inode.is_directory and (is_same or core.handles.is_open(inode.ino)):
                return inode
        except OSError:
            log.info("Inode numbers were lost", extra={"path": staged.volume_path})
        inode = self._inode_at(staged.volume_path)
        core.staging.assign(staged, inode.ino)
        return inode

    def _inode_at(self, path: str) -> Inode:
        core = self._core
        *directories, name = path.split("/")
        parent = core.inodes.root
        for directory in directories:
            parent = core.inodes.ensure_child(parent.ino, directory, is_directory=True)
        return core.inodes.ensure_child(parent.ino, name, is_directory=False)
