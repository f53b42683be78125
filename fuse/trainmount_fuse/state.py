"""The two small databases of a mount, and how they are opened. Called by `filesystem` at start.

`state.db` keeps inode numbers, handles and intents; it outlives the process, not the power, so no
commit waits for the disk. `journal.db` names the files that were not uploaded yet; each commit is
on disk when it returns.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Final

__all__ = ["Intents", "get_meta", "open_database", "refusal_of_disk", "set_meta"]

log = logging.getLogger(__name__)

_MAX_INTENTS: Final = 1000

_RESERVED_BYTES: Final = 2 << 20
"""Disk that each database holds for itself, and its log once more. A file that is looked up for the
first time takes some hundred bytes.
"""

_PROBE_BYTES: Final = 64 << 10

_WRITE_FAILURES: Final = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_TRUNCATE,
)


def open_database(path: Path, schema: str, *, durable: bool) -> tuple[sqlite3.Connection, bool]:
    """Open or make a database; the second value tells whether what was there could be read.

    A damaged file is moved aside, not deleted: it may name bytes that somebody wants back.
    """
    try:
        return _opened(path, schema, durable=durable), True
    except sqlite3.DatabaseError:
        log.exception("State database is damaged; starting a new one", extra={"path": str(path)})
        for suffix in ("", "-wal", "-shm"):
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(part.with_name(f"{part.name}.damaged-{time.time_ns()}"))
        return _opened(path, schema, durable=durable), False


def refusal_of_disk(path: Path, error: sqlite3.OperationalError) -> OSError | None:
    """Why a statement on the database at `path` failed, where its disk or a quota is full: sqlite
    tells a quota as any other failed write.
    """
    if error.sqlite_errorcode not in _WRITE_FAILURES:
        return None
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            os.posix_fallocate(probe.fileno(), 0, _PROBE_BYTES)
    except OSError as refusal:
        return refusal if refusal.errno in (errno.ENOSPC, errno.EDQUOT) else None
    return None


def _opened(path: Path, schema: str, *, durable: bool) -> sqlite3.Connection:
    # Autocommit: a statement alone is a transaction, and batches say BEGIN themselves.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
        connection.executescript(schema)
        _reserve(connection)
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection


def _reserve(connection: sqlite3.Connection) -> None:
    """Own some disk from the start, so that a disk that others fill does not stop every lookup.

    Deleted pages stay in the file, and a write-ahead log stays as long as it once was.
    """
    page_bytes, num_free = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_size", "freelist_count")
    )
    # The log begins anew before it grows beyond what is reserved.
    connection.execute(f"PRAGMA wal_autocheckpoint={_RESERVED_BYTES // 2 // page_bytes}")
    if num_free * page_bytes >= _RESERVED_BYTES // 2:
        return
    try:
        connection.execute("CREATE TABLE IF NOT EXISTS reserve (bytes BLOB)")
        connection.execute("INSERT INTO reserve VALUES (zeroblob(?))", (_RESERVED_BYTES,))
        connection.execute("DELETE FROM reserve")
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
            raise
        log.warning("The disk of the state directory is full")


class Intents:
    """What this mount was about to do to names, so that a repeated request is known as such.

    The kernel repeats requests that a dead daemon never answered (FUSE_NOTIFY_RESEND); it may have
    carried them out. Each change of a name is written here first. A successor that finds the
    outcome there already asks `claim`: true means that a predecessor was doing just that. The claim
    is written down in turn, because the successor, too, may die before it answers. Claims end some
    time after the start, when every repeated request has long arrived. Used by the event loop's
    thread only.
    """

    SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS intents (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        generation INTEGER NOT NULL,   -- of the process that wrote the row
        operation TEXT NOT NULL,
        parent_ino INTEGER NOT NULL,
        name TEXT NOT NULL,
        argument TEXT NOT NULL,        -- rename: the new parent and name; create: the handle
        made_ns INTEGER NOT NULL       -- CLOCK_REALTIME
    );
    CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
    """

    CLAIM_SECONDS: Final = 60.0
    _ANSWERED_SECONDS: Final = 5.0
    """An operation that ended longer ago was answered, so that nobody will repeat it. Far above
    what an answer takes: a row that stays longer does no harm, since the kernel itself refuses what
    it knows to be done.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        row = database.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()
        self._generation = (int(row[0]) if row else 0) + 1
        self._ended: deque[tuple[float, int]] = deque()
        self._claims_end = time.monotonic() + self.CLAIM_SECONDS
        set_meta(database, "generation", str(self._generation))

    def note(self, operation: str, parent_ino: int, name: str, argument: str = "") -> int:
        """Write down what is about to be done; returns the row for `retract` or `ended`."""
        while self._ended and self._ended[0][0] < time.monotonic() - self._ANSWERED_SECONDS:
            self.retract(self._ended.popleft()[1])
        cursor = self._database.execute(
            "INSERT INTO intents (generation, operation, parent_ino, name, argument, made_ns)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (self._generation, operation, parent_ino, name, argument, time.time_ns()),
        )
        row_id = cursor.lastrowid or 0
        self._forget_answered(operation, parent_ino, argument, before=row_id)
        if row_id % 100 == 0:
            self._database.execute("DELETE FROM intents WHERE id <= ?", (row_id - _MAX_INTENTS,))
        return row_id

    def _forget_answered(
        self, operation: str, parent_ino: int, argument: str, *, before: int
    ) -> None:
        """The kernel changes one name of a directory at a time: now that another change has come,
        what was done in it before is answered, by whomever, and no request repeats it. The new row
        comes first: a rename that is repeated must not be without one at any moment.
        """
        parents = {parent_ino}
        if operation == "rename":
            parents.add(int(argument.partition("/")[0]))
        for ino in parents:
            self._database.execute(
                "DELETE FROM intents WHERE id < ?"
                " AND (parent_ino = ? OR operation = 'rename' AND argument GLOB ?)",
                (before, ino, f"{ino}/*"),
            )

    def retract(self, row_id: int) -> None:
        """The operation was refused: nothing of it was done."""
        self._database.execute("DELETE FROM intents WHERE id = ?", (row_id,))

    def leaving(self) -> set[tuple[int, str]]:
        """Names that predecessors may have been taking away: directory and name."""
        rows = self._database.execute(
            "SELECT operation, parent_ino, name, argument FROM intents WHERE generation < ?"
            " AND operation IN ('unlink', 'rename')",
            (self._generation,),
        )
        found: set[tuple[int, str]] = set()
        for operation, parent_ino, name, argument in rows:
            if operation == "rename":
                parent, _, name = argument.partition("/")
                parent_ino = int(parent)
            found.add((parent_ino, name))
        return found

    def ended(self, row_id: int) -> None:
        """The operation was carried out; its answer is on the way."""
        self._ended.append((time.monotonic(), row_id))

    def claim(self, operation: str, parent_ino: int, name: str) -> str | None:
        """The argument of a predecessor's same intent, once in each process; None where there is
        none or too late.
        """
        if time.monotonic() > self._claims_end:
            return None
        row = self._database.execute(
            "SELECT id, argument FROM intents WHERE generation < ? AND operation = ?"
            " AND parent_ino = ? AND name = ? AND made_ns > ? ORDER BY id DESC LIMIT 1",
            (
                self._generation,
                operation,
                parent_ino,
                name,
                time.time_ns() - int(10 * self.CLAIM_SECONDS * 1e9),
            ),
        ).fetchone()
        if row is None:
            return None
        # Ours from here on: not a repetition for this process any more, but for its successors.
        self._database.execute(
            "UPDATE intents SET generation = ? WHERE id = ?", (self._generation, row[0])
        )
        self.ended(row[0])
        return str(row[1])


def get_meta(database: sqlite3.Connection, key: str) -> str | None:
    """A remembered value of the mount; None where it was never set."""
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def set_meta(database: sqlite3.Connection, key: str, value: str) -> None:
    """Remember a value of the mount."""
    database.execute(
        "INSERT INTO meta (key, value) VALUES (?, ?)"
        " ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, value),
    )
