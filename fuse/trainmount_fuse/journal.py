"""Which files hold bytes that the store does not have yet: one durable row a staging file.

Called by `staging` only, from worker threads; a change is on disk when the method returns. A row's
id is the name of the staging file. A row is written before the change it announces is acknowledged.
"""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from trainmount_fuse.state import open_database

__all__ = ["Journal", "JournalRow", "StagedState", "journal_path", "unsent_paths"]


class StagedState(StrEnum):
    """What a staging file is for."""

    CLEAN = "clean"
    """The store has these bytes; kept because a writer is still open."""

    DIRTY = "dirty"
    """The store must get these bytes."""

    ORPHAN = "orphan"
    """The name is gone; kept for open handles and never uploaded."""

    FAILED = "failed"
    """The last close reported an error; kept so that nothing is lost, tried again at the next
    mount.
    """


_UNSENT: Final = (StagedState.DIRTY, StagedState.FAILED)


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One staging file."""

    id: int
    ino: int
    path: str
    base_version: str | None
    """Version in the store that these bytes follow on; None where nothing was there."""

    exclusive: bool
    """Made with O_EXCL: the first upload must not overwrite."""

    attempted: bool
    """An exclusive upload was begun; if something is there now, it may be ours."""

    state: StagedState
    error: str


def journal_path(state_dir: Path) -> Path:
    """Where the mount with this state directory keeps its journal."""
    return state_dir / "journal.db"


def unsent_paths(state_dir: Path) -> list[str]:
    """Paths in the volume whose last bytes are only here; `?` stands for what a damaged journal
    named.

    For a process that outlived the daemon: nobody else may have the journal open.
    """
    path = journal_path(state_dir)
    if not path.exists():
        return []
    journal = Journal(path)
    try:
        unsent = [row.path for row in journal.rows() if row.state in _UNSENT]
        return unsent if journal.is_whole else [*unsent, "?"]
    finally:
        journal.close()


class Journal:
    """The durable table of staging files."""

    _SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS staged (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        ino INTEGER NOT NULL,
        path TEXT NOT NULL,             -- in the volume, for a mount whose inode numbers were lost
        base_version TEXT,              -- NULL: nothing was there
        exclusive INTEGER NOT NULL,
        attempted INTEGER NOT NULL DEFAULT 0,
        state TEXT NOT NULL,
        error TEXT NOT NULL DEFAULT ''
    );
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database, self.is_whole = open_database(path, self._SCHEMA, durable=True)
        """`is_whole`: rows of an earlier mount were readable, or there was none."""

    def rows(self) -> list[JournalRow]:
        """Every row, oldest first."""
        with self._lock:
            found = self._database.execute(
                "SELECT id, ino, path, base_version, exclusive, attempted, state, error"
                " FROM staged ORDER BY id"
            ).fetchall()
        return [
            JournalRow(r[0], r[1], r[2], r[3], bool(r[4]), bool(r[5]), StagedState(r[6]), r[7])
            for r in found
        ]

    def add(
        self, ino: int, path: str, base_version: str | None, state: StagedState, *, exclusive: bool
    ) -> int:
        """A new row; returns its id, which was never used before."""
        cursor = self._execute(
            "INSERT INTO staged (ino, path, base_version, exclusive, state) VALUES (?, ?, ?, ?, ?)",
            (ino, path, base_version, int(exclusive), state.value),
        )
        return cursor.lastrowid or 0

    def set_state(self, row_id: int, state: StagedState, error: str = "") -> None:
        """The staging file is for something else now."""
        self._execute(
            "UPDATE staged SET state = ?, error = ? WHERE id = ?", (state.value, error, row_id)
        )

    def set_attempted(self, row_id: int) -> None:
        """An exclusive upload begins."""
        self._execute("UPDATE staged SET attempted = 1 WHERE id = ?", (row_id,))

    def set_uploaded(self, row_id: int, version: str) -> None:
        """The store has the bytes, as this version."""
        self._execute(
            "UPDATE staged SET state = ?, base_version = ?, exclusive = 0, error = '' WHERE id = ?",
            (StagedState.CLEAN.value, version, row_id),
        )

    def set_path(self, row_id: int, path: str, *, base_version: str | None) -> None:
        """The file was renamed. A rename overwrites, so it is not exclusive any more."""
        self._execute(
            "UPDATE staged SET path = ?, base_version = ?, exclusive = 0 WHERE id = ?",
            (path, base_version, row_id),
        )

    def set_ino(self, row_id: int, ino: int) -> None:
        """The inode numbers were lost and the file got a new one."""
        self._execute("UPDATE staged SET ino = ? WHERE id = ?", (ino, row_id))

    def remove(self, row_id: int) -> None:
        """Nothing is left to upload or to keep."""
        self._execute("DELETE FROM staged WHERE id = ?", (row_id,))

    def close(self) -> None:
        """No other call may follow."""
        with self._lock:
            self._database.close()

    def _execute(self, statement: str, values: tuple[object, ...]) -> sqlite3.Cursor:
        with self._lock:
            return self._database.execute(statement, values)
