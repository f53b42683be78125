"""Reading a directory: what the store lists, what is only here, and at which position. Called by
`filesystem`.

The kernel is given one page of the store after the other, as they come. A position is the number of
entries up to there; each page is written down (`spool`) before it is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainmount_files.errors import InvalidRequest
from trainmount_fuse.attributes import ROOT_INO, DirEntry
from trainmount_fuse.core import Core
from trainmount_fuse.names.handles import Handle
from trainmount_fuse.names.inodes import Inode
from trainmount_fuse.names.readings import Reading, ReadPage
from trainmount_fuse.names.spool import Cursor, ShownEntry, ShownPage, Spool

__all__ = ["Listing"]

_DOT: Final = 1
_DOT_DOT: Final = 2
"""Positions of `.` and `..`; the entries come behind them."""


class Listing:
    """The directories of one mount as programs read them."""

    def __init__(self, core: Core, spool: Spool) -> None:
        self._core = core
        self._spool = spool
        spool.keep_only(core.handles.open_fhs())

    async def entries(self, handle: Handle, start_id: int) -> Iterator[DirEntry]:
        """The entries behind `start_id`, up to the end of a page of the store, and none only at the
        end; from 0 the directory is seen anew. Raises VolumeError, OSError.
        """
        directory = self._core.directory(handle.ino)
        if start_id == 0:
            self._spool.delete(handle.fh)
            handle.cursor = Cursor()
        elif handle.cursor is None:
            handle.cursor = self._spool.restore(handle.fh)
        cursor = handle.cursor
        position = max(start_id, _DOT_DOT) + 1
        async with cursor.lock:
            # Before anything is shown: a directory that cannot be listed has no `.` either.
            page = await self._page_at(handle.fh, cursor, directory, position)
            while page is not None and not self._has_any(directory, page, position):
                position = page.end
                page = await self._page_at(handle.fh, cursor, directory, position)
        return self._shown(directory, page, start_id)

    def close(self, handle: Handle) -> None:
        """The handle is released."""
        self._spool.delete(handle.fh)

    async def _page_at(
        self, fh: int, cursor: Cursor, directory: Inode, position: int
    ) -> ShownPage | None:
        """The page with the entry at this position; None behind the last one."""
        while True:
            newest = cursor.newest
            for page in (cursor.page, newest):
                if page is not None and page.first <= position < page.end:
                    cursor.page = page
                    return page
            if newest is not None and position < newest.end:
                return self._spool.page_at(fh, cursor, position)
            if newest is not None and newest.is_last:
                return None
            self._spool.append(fh, cursor, await self._next(fh, cursor, directory))
            self._core.inodes.trim(self._core.is_used)

    async def _next(self, fh: int, cursor: Cursor, directory: Inode) -> ShownPage:
        """The page behind the newest one; with the store's last, what is only here."""
        newest = cursor.newest
        reading, read = await self._read(fh, cursor, directory)
        cursor.num_read += 1
        entries = await self._taken_in(directory, read, cursor.hidden)
        began_at = reading.asked_at if newest is None else newest.began_at
        if read.next_token is None:
            entries += await self._only_here(fh, directory, entries, began_at)
        return ShownPage(
            first=_DOT_DOT + 1 if newest is None else newest.end,
            entries=tuple(entries),
            asked_at=read.asked_at,
            began_at=began_at,
            next_token=read.next_token,
        )

    async def _read(self, fh: int, cursor: Cursor, directory: Inode) -> tuple[Reading, ReadPage]:
        metadata, newest = self._core.metadata, cursor.newest
        if cursor.reading is None:
            if newest is None or newest.next_token is None:
                cursor.reading = metadata.reading(directory)
            else:
                cursor.reading = metadata.reading_from(
                    directory, newest.next_token, newest.began_at
                )
        try:
            return cursor.reading, await metadata.page(cursor.reading, cursor.num_read)
        except InvalidRequest:
            if newest is None or cursor.num_read:
                raise
        # The store does not know any more how a predecessor's reading went on.
        cursor.hidden = frozenset(self._spool.names(fh))
        cursor.reading = metadata.reading(directory)
        return cursor.reading, await metadata.page(cursor.reading, 0)

    async def _taken_in(
        self, directory: Inode, read: ReadPage, hidden: frozenset[str]
    ) -> list[ShownEntry]:
        core = self._core
        stats = [stat for stat in read.entries if stat.name not in hidden]
        changed = set(core.metadata.changed_since(directory.ino, read.asked_at))
        core.inodes.ensure_children(
            directory.ino,
            # A file of today must not make room for what was a directory when the store was asked.
            [(stat.name, stat.is_directory) for stat in stats if stat.name not in changed],
        )
        found: list[ShownEntry] = []
        for stat in stats:
            name = stat.name
            if core.metadata.was_changed_since(directory.ino, name, read.asked_at):
                found += await self._resolved(directory, name)
            else:
                inode = core.adopt(directory, name, stat, read.asked_at)
                found.append(ShownEntry(name, inode.ino, stat))
        return found

    async def _only_here(
        self, fh: int, directory: Inode, shown: list[ShownEntry], began_at: float
    ) -> list[ShownEntry]:
        """Names that came here after the store was asked, or whose bytes it does not have yet."""
        core = self._core
        names = set(core.metadata.changed_since(directory.ino, began_at))
        names.update(inode.name for inode in core.staged_children(directory))
        names.difference_update(one.name for one in shown)
        if names:
            names.difference_update(self._spool.names(fh))
        found: list[ShownEntry] = []
        for name in sorted(names):
            found += await self._resolved(directory, name)
        return found

    async def _resolved(self, directory: Inode, name: str) -> list[ShownEntry]:
        core = self._core
        inode, _asked_at = await core.resolve(
            directory, name, core.settings.directory_timeout_seconds
        )
        if inode is None:
            return []
        return [ShownEntry(name, inode.ino, None if core.staged(inode) else inode.stat)]

    def _shown(self, directory: Inode, page: ShownPage | None, start_id: int) -> Iterator[DirEntry]:
        core = self._core
        if start_id < _DOT:
            yield DirEntry(b".", core.attributes(directory), _DOT)
        if start_id < _DOT_DOT:
            parent_ino = directory.parent_ino or ROOT_INO
            yield DirEntry(b"..", core.attributes(core.inodes.get(parent_ino)), _DOT_DOT)
        if page is None:
            return
        begin = max(0, start_id + 1 - page.first)
        for position, entry in enumerate(page.entries[begin:], page.first + begin):
            inode = self._find(directory, entry)
            if inode is None:
                continue
            is_same = inode.ino == entry.ino and core.staged(inode) is None
            if is_same and entry.stat is not None and inode.stat is None:
                inode.stat, inode.checked_at = entry.stat, page.asked_at
            told = inode.told
            try:
                attributes = core.attributes(inode)
            except OSError:
                # Given up since: nothing is known of it.
                continue
            if inode.is_looked_up:
                # Programs open it, and one without a lookup would take what another has found out.
                attributes = core.looked_up_for_each_open(attributes)
            try:
                yield DirEntry(entry.name.encode(), attributes, position)
            except GeneratorExit:
                # There was no room for this one.
                inode.told = told
                raise
            inode.lookup_count += 1

    def _has_any(self, directory: Inode, page: ShownPage, position: int) -> bool:
        entries = page.entries[max(0, position - page.first) :]
        return any(self._find(directory, entry) is not None for entry in entries)

    def _find(self, directory: Inode, entry: ShownEntry) -> Inode | None:
        """What has the name now, as another version of a file is another inode; None where it is
        gone since.
        """
        return self._core.inodes.find_child(directory.ino, entry.name)
