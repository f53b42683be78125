"""Inode numbers: which number is which name, kept in `state.db`, so that a successor means the
same by them.

A row is (parent's number, name), never a path: renaming a directory moves one row. A number
is derived from that, so that the same name gets the same number again although its row was deleted
when the kernel forgot it. Rows that say more than that stay: of renamed files, and of files whose
mode or times were set. Memory holds some of the inodes the kernel knows; one that is not in memory
is read from the database, so lookup counts only decide what may leave, and a FORGET of counts that
a predecessor gave is harmless. Used by the event loop's thread only; no method awaits.
"""

from __future__ import annotations

import errno
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import trio

from trainmount_files.volume import FileStat
from trainmount_fuse.attributes import ROOT_INO
from trainmount_fuse.names.saved_rows import Row, SavedRows

__all__ = ["Inode", "InodeTable", "Link"]

_MAX_IN_MEMORY: Final = 20_000
"""At some 600 bytes each; one that is needed again takes some 10 us from the database."""

_NUMBER_BITS: Final = 52
"""Of an inode number: what a floating-point number holds exactly, as JSON readers do."""

_OPEN_FOLLOWS_SECONDS: Final = 1.0
"""The kernel opens what it has looked up at once; longer means that the lookup was for another
call, and what it asked the store is too old.
"""

_IS_PLAIN: Final = (
    "is_derived = 1 AND link = 0 AND mode IS NULL AND atime_ns IS NULL AND set_mtime_ns IS NULL"
)


class Link(IntEnum):
    """How an inode hangs in the tree."""

    LINKED = 0
    UNLINKED = 1
    """Its name was removed here; open handles go on with what they have."""

    REPLACED = 2
    """Its name holds another version now, put there by somebody else; open handles are stale."""


@dataclass(slots=True, eq=False, weakref_slot=True)
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
    """Version whose size the kernel was given last; None where that is unknown: after a takeover,
    of a file that was looked up and never opened or written here.
    """

    cached: str | None = None
    """Version of the pages that the kernel may hold."""

    was_young: bool = False
    """What is cached of its version may be another content (`Core.is_young`)."""

    looked_up_at: float = -math.inf
    """Monotonic time at which the newest `lookup` of the name arrived, perhaps of the version
    before.
    """

    num_unopened: int = 0
    """Lookups that no `open` has followed yet, each of which arrived before the store was asked for
    `stat`: so many opens need not ask.
    """

    mode: int | None = None
    """Permission bits set by chmod or create."""

    atime_ns: int | None = None
    set_mtime_ns: int | None = None
    """Time set by utimens, true while the content is `set_version` (empty: the local change)."""

    set_version: str = ""
    lookup_count: int = 0
    saved: tuple[object, ...] | None = None
    """What its row says, as far as `InodeTable.save` knows."""

    _lock: trio.Lock | None = None

    @property
    def lock(self) -> trio.Lock:
        """Of a file: held while its content or name changes. Of a directory: while names in it
        change.
        """
        if self._lock is None:
            self._lock = trio.Lock()
        return self._lock

    @property
    def is_locked(self) -> bool:
        return self._lock is not None and self._lock.locked()

    @property
    def is_looked_up(self) -> bool:
        """Whether a lookup of the name may have an `open` behind it yet."""
        return time.monotonic() - self.looked_up_at < _OPEN_FOLLOWS_SECONDS

    def note_looked_up(self, arrived_at: float) -> None:
        """A `lookup` that arrived then is about to be answered by this inode."""
        if not self.is_looked_up:
            # Those before were for other calls than open(2).
            self.num_unopened = 0
        self.looked_up_at = max(self.looked_up_at, arrived_at)
        if self.checked_at >= self.looked_up_at:
            self.num_unopened += 1
        else:
            # Who looked it up last may have come after another node's close. Nobody can tell whose
            # `open` is the next.
            self.num_unopened = 0

    def take_lookup(self) -> bool:
        """Whether the `open` that begins now follows a lookup since which the store was asked."""
        if time.monotonic() - self.checked_at >= _OPEN_FOLLOWS_SECONDS:
            self.num_unopened = 0
        if not self.num_unopened:
            return False
        self.num_unopened -= 1
        return True


