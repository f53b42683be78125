"""Reading a directory: what the store lists, what is only here, and in which order. Called by
`filesystem`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

import trio

from trainmount_files.volume import FileStat
from trainmount_fuse.attributes import DirEntry
from trainmount_fuse.core import Core
from trainmount_fuse.handles import Handle
from trainmount_fuse.inodes import Inode

__all__ = ["Listing"]

_ENTRIES_AT_ONCE: Final = 1000
"""Taken in before other tasks get their turn: a long listing must not keep reads waiting."""

_Listed = list[tuple[int, str, FileStat | None, float]]


class Listing:
    """The directories of one mount as programs read them."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def entries(self, handle: Handle, start_id: int) -> Iterator[DirEntry]:
        """The entries behind `start_id`; from 0 the directory is seen anew."""
        if start_id == 0 or handle.listing is None:
            handle.listing = await self._list(self._core.directory(handle.ino))
        return self._shown(handle.ino, handle.listing, start_id)

    async def _list(self, directory: Inode) -> _Listed:
        core = self._core
        listing = await core.metadata.list(directory)
        names = [(name, stat.is_directory) for name, stat in listing.entries.items()]
        core.inodes.ensure_children(directory.ino, names)
        found: _Listed = []
        changed: list[str] = []
        for count, (name, stat) in enumerate(list(listing.entries.items()), 1):
            if core.metadata.was_changed_since(directory.ino, name, listing.asked_at):
                changed.append(name)
                continue
            inode = core.adopt(directory, name, stat, listing.asked_at)
            found.append((inode.ino, name, stat, listing.asked_at))
            if count % _ENTRIES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        for name in changed:
            # Made, replaced or removed here while the store was listing.
            current, asked_at = await core.resolve(
                directory, name, core.settings.directory_timeout_seconds
            )
            if current is not None:
                found.append((current.ino, name, current.stat, asked_at))
        listed = {ino for ino, _name, _stat, _at in found}
        local = [one for one in core.staged_children(directory) if one.ino not in listed]
        found.extend((one.ino, one.name, None, 0.0) for one in local)
        found.sort()
        if core.inodes.is_crowded():
            for inode in core.inodes.in_memory():
                if not inode.lookup_count:
                    core.drop_unused(inode)
        return found

    def _shown(self, directory_ino: int, listing: _Listed, start_id: int) -> Iterator[DirEntry]:
        core = self._core
        start = bisect_right(listing, start_id, key=lambda entry: entry[0])
        for ino, name, stat, asked_at in listing[start:]:
            try:
                inode = core.inodes.get(ino)
                if stat is not None and inode.stat is None and core.staged(inode) is None:
                    inode.stat, inode.checked_at = stat, asked_at
                attributes = core.attributes(inode)
            except OSError:
                # Removed since the listing, and forgotten.
                continue
            if (inode.parent_ino, inode.name) == (directory_ino, name):
                # The kernel remembers this one, and may open it without a lookup.
                inode.is_fresh_for_open = False
                yield DirEntry(name.encode(), attributes, ino)
