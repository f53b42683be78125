"""The journal of staging files: what a row says is on disk, and what a start makes of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trainmount_files.directory import DirectoryVolume
from trainmount_fuse.memory import MemoryBudget
from trainmount_fuse.writes.journal import Journal, StagedState
from trainmount_fuse.writes.staging import Staging
from trainmount_fuse.writes.streaming import Streaming


@pytest.fixture
def volume(tmp_path: Path) -> DirectoryVolume:
    (tmp_path / "volume").mkdir(exist_ok=True)
    return DirectoryVolume(tmp_path / "volume")


def _staging(tmp_path: Path, free_disk_floor_bytes: int = 0) -> Staging:
    journal = Journal(tmp_path / "journal.db")
    (tmp_path / "volume").mkdir(exist_ok=True)
    volume = DirectoryVolume(tmp_path / "volume")
    return Staging(
        tmp_path / "staging",
        journal,
        streaming=Streaming(volume, journal, MemoryBudget(), from_bytes=0),
        free_disk_floor_bytes=free_disk_floor_bytes,
        free_space=lambda _needed: False,
    )


def test_what_was_written_is_there_after_a_kill(tmp_path: Path) -> None:
    staging = _staging(tmp_path)
    staged = staging.create(7, "d/f", base_version=None, exclusive=True)
    staging.write(staged, 0, b"hello")
    staging.write(staged, 8, b"!")
    found = _staging(tmp_path).find(7)
    assert found is not None
    assert (found.volume_path, found.state, found.exclusive) == ("d/f", StagedState.DIRTY, True)
    assert os.pread(found.descriptor(), 100, 0) == b"hello\0\0\0!"


def test_an_upload_makes_it_clean_and_a_write_dirty_again(
    tmp_path: Path, volume: DirectoryVolume
) -> None:
    staging = _staging(tmp_path)
    staged = staging.create(7, "f", base_version=None)
    staging.write(staged, 0, b"one")
    stat = staging.upload(staged, volume, "f")
    assert (staged.state, staged.base_version) == (StagedState.CLEAN, stat.version)
    found = _staging(tmp_path).find(7)
    assert found is not None
    assert (found.state, found.base_version) == (StagedState.CLEAN, stat.version)
    staging.write(staged, 3, b"two")
    again = _staging(tmp_path).find(7)
    assert again is not None
    assert again.state is StagedState.DIRTY
    assert (tmp_path / "volume" / "f").read_bytes() == b"one"


def test_a_file_without_a_row_and_a_row_without_a_file_are_cleared_away(tmp_path: Path) -> None:
    staging = _staging(tmp_path)
    staged = staging.create(7, "f", base_version=None)
    staged.path.unlink()
    (tmp_path / "staging" / "draft-9").write_bytes(b"cut off")
    after = _staging(tmp_path)
    assert after.find(7) is None
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_damaged_journal_loses_no_bytes(tmp_path: Path) -> None:
    staging = _staging(tmp_path)
    staged = staging.create(7, "f", base_version=None)
    staging.write(staged, 0, b"the only copy")
    staging.close()
    for path in tmp_path.glob("journal.db*"):
        path.write_bytes(b"no database at all" * 500)
    after = _staging(tmp_path)
    assert after.find(7) is None
    # A new file gets the same number, and does not write over it.
    after.create(9, "g", base_version=None)
    (kept,) = tmp_path.glob("staging-kept-*")
    assert [path.read_bytes() for path in kept.iterdir()] == [b"the only copy"]
    assert _staging(tmp_path).find(9) is not None
    assert [path.name for path in tmp_path.glob("journal.db.damaged-*")] != []


def test_failed_bytes_are_kept_until_newer_ones_of_the_same_path_are_safe(
    tmp_path: Path, volume: DirectoryVolume
) -> None:
    staging = _staging(tmp_path)
    for ino, content in ((7, b"first"), (8, b"second")):
        staged = staging.create(ino, "f", base_version=None)
        staging.write(staged, 0, content)
        staging.withdraw(staged)
        staging.fail(staged, "the store was down")
    (kept,) = _staging(tmp_path).failed()
    assert kept.path.read_bytes() == b"second"
    assert kept.reason == "the store was down"
    staged = staging.create(9, "f", base_version=None)
    staging.write(staged, 0, b"third")
    staging.upload(staged, volume, "f")
    assert staging.failed() == []
    assert not kept.path.exists()


def test_no_room_is_said_before_a_byte_is_taken(tmp_path: Path) -> None:
    staging = _staging(tmp_path, free_disk_floor_bytes=1 << 60)
    with pytest.raises(OSError, match="reserve") as caught:
        staging.create(7, "f", base_version=None)
    assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "staging").iterdir()) == []
    assert Journal(tmp_path / "journal.db").rows() == []