class InodeTable:
    """Numbers, names and what is known of them."""

    SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS inodes (
        ino INTEGER PRIMARY KEY,
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
        is_derived INTEGER NOT NULL DEFAULT 0,  -- the number follows from parent, name and kind
        UNIQUE (parent_ino, name)
    );
    """

    def __init__(self, database: sqlite3.Connection, rows_path: Path) -> None:
        """What was saved and is not in the database yet lies in the file at `rows_path`."""
        self._database = database
        columns = {row[1] for row in database.execute("PRAGMA table_info(inodes)")}
        if "is_derived" not in columns:
            # Made by an earlier release.
            database.execute("ALTER TABLE inodes ADD COLUMN is_derived INTEGER NOT NULL DEFAULT 0")
        self._saved_rows = SavedRows(rows_path, self._write_rows)
        self._by_ino: dict[int, Inode] = {}
        self._dropped: WeakValueDictionary[int, Inode] = WeakValueDictionary()
        """Left memory while some task still has them: nobody may make a second one."""
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
            inode = self._make(parent_ino, name, is_directory=is_directory)
        return inode

    def ensure_children(self, parent_ino: int, children: Iterable[tuple[str, bool]]) -> None:
        """`ensure_child` for a whole listing in one transaction."""

        def ensure() -> None:
            for name, is_directory in children:
                self.ensure_child(parent_ino, name, is_directory=is_directory)

        self._batch(ensure)

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

    def name_of(self, ino: int) -> tuple[int, str] | None:
        """The directory and the name that the inode has; None where it has none."""
        try:
            inode = self.get(ino)
        except OSError:
            return None
        return (inode.parent_ino, inode.name) if inode.link is Link.LINKED else None

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
            "UPDATE inodes SET parent_ino = ?, name = ?, is_derived = 0 WHERE ino = ?",
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
        values = (
            stat.path if stat else None,
            stat.size_bytes if stat else None,
            stat.mtime_ns if stat else None,
            stat.version if stat else None,
            inode.mode,
            inode.atime_ns,
            inode.set_mtime_ns,
            inode.set_version,
        )
        if values == inode.saved:
            return
        self._saved_rows.add((*values, inode.ino))
        inode.saved = values

    def forget(self, lookups: Iterable[tuple[int, int]], is_used: Callable[[Inode], bool]) -> None:
        """The kernel dropped that many lookups of each number.

        What it holds no more and nobody here uses leaves memory, and a file whose row says nothing
        that its name would not get again leaves the database. Were one of them known to the kernel
        after all, it would ask for the name again and get the same number. A directory has files
        below that rely on it, so its row stays until the next mount.
        """
        gone: list[tuple[int]] = []
        for ino, num_lookups in lookups:
            inode = self.known(ino)
            if inode is not None:
                inode.lookup_count = max(0, inode.lookup_count - num_lookups)
                inode.num_unopened = min(inode.num_unopened, inode.lookup_count)
                if inode.lookup_count or is_used(inode):
                    continue
                self.drop(inode)
            gone.append((ino,))
        if gone:
            statement = f"DELETE FROM inodes WHERE ino = ? AND is_directory = 0 AND {_IS_PLAIN}"  # noqa: S608
            self._batch(lambda: self._database.executemany(statement, gone))

    def drop(self, inode: Inode) -> None:
        """Let the inode leave memory; where it hangs in no tree, for ever."""
        if inode.ino == ROOT_INO:
            return
        # The row may go, too, or be read again.
        inode.saved = None
        if inode.ino in self._saved_rows:
            self._saved_rows.settle()
        if self._by_ino.pop(inode.ino, None) is not None and inode.link is Link.LINKED:
            self._dropped[inode.ino] = inode
        if self._by_name.get((inode.parent_ino, inode.name)) is inode:
            del self._by_name[inode.parent_ino, inode.name]
        if inode.link is not Link.LINKED:
            self._database.execute("DELETE FROM inodes WHERE ino = ?", (inode.ino,))

    def delete_all_plain(self) -> None:
        """Before the first request of a new mount: the kernel knows no number yet."""
        self._database.execute(f"DELETE FROM inodes WHERE {_IS_PLAIN}")  # noqa: S608

    def trim(self, is_used: Callable[[Inode], bool]) -> None:
        """Let inodes that nobody uses leave memory, the oldest first, where they are too many."""
        if len(self._by_ino) <= _MAX_IN_MEMORY:
            return
        surplus = len(self._by_ino) - _MAX_IN_MEMORY * 3 // 4
        for inode in list(self._by_ino.values()):
            if surplus and not is_used(inode):
                self.drop(inode)
                surplus -= 1

    def in_memory(self) -> list[Inode]:
        """The inodes held in memory, at this moment."""
        return list(self._by_ino.values())

    def known(self, ino: int) -> Inode | None:
        """The inode if it is in memory; never asks the database."""
        return self._by_ino.get(ino) or self._dropped.get(ino)

    def close(self) -> None:
        """Close the database that handles and intents share. No other call may follow."""
        self._saved_rows.settle()
        self._database.close()

    def _write_rows(self, rows: Sequence[Row]) -> None:
        statement = (
            "UPDATE inodes SET path = ?, size = ?, mtime_ns = ?, version = ?, mode = ?,"
            " atime_ns = ?, set_mtime_ns = ?, set_version = ? WHERE ino = ?"
        )
        self._batch(lambda: self._database.executemany(statement, rows))

    def _remember(self, inode: Inode) -> None:
        self._dropped.pop(inode.ino, None)
        self._by_ino[inode.ino] = inode
        if inode.link is Link.LINKED:
            self._by_name[inode.parent_ino, inode.name] = inode

    def _batch(self, work: Callable[[], object]) -> None:
        if self._database.in_transaction:
            work()
            return
        self._database.execute("BEGIN")
        try:
            work()
        finally:
            self._database.execute("COMMIT")

    def _make(self, parent_ino: int, name: str, *, is_directory: bool) -> Inode:
        for salt in count():
            ino = _derived(parent_ino, name, is_directory, salt)
            if ino in self._by_ino or ino in self._dropped:
                continue
            cursor = self._database.execute(
                "INSERT INTO inodes (ino, parent_ino, name, is_directory, is_derived)"
                " VALUES (?, ?, ?, ?, ?) ON CONFLICT (ino) DO NOTHING",
                (ino, parent_ino, name, int(is_directory), int(not salt)),
            )
            if cursor.rowcount:
                break
        inode = Inode(ino, parent_ino, name, is_directory)
        self._remember(inode)
        return inode

    def _load(self, condition: str, values: tuple[int | str, ...]) -> Inode | None:
        row = self._database.execute(
            "SELECT ino, parent_ino, name, is_directory, link, path, size, mtime_ns, version, mode,"  # noqa: S608
            f" atime_ns, set_mtime_ns, set_version FROM inodes WHERE {condition}",
            values,
        ).fetchone()
        if row is None:
            return None
        held = self._dropped.get(row[0])
        if held is not None:
            self._remember(held)
            return held
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
            # An inode that had a version keeps it: another one would be another number.
            told=None if stat is None else stat.version,
            mode=row[9],
            atime_ns=row[10],
            set_mtime_ns=row[11],
            set_version=row[12],
        )
        self._remember(inode)
        return inode


def _derived(parent_ino: int, name: str, is_directory: bool, salt: int) -> int:
    text = f"{parent_ino}/{int(is_directory)}/{salt}/{name}"
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    # 0 is no inode, 1 the root.
    return (int.from_bytes(digest) >> (64 - _NUMBER_BITS)) | 2
