"""Inode numbers: which number is which name, kept in `state.db`, so that a successor means the
same by them.

A row is (parent's number, name), never a path: renaming a directory moves one row. Numbers are
never used twice. Memory holds the inodes the kernel knows; one that is not in memory is read from
the database, so lookup counts only decide what may leave memory, and a FORGET of counts that a
predecessor gave is harmless. Used by the event loop's thread only; no method awaits.
"""

from __future__ import annotations

import errno
import math
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import trio

from trainmount_files.volume import FileStat
from trainmount_fuse.attributes import ROOT_INO

__all__ = ["Inode", "InodeTable", "Link"]

_MAX_IN_MEMORY: Final = 500_000


class Link(IntEnum):
    """How an inode hangs in the tree."""

    LINKED = 0
    UNLINKED = 1
    """Its name was removed here; open handles go on with what they have."""

    REPLACED = 2
    """Its name holds another version now, put there by somebody else; open handles are stale."""


@dataclass(slots=True, eq=False)
class Inode:
    """One number the kernel knows. Mutable; its owner is the event loop's thread."""

    ino: int
    parent_ino: int
    """0 unless `link` is LINKED."""

    name: str
    is_directory: bool
    link: Link = Link.LINKED

    stat: FileStat | None = None
    """What the store said last. While the inode is open without local changes, the version it is
    open at.
    """

    checked_at: float = -math.inf
    """Monotonic time at which `stat` was asked for."""

    told: str | None = None
    """Version whose size the kernel was given last; None where that is unknown (after a takeover).
    """

    cached: str | None = None
    """Version of the pages that the kernel may hold."""

    looked_up_at: float = -math.inf
    """Monotonic time at which the newest `lookup` of the name arrived."""

    is_fresh_for_open: bool = False
    """The newest `lookup` of the name asked the store itself; the `open` behind it need not."""

    reopen_until: float = -math.inf
    """Until then one `open` takes `stat` as it is: it is the kernel's second try after ESTALE."""

    mode: int | None = None
    """Permission bits set by chmod or create."""

    atime_ns: int | None = None
    set_mtime_ns: int | None = None
    """Time set by utimens, true while the content is `set_version` (empty: the local change)."""

    set_version: str = ""
    lookup_count: int = 0

    lock: trio.Lock = field(default_factory=trio.Lock)
    """Of a file: held while its content or name changes. Of a directory: while names in it change.
    """


