"""What is to be saved of inodes, in a mapped file: what a successor gets of it, and when it goes
to the database.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainmount_fuse.names import saved_rows
from trainmount_fuse.names.saved_rows import Row, SavedRows


class Written:
    """What reached the database, in its order."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.is_refused = False

    def __call__(self, rows: Sequence[Row]) -> None:
        if self.is_refused:
            raise sqlite3.OperationalError("database or disk is full")
        self.rows += rows


def row(ino: int, version: str = "v") -> Row:
    return (f"a/{ino}\n\udcff", 5, None, version, ino)


def test_a_successor_of_a_killed_process_writes_down_the_newest_row_of_each(
    tmp_path: Path,
) -> None:
    pid = os.fork()
    if pid == 0:
        rows = SavedRows(tmp_path / "rows", Written())
        for ino, version in ((1, "old"), (2, "v"), (1, "new")):
            rows.add(row(ino, version))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    written = Written()
    rows = SavedRows(tmp_path / "rows", written)
    assert written.rows == [row(1, "new"), row(2)]
    assert 1 not in rows
    SavedRows(tmp_path / "rows", written)
    assert len(written.rows) == 2


def test_rows_go_to_the_database_together_when_the_file_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_rows, "_SIZE_BYTES", 4096)
    written = Written()
    rows = SavedRows(tmp_path / "rows", written)
    for ino in range(200):
        rows.add(row(ino))
        assert ino in rows
        assert len(written.rows) <= ino
    assert len(written.rows) > 100
    rows.settle()
    assert written.rows == [row(ino) for ino in range(200)]
    assert not any(ino in rows for ino in range(200))


def test_a_row_that_the_database_refuses_is_still_here(tmp_path: Path) -> None:
    written = Written()
    rows = SavedRows(tmp_path / "rows", written)
    rows.add(row(1))
    written.is_refused = True
    with pytest.raises(sqlite3.OperationalError):
        rows.settle()
    assert 1 in rows
    written.is_refused = False
    SavedRows(tmp_path / "rows", written)
    assert written.rows == [row(1)]


def test_without_the_file_or_with_a_row_too_long_for_it_each_goes_at_once(tmp_path: Path) -> None:
    written = Written()
    (tmp_path / "rows").mkdir()
    SavedRows(tmp_path / "rows", written).add(row(1))
    assert written.rows == [row(1)]
    rows = SavedRows(tmp_path / "others", written)
    rows.add(row(2))
    long = ("x" * (2 << 20), 5, None, "v", 3)
    rows.add(long)
    assert written.rows == [row(1), row(2), long]


@pytest.mark.parametrize("damage", [b"\xff" * 64, b"{]\n" * 8, b"\0" * 64])
def test_a_torn_file_gives_no_rows_and_is_used_again(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "rows"
    SavedRows(path, Written()).add(row(1))
    with path.open("r+b") as file:
        file.seek(8)
        file.write(damage)
    written = Written()
    rows = SavedRows(path, written)
    assert written.rows == []
    rows.add(row(2))
    SavedRows(path, written)
    assert written.rows == [row(2)]
