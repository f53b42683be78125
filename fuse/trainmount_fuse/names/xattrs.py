"""The extended attributes `user.trainmount.*`: what the mount knows of one file. Called by
`filesystem`.

path           in the volume
version        of the file in the store; opaque
state          clean: the store has the last bytes. dirty: it is to get them. failed: the last close
               reported an error, and they are kept. orphan: the name is gone, the file still open
error          why the last upload failed
cached_bytes   of this version in the block cache

A directory has `path` only. An attribute without a value is not there, so that `getfattr -d` shows
what there is. A volume keeps no attributes, so none can be set.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Final, NoReturn

from trainmount_files.volume import FileStat
from trainmount_fuse.core import Core, file_key
from trainmount_fuse.names.inodes import Inode, Link
from trainmount_fuse.writes.journal import StagedState

__all__ = ["ExtendedAttributes"]

_PREFIX: Final = b"user.trainmount."


class ExtendedAttributes:
    """The attributes of all files of one mount."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def get(self, ino: int, name: bytes) -> bytes:
        """The value. Raises OSError ENODATA where there is none."""
        core = self._core
        inode = await self._known(ino)
        if name == _PREFIX + b"cached_bytes" and _has_blocks(inode):
            assert inode.stat is not None
            return b"%d" % await core.workers.call(_cached_bytes, core, inode.stat)
        for field, value in self._plain(inode):
            if name == _PREFIX + field:
                return value
        raise OSError(errno.ENODATA, "no such attribute")

    async def names(self, ino: int) -> list[bytes]:
        """The attributes that have a value."""
        inode = await self._known(ino)
        cached = [b"cached_bytes"] if _has_blocks(inode) else []
        return sorted(_PREFIX + field for field in [*cached, *dict(self._plain(inode))])

    def refuse_change(self, ino: int) -> NoReturn:
        """Raises OSError EOPNOTSUPP, over which mv(1) and cp(1) are silent."""
        self._core.inodes.get(ino)
        raise OSError(errno.EOPNOTSUPP, "a volume keeps no extended attributes")

    async def _known(self, ino: int) -> Inode:
        """The inode, with what the store says of it where nothing was known."""
        core = self._core
        inode = core.inodes.get(ino)
        if inode.stat is None and core.staged(inode) is None and inode.link is Link.LINKED:
            await core.refresh(inode, core.settings.attr_timeout_seconds)
        return inode

    def _plain(self, inode: Inode) -> Iterator[tuple[bytes, bytes]]:
        core = self._core
        path = core.inodes.path_of(inode) if inode.link is Link.LINKED else None
        if path is not None:
            # The root has an empty one, and an attribute without bytes looks like none.
            yield b"path", path.encode(errors="surrogateescape") or b"/"
        if inode.is_directory:
            return
        if inode.stat is not None and inode.stat.version:
            yield b"version", inode.stat.version.encode()
        staged = core.staged(inode)
        if staged is None:
            failed = [one for one in core.staging.failed() if one.volume_path == path]
            state = StagedState.FAILED if failed else StagedState.CLEAN
            reason = failed[-1].reason if failed else ""
        else:
            state = staged.state
            reason = "" if staged.error is None else str(staged.error)
        yield b"state", state.value.encode()
        if reason:
            yield b"error", reason.encode(errors="surrogateescape")


def _has_blocks(inode: Inode) -> bool:
    return not inode.is_directory and inode.stat is not None


def _cached_bytes(core: Core, stat: FileStat) -> int:
    file = core.blocks.open(file_key(stat))
    try:
        return core.blocks.cached_bytes_of(file)
    finally:
        core.blocks.release(file)
