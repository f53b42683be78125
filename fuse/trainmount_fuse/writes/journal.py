"""Which files hold bytes that the store does not have yet: one durable row a staging file. Beside
it, which uploads in parts are begun, and which local bytes went beside a later version.

Called by `staging` and `streaming`, from worker threads. A row's id is the name of the staging
file. What announces bytes is on disk when the method returns, before they are acknowledged. What
only says that they are no longer needed outlives the process at once and the machine some time
later: after a power failure the store is asked once more. Changes raise OSError ENOSPC, EDQUOT, and
sqlite3.OperationalError.
"""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from trainmount_fuse.state import open_database, refusal_of_disk

__all__ = [
    "BegunUpload",
    "Conflict",
    "Journal",
    "JournalRow",
    "StagedState",
    "journal_path",
    "unsent_paths",
]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


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


@dataclass(frozen=True, slots=True)
class BegunUpload:
    """An upload in parts that has not ended."""

    id: int
    path: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Local bytes that came too late: the store had a later version at `path` already."""

    path: str
    kept_path: str
    """Where they are in the store."""

    made_ns: int
    """When they were put there, since the epoch."""


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
    CREATE TABLE IF NOT EXISTS uploads (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        path TEXT NOT NULL,
        token TEXT NOT NULL             -- what the store knows the upload by
    );
    CREATE TABLE IF NOT EXISTS conflicts (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        path TEXT NOT NULL,
        kept_path TEXT NOT NULL,
        made_ns INTEGER NOT NULL
    );
    CREATE TABLE IF NOT EXISTS boot (id TEXT NOT NULL);
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._database, self.is_whole = open_database(path, self._SCHEMA, durable=True)
        """`is_whole`: rows of an earlier mount were readable, or there was none."""

        self._is_durable = True
        self._boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""

    def is_after_reboot(self) -> bool:
        """The machine was started since `accept_boot`: what nobody had synced may be gone from the
        staging files.
        """
        with self._lock:
            row = self._database.execute("SELECT id FROM boot").fetchone()
        return row is not None and row[0] != self._boot_id

    def accept_boot(self) -> None:
        """What a reboot means for the rows is written down."""
        with self._lock:
            row = self._database.execute("SELECT id FROM boot").fetchone()
        if row is None or row[0] != self._boot_id:
            self._execute("DELETE FROM boot", ())
            self._execute("INSERT INTO boot VALUES (?)", (self._boot_id,))

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
            durable=False,
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
        self._execute("DELETE FROM staged WHERE id = ?", (row_id,), durable=False)

    def add_upload(self, path: str, token: str) -> int:
        """An upload in parts is begun; returns its row."""
        cursor = self._execute("INSERT INTO uploads (path, token) VALUES (?, ?)", (path, token))
        return cursor.lastrowid or 0

    def remove_upload(self, row_id: int) -> None:
        """The upload is complete or aborted."""
        self._execute("DELETE FROM uploads WHERE id = ?", (row_id,), durable=False)

    def uploads(self) -> list[BegunUpload]:
        """Every upload that has not ended, oldest first."""
        with self._lock:
            found = self._database.execute("SELECT id, path, token FROM uploads ORDER BY id")
            return [BegunUpload(*row) for row in found]

    def add_conflict(self, conflict: Conflict) -> None:
        """Local bytes were put beside a later version."""
        self._execute(
            "INSERT INTO conflicts (path, kept_path, made_ns) VALUES (?, ?, ?)",
            (conflict.path, conflict.kept_path, conflict.made_ns),
        )

    def conflicts(self) -> list[Conflict]:
        """The last 100 of them, oldest first."""
        with self._lock:
            found = self._database.execute(
                "SELECT path, kept_path, made_ns FROM conflicts ORDER BY id DESC LIMIT 100"
            ).fetchall()
        return [Conflict(*row) for row in reversed(found)]

    def close(self) -> None:
        """No other call may follow."""
        with self._lock:
            self._database.close()

    def _execute(
        self, statement: str, values: tuple[object, ...], *, durable: bool = True
    ) -> sqlite3.Cursor:
        with self._lock:
            try:
                if durable != self._is_durable:
                    # With a write-ahead log, NORMAL leaves the commit to the next one that is FULL.
                    mode = "FULL" if durable else "NORMAL"
                    self._database.execute(f"PRAGMA synchronous={mode}")
                    self._is_durable = durable
                return self._database.execute(statement, values)
            except sqlite3.OperationalError as error:
                if refusal := refusal_of_disk(self._path, error):
                    raise refusal from error
                raise
