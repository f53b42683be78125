"""Directories as volumes: made once, never taken from somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmount_csi.errors import AlreadyExists, InvalidArgument
from trainmount_csi.provisioning import (
    Capacity,
    create,
    delete,
    directory_name,
    parse_capacity,
    split_id,
)
from trainmount_csi.wire import csi_pb2
from trainmount_files import Volume, open_volume


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return open_volume(f"file://{tmp_path}")


def test_the_same_volume_twice_is_one_directory(volume: Volume, tmp_path: Path) -> None:
    create(volume, "pvc-1", Capacity(10, 0))
    (tmp_path / "pvc-1" / "data").write_text("x")
    create(volume, "pvc-1", Capacity(10, 0))
    assert (tmp_path / "pvc-1" / "data").read_text() == "x"


def test_a_larger_claim_of_the_same_name_is_another_volume(volume: Volume) -> None:
    create(volume, "pvc-1", Capacity(10, 0))
    with pytest.raises(AlreadyExists, match="exists with 10 bytes"):
        create(volume, "pvc-1", Capacity(20, 0))
    with pytest.raises(AlreadyExists):
        create(volume, "pvc-1", Capacity(0, 5))


def test_deleting_takes_the_whole_directory_and_nothing_beside_it(
    volume: Volume, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("stays")
    create(volume, "pvc-1", Capacity(0, 0))
    create(volume, "pvc-2", Capacity(0, 0))
    deep = tmp_path / "pvc-1" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "data").write_text("x")
    delete(volume, "pvc-1")
    delete(volume, "pvc-1")
    assert not (tmp_path / "pvc-1").exists()
    assert (tmp_path / "pvc-2").is_dir()
    assert (tmp_path / "mine").read_text() == "stays"


def test_what_was_there_before_is_used_and_never_deleted(volume: Volume, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "data").write_text("x")
    create(volume, "old", Capacity(0, 0))
    delete(volume, "old")
    assert (tmp_path / "old" / "data").read_text() == "x"


def test_a_directory_that_we_did_not_make_is_not_deleted(volume: Volume, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    delete(volume, "other")
    assert (tmp_path / "other").is_dir()


@pytest.mark.parametrize("name", ["..", ".", ".trainmount", "a/b", "a b", "ü", "a%2Fb", "x=y"])
def test_any_name_is_one_directory_of_its_own(name: str) -> None:
    directory = directory_name(name)
    assert "/" not in directory
    assert "%" not in directory
    assert not directory.startswith(".")
    assert directory_name("pvc-0f3a") == "pvc-0f3a"


def test_an_id_tells_the_volume_and_the_directory() -> None:
    parent, name = split_id("/Volumes/main/default/data/claims/pvc-1")
    assert parent is not None
    assert (parent.source, name) == ("/Volumes/main/default/data/claims", "pvc-1")


@pytest.mark.parametrize("volume_id", ["", "reallyfake", "/etc/passwd", "/Volumes/a/../b/c"])
def test_a_foreign_id_is_nothing_of_ours(volume_id: str) -> None:
    assert split_id(volume_id)[0] is None


def test_a_capacity_that_nothing_fits_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="more than its limit"):
        parse_capacity(csi_pb2.CapacityRange(required_bytes=2, limit_bytes=1))
    with pytest.raises(InvalidArgument, match="negative"):
        parse_capacity(csi_pb2.CapacityRange(required_bytes=-1))
