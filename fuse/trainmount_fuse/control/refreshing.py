"""`refresh`: ask the store again for what is known of names, sizes and listings, here and in the
kernel. Called by `commands` on the event loop's thread.

Cached bytes stay, since they are known by their version. Open files go on with theirs.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from trainmount_fuse.control.protocol import ControlError
from trainmount_fuse.core import Core
from trainmount_fuse.names.inodes import Inode, Link

__all__ = ["StaleNames", "forget_metadata"]

_INODES_AT_ONCE: Final = 10_000
"""Gone through before other tasks get their turn."""


@dataclass(frozen=True, slots=True)
class StaleNames:
    """What the kernel may still believe."""

    is_everything: bool

    names: list[tuple[int, bytes, int]]
    """Number of the directory, name, and number of the inode there; 0 where none is known."""


async def forget_metadata(core: Core, paths: Sequence[str]) -> StaleNames:
    """Forget what the store said of these paths and all below them; of everything without any.

    Raises:
        ControlError: a path is not one in the volume.
    """
    chosen = None if not paths or "" in paths else [_names(path) for path in paths]
    roots: list[Inode] = []
    stale: list[tuple[int, bytes, int]] = []
    for names in chosen or ():
        found = _find(core, names)
        if found is None:
            continue
        parent_ino, name, inode = found
        core.metadata.note_unknown(parent_ino, name)
        stale.append((parent_ino, name.encode(), 0 if inode is None else inode.ino))
        if inode is not None:
            roots.append(inode)
    if chosen is None:
        core.metadata.clear()
    async for inode in _below(core, None if chosen is None else roots):
        inode.checked_at = -math.inf
        if inode.is_directory and chosen is not None:
            core.metadata.forget(inode.ino)
        if inode.link is Link.LINKED and inode.parent_ino:
            stale.append((inode.parent_ino, inode.name.encode(), inode.ino))
    return StaleNames(chosen is None, stale)


async def _below(core: Core, roots: list[Inode] | None) -> AsyncIterator[Inode]:
    """Every inode in memory that is one of these or below one; every one at all for None."""
    inos = [] if roots is None else [inode.ino for inode in roots]
    for count, inode in enumerate(core.inodes.in_memory(), 1):
        if roots is None or any(core.inodes.is_below(inode, ino) for ino in inos):
            yield inode
        if count % _INODES_AT_ONCE == 0:
            await trio.lowlevel.checkpoint()


def _find(core: Core, names: Sequence[str]) -> tuple[int, str, Inode | None] | None:
    """The directory, the name and the inode of a path, as far as they are known here; None where
    nothing is known of the directory. The store is not asked."""
    directory = core.inodes.root
    for name in names[:-1]:
        inner = core.inodes.find_child(directory.ino, name)
        if inner is None:
            return None
        directory = inner
    return directory.ino, names[-1], core.inodes.find_child(directory.ino, names[-1])


def _names(path: str) -> list[str]:
    names = [name for name in path.split("/") if name not in ("", ".")]
    if not names or ".." in names:
        raise ControlError(f"{path}: is not a path in the volume")
    return names
