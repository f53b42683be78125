"""What is removed after a save, and what never is."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
from torch import nn

from trainmount.checkpoint import Checkpointer
from trainmount.checkpoint.generations import prune
from trainmount.checkpoint.stores import DirectoryStore
from trainmount.errors import CheckpointError


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpointer:
    state = {"model": nn.Linear(2, 2)}
    return Checkpointer(tmp_path, state=state, keep_last=2, on_sigterm=False)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_a_folder_that_is_missing_by_then_is_no_error(
    tmp_path: Path, checkpoints: Checkpointer
) -> None:
    first = str(checkpoints.save(1))
    shutil.rmtree(tmp_path / first)
    kept = [checkpoints.save(step) for step in (2, 3)]
    assert names(tmp_path) == set(kept)
    shutil.rmtree(tmp_path)
    kept = [checkpoints.save(4)]
    assert names(tmp_path) == set(kept)
    prune(DirectoryStore(tmp_path / "missing"), "g00000007-00000000", 2)


def test_only_whole_checkpoints_count_and_orphans_of_saves_are_removed(
    tmp_path: Path, checkpoints: Checkpointer
) -> None:
    whole, damaged, abandoned, half_removed = (str(checkpoints.save(step)) for step in range(4))
    # The fixture keeps two: bring back what the others left.
    for name in (whole, damaged):
        shutil.copytree(tmp_path / half_removed, tmp_path / name)
    (tmp_path / damaged / "metadata").unlink()
    (tmp_path / abandoned / "commit.json").rename(tmp_path / abandoned / "commit.json.tmp")
    (tmp_path / half_removed / "commit.json").unlink()
    (tmp_path / half_removed / "r00000-000.bin").unlink()
    newest = checkpoints.save(5)
    # The damaged one stays while it is newer than the last that counts; nothing hides a whole one.
    assert names(tmp_path) == {whole, damaged, newest}
    last = checkpoints.save(6)
    assert names(tmp_path) == {newest, last}


def test_a_save_that_is_being_written_is_left_alone(
    tmp_path: Path, checkpoints: Checkpointer
) -> None:
    committed = str(checkpoints.save(1))
    later = "g00000009-ffffffff"
    beside = committed[:10] + "00000000"  # sorts before it
    for name in (later, beside):
        (tmp_path / name).mkdir()
        (tmp_path / name / "r00000-000.bin").write_bytes(b"bytes that are on their way")
    prune(DirectoryStore(tmp_path), committed, 1)
    assert names(tmp_path) == {committed, later, beside}
    resumed = checkpoints.resume()
    assert resumed is not None
    assert resumed.generation == committed


def test_one_that_cannot_be_removed_is_told_and_hinders_no_other(
    tmp_path: Path, checkpoints: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    first = str(checkpoints.save(1))
    (tmp_path / first / "notes").mkdir()
    rest = [str(checkpoints.save(step)) for step in (2, 3, 4)]
    assert names(tmp_path) == {first, *rest[1:]}
    (warning, *_) = [one for one in caplog.records if one.message == "old checkpoint not removed"]
    assert warning.__dict__["path"] == f"{tmp_path}/{first}"
    assert not (tmp_path / first / "commit.json").exists()
    (tmp_path / first / "notes").rmdir()
    checkpoints.save(5)
    assert first not in names(tmp_path)


def test_a_damaged_newest_one_does_not_hide_those_that_are_kept(
    tmp_path: Path, checkpoints: Checkpointer
) -> None:
    state = {"model": nn.Linear(2, 2)}
    keeping = Checkpointer(tmp_path, state=state, keep_last=1, keep_every=2, on_sigterm=False)
    saved = [str(keeping.save(step)) for step in range(1, 6)]
    assert names(tmp_path) == {saved[1], saved[3], saved[4]}
    (tmp_path / saved[4] / "commit.json").write_text(json.dumps({"format": "another"}))
    again = Checkpointer(tmp_path, state=state, keep_last=1, keep_every=2, on_sigterm=False)
    resumed = again.resume()
    assert resumed is not None
    assert (resumed.step, resumed.generation) == (4, saved[3])
    last = again.save(5)
    assert names(tmp_path) == {saved[1], saved[3], last}


def test_a_save_has_the_room_of_those_before_it_that_did_not_finish(
    tmp_path: Path, checkpoints: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, damaged = (str(checkpoints.save(step)) for step in (1, 2))
    (tmp_path / damaged / "r00000-000.bin").unlink()
    killed = "g00000007-00000000"
    (tmp_path / killed).mkdir()
    (tmp_path / killed / "r00000-000.bin").write_bytes(b"written when its job was killed")
    there: list[set[str]] = []

    def write(*_: object, **__: object) -> None:
        there.append(names(tmp_path))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(DirectoryStore, "write", write)
        for step in (3, 4):
            with pytest.raises(CheckpointError, match="No space left"):
                checkpoints.save(step)
    assert [len(names - {first, damaged}) for names in there] == [1, 1]
    assert all({first, damaged} < names and killed not in names for names in there)
    assert str(checkpoints.save(5)) > killed
