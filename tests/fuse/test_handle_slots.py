"""Handles for reading in a mapped file: what a successor finds, and what it is not misled by."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from trainmount_fuse.names import handle_slots
from trainmount_fuse.names.handles import HandleTable
from trainmount_fuse.state import Intents

LARGEST_INO = (1 << 52) - 1


def table(folder: Path, mount_id: str = "one") -> HandleTable:
    database = sqlite3.connect(folder / "state.db", isolation_level=None)
    database.executescript(Intents.SCHEMA + HandleTable.SCHEMA)
    return HandleTable(database, mount_id, folder / "handles")


def rows(folder: Path) -> int:
    with sqlite3.connect(folder / "state.db") as database:
        return int(database.execute("SELECT count(*) FROM handles").fetchone()[0])


def test_a_successor_has_the_handles_that_are_open_and_no_others(tmp_path: Path) -> None:
    first = table(tmp_path)
    kept = [first.open(ino, os.O_RDONLY) for ino in (7, 7, LARGEST_INO)]
    closed = first.open(8, os.O_RDONLY)
    first.release(closed)
    assert rows(tmp_path) == 0
    second = table(tmp_path)
    assert {(one.fh, one.ino) for one in map(second.get, second.open_fhs())} == {
        (one.fh, one.ino) for one in kept
    }
    assert not any(second.get(one.fh).is_writable for one in kept)
    assert not second.is_open(8)
    assert second.open(9, os.O_RDONLY).fh not in {one.fh for one in kept}


def test_another_mount_begins_without_handles(tmp_path: Path) -> None:
    table(tmp_path).open(7, os.O_RDONLY)
    assert table(tmp_path, "two").open_fhs() == []


def test_a_release_that_is_repeated_closes_nothing_that_was_opened_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_slots, "_NUM_SLOTS", 1)
    first = table(tmp_path)
    old = first.open(7, os.O_RDONLY)
    first.release(old)
    new = first.open(8, os.O_RDONLY)
    assert new.fh != old.fh
    second = table(tmp_path)
    assert second.find(old.fh) is None
    second.release(old)
    assert second.is_open(8)
    assert table(tmp_path).open_fhs() == [new.fh]


def test_handles_beyond_the_slots_and_those_that_write_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_slots, "_NUM_SLOTS", 2)
    first = table(tmp_path)
    handles = [first.open(ino, os.O_RDONLY) for ino in range(10, 15)]
    handles.append(first.open(15, os.O_RDWR))
    handles.append(first.open(1 << 52, os.O_RDONLY))
    assert rows(tmp_path) == 5
    assert first.newest(15) is handles[5]
    second = table(tmp_path)
    assert sorted(second.open_inos()) == [*range(10, 16), 1 << 52]
    for handle in handles:
        second.release(second.get(handle.fh))
    assert table(tmp_path).open_fhs() == []


def test_without_room_for_the_map_all_handles_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    first = table(tmp_path)
    handle = first.open(7, os.O_RDONLY)
    assert rows(tmp_path) == 1
    assert table(tmp_path).get(handle.fh).ino == 7