class InodeTable:
    """Numbers, names and what is known of them."""

    SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS inodes (
        ino INTEGER PRIMARY KEY AUTOINCREMENT,
        parent_ino INTEGER,            -- NULL together with name: no longer in the tree
        name TEXT,
        is_directory INTEGER NOT NULL,
        link INTEGER NOT NULL DEFAULT 0,
        path TEXT,                     -- path to version: what the store said when the file was
        size INTEGER,                  -- opened or uploaded here; NULL where it never was
        mtime_ns INTEGER,
        version TEXT,
        mode INTEGER,
        atime_ns INTEGER,
        set_mtime_ns INTEGER,
        set_version TEXT NOT NULL DEFAULT '',
        UNIQUE (parent_ino, name)
    );
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._by_ino: dict[int, Inode] = {}
        self._by_name: dict[tuple[int, str], Inode] = {}
        database.execute(
            "INSERT OR IGNORE INTO inodes (ino, is_directory) VALUES (?, 1)", (ROOT_INO,)
        )
        self.root = Inode(ROOT_INO, 0, "", is_directory=True)
        self._by_ino[ROOT_INO] = self.root

    def get(self, ino: int) -> Inode:
        """Raises OSError ESTALE for a number that was never given out or is gone."""
        inode = self._by_ino.get(ino)
        if inode is None:
            inode = self._load("ino = ?", (ino,))
        if inode is None:
            raise OSError(errno.ESTALE, "unknown inode")
        return inode

    def find_child(self, parent_ino: int, name: str) -> Inode | None:
        """The inode that a name has, whether or not the store still has the name."""
        inode = self._by_name.get((parent_ino, name))
        if inode is None:
            inode = self._load("parent_ino = ? AND name = ?", (parent_ino, name))
        return inode

    def ensure_child(self, parent_ino: int, name: str, *, is_directory: bool) -> Inode:
        """The inode of a name, made where there is none or where it was of the other kind.

        The kernel takes a number whose type changes for a broken one, so the other kind is another
        number.
        """
        inode = self.find_child(parent_ino, name)
        if inode is not None and inode.is_directory != is_directory:
            self.detach(inode, Link.REPLACED)
            inode = None
        if inode is None:
            cursor = self._database.execute(
                "INSERT INTO inodes (parent_ino, name, is_directory) VALUES (?, ?, ?)",
                (parent_ino, name, int(is_directory)),
            )
            inode = Inode(cursor.lastrowid or 0, parent_ino, name, is_directory)
            self._remember(inode)
        return inode

    def ensure_children(self, parent_ino: int, children: Iterable[tuple[str, bool]]) -> None:
        """`ensure_child` for a whole listing in one transaction."""
        self._database.execute("BEGIN")
        try:
            for name, is_directory in children:
                self.ensure_child(parent_ino, name, is_directory=is_directory)
        finally:
            self._database.execute("COMMIT")

    def path_of(self, inode: Inode) -> str:
        """Path below the volume's root. Raises OSError ESTALE where it hangs in no tree
        any more.
        """
        names: list[str] = []
        while inode.ino != ROOT_INO:
            if inode.link is not Link.LINKED:
                raise OSError(errno.ESTALE, "the name of this inode is gone")
            names.append(inode.name)
            inode = self.get(inode.parent_ino)
        return "/".join(reversed(names))

    def is_below(self, inode: Inode, ancestor_ino: int) -> bool:
        """Whether `ancestor_ino` is the inode itself or a directory above it."""
        while inode.ino != ancestor_ino:
            if inode.ino == ROOT_INO or inode.link is not Link.LINKED:
                return False
            inode = self.get(inode.parent_ino)
        return True

    def move(self, inode: Inode, parent_ino: int, name: str) -> None:
        """Give the inode another name; whoever had that name must be detached before."""
        self._by_name.pop((inode.parent_ino, inode.name), None)
        inode.parent_ino, inode.name = parent_ino, name
        self._database.execute(
            "UPDATE inodes SET parent_ino = ?, name = ? WHERE ino = ?",
            (parent_ino, name, inode.ino),
        )
        self._remember(inode)

    def detach(self, inode: Inode, link: Link) -> None:
        """Take the inode out of the tree; its number stays valid until the kernel forgets it."""
        self._by_name.pop((inode.parent_ino, inode.name), None)
        inode.link, inode.parent_ino = link, 0
        self._database.execute(
            "UPDATE inodes SET parent_ino = NULL, name = NULL, link = ? WHERE ino = ?",
            (int(link), inode.ino),
        )
        if inode.stat is not None:
            self.save(inode)

    def save(self, inode: Inode) -> None:
        """Keep what is known of the inode for a successor."""
        stat = inode.stat
        self._database.execute(
            "UPDATE inodes SET path = ?, size = ?, mtime_ns = ?, version = ?, mode = ?,"
            " atime_ns = ?, set_mtime_ns = ?, set_version = ? WHERE ino = ?",
            (
                stat.path if stat else None,
                stat.size_bytes if stat else None,
                stat.mtime_ns if stat else None,
                stat.version if stat else None,
                inode.mode,
                inode.atime_ns,
                inode.set_mtime_ns,
                inode.set_version,
                inode.ino,
            ),
        )

    def forget(self, inode: Inode, count: int) -> bool:
        """The kernel dropped `count` lookups; tells whether it holds none that we know of."""
        inode.lookup_count = max(0, inode.lookup_count - count)
        return inode.lookup_count == 0

    def drop(self, inode: Inode) -> None:
        """Let the inode leave memory; where it hangs in no tree, for ever."""
        if inode.ino == ROOT_INO:
            return
        self._by_ino.pop(inode.ino, None)
        if self._by_name.get((inode.parent_ino, inode.name)) is inode:
            del self._by_name[inode.parent_ino, inode.name]
        if inode.link is not Link.LINKED:
            self._database.execute("DELETE FROM inodes WHERE ino = ?", (inode.ino,))

    def in_memory(self) -> list[Inode]:
        """The inodes held in memory, at this moment."""
        return list(self._by_ino.values())

    def known(self, ino: int) -> Inode | None:
        """The inode if it is in memory; never asks the database."""
        return self._by_ino.get(ino)

    def is_crowded(self) -> bool:
        """Memory holds more inodes than it should; the caller drops some that nobody uses."""
        return len(self._by_ino) > _MAX_IN_MEMORY

    def close(self) -> None:
        """Close the database that handles and intents share. No other call may follow."""
        self._database.close()

    def _remember(self, inode: Inode) -> None:
        self._by_ino[inode.ino] = inode
        if inode.link is Link.LINKED:
            self._by_name[inode.parent_ino, inode.name] = inode

    def _load(self, condition: str, values: tuple[int | str, ...]) -> Inode | None:
        row = self._database.execute(
            "SELECT ino, parent_ino, name, is_directory, link, path, size, mtime_ns, version, mode,"  # noqa: S608
            f" atime_ns, set_mtime_ns, set_version FROM inodes WHERE {condition}",
            values,
        ).fetchone()
        if row is None:
            return None
        stat = None
        if row[5] is not None:
            stat = FileStat(row[5], bool(row[3]), row[6], row[7], row[8])
        inode = Inode(
            ino=row[0],
            parent_ino=row[1] or 0,
            name=row[2] or "",
            is_directory=bool(row[3]),
            link=Link(row[4]),
            stat=stat,
            mode=row[9],
            atime_ns=row[10],
            set_mtime_ns=row[11],
            set_version=row[12],
        )
        self._remember(inode)
        return inode
