"""Open file and directory handles, written down so that a successor serves those a dead daemon
gave: files that are read in `handle_slots`, all else in `state.db`.

Used by the event loop's thread only; no method awaits. Reads never write here.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainmount_fuse.names.handle_slots import HandleSlots
from trainmount_fuse.names.spool import Cursor
from trainmount_fuse.reads.prefetch import Streams
from trainmount_fuse.state import get_meta, set_meta

__all__ = ["Handle", "HandleTable"]


@dataclass(slots=True, eq=False)
class Handle:
    """One `fh` the kernel holds."""

    fh: int
    ino: int
    flags: int
    """As given to open(2); of one that only reads, after a takeover, O_RDONLY."""

    is_directory: bool
    streams: Streams = field(default_factory=Streams)
    """Where readers of this handle are, for read-ahead; starts anew in a successor."""

    cursor: Cursor | None = None
    """Of a directory: how far it was read; None before the first read in this process."""

    @property
    def is_writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class HandleTable:
    """Which handles are open, and on which inode."""

    SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS handles (
        fh INTEGER PRIMARY KEY AUTOINCREMENT,
        ino INTEGER NOT NULL,
        flags INTEGER NOT NULL,
        is_directory INTEGER NOT NULL
    );
    """

    def __init__(self, database: sqlite3.Connection, mount_id: str, slots_path: Path) -> None:
        self._database = database
        self._by_fh: dict[int, Handle] = {}
        self._by_ino: dict[int, dict[int, None]] = {}
        """In the order of their opening, as far as this process has seen it."""
        self.is_successor = get_meta(database, "mount_id") == mount_id
        """The kernel mount is the one this state was made for, so that its handles are still
        open."""

        if not self.is_successor:
            database.execute("DELETE FROM handles")
            set_meta(database, "mount_id", mount_id)
        for row in database.execute("SELECT fh, ino, flags, is_directory FROM handles"):
            self._remember(Handle(row[0], row[1], row[2], bool(row[3])))
        self._slots = HandleSlots(slots_path, is_successor=self.is_successor)
        for fh, ino in self._slots.taken():
            self._remember(Handle(fh, ino, os.O_RDONLY, is_directory=False))

    def open(self, ino: int, flags: int, *, is_directory: bool = False) -> Handle:
        """A new handle, written down before the kernel learns of it."""
        fh = None
        if flags & os.O_ACCMODE == os.O_RDONLY and not is_directory:
            fh = self._slots.take(ino)
        if fh is None:
            cursor = self._database.execute(
                "INSERT INTO handles (ino, flags, is_directory) VALUES (?, ?, ?)",
                (ino, flags, int(is_directory)),
            )
            fh = cursor.lastrowid or 0
        handle = Handle(fh, ino, flags, is_directory)
        self._remember(handle)
        return handle

    def get(self, fh: int) -> Handle:
        """Raises OSError EBADF for a handle that is not open."""
        handle = self._by_fh.get(fh)
        if handle is None:
            raise OSError(errno.EBADF, "unknown file handle")
        return handle

    def find(self, fh: int) -> Handle | None:
        """The handle, or None where it is not open."""
        return self._by_fh.get(fh)

    def release(self, handle: Handle) -> None:
        """The kernel is done with the handle."""
        if not self._slots.give_back(handle.fh):
            self._database.execute("DELETE FROM handles WHERE fh = ?", (handle.fh,))
        self._by_fh.pop(handle.fh, None)
        held = self._by_ino.get(handle.ino, {})
        held.pop(handle.fh, None)
        if not held:
            self._by_ino.pop(handle.ino, None)

    def is_open(self, ino: int) -> bool:
        """Whether any handle is open on the inode."""
        return ino in self._by_ino

    def has_writer(self, ino: int) -> bool:
        """Whether a handle that may write is open on the inode."""
        return any(self._by_fh[fh].is_writable for fh in self._by_ino.get(ino, ()))

    def newest(self, ino: int) -> Handle | None:
        """The handle that was opened last on the inode; None where none is open."""
        held = self._by_ino.get(ino)
        return self._by_fh[next(reversed(held))] if held else None

    def open_fhs(self) -> list[int]:
        """Every open handle, at this moment."""
        return list(self._by_fh)

    def open_inos(self) -> list[int]:
        """Every inode with an open handle, at this moment."""
        return list(self._by_ino)

    def _remember(self, handle: Handle) -> None:
        self._by_fh[handle.fh] = handle
        self._by_ino.setdefault(handle.ino, {})[handle.fh] = None
