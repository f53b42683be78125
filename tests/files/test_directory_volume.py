"""What is particular to `file://`: the staging directory, links, versions, pages of a changing
directory.
"""

from __future__ import annotations

import errno
import os
import pickle
import threading
from pathlib import Path

import pytest

from trainmount_files import (
    AlreadyExists,
    ByteRange,
    InvalidRequest,
    IsADirectory,
    NoSpace,
    NotADirectory,
    NotFound,
    PreconditionFailed,
    QuotaExceeded,
    VolumeError,
    list_directory,
    open_volume,
)
from trainmount_files.directory import DirectoryVolume


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    directory.mkdir()
    return directory


@pytest.fixture
def volume(root: Path) -> DirectoryVolume:
    return DirectoryVolume(root)


def test_a_link_to_the_outside_is_not_part_of_the_volume(
    volume: DirectoryVolume, root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "directory-link").symlink_to(outside)
    (root / "file-link").symlink_to(outside / "secret")
    assert list(list_directory(volume, "")) == []
    for path in ("file-link", "directory-link", "directory-link/secret"):
        with pytest.raises(NotFound):
            volume.stat(path)
        with pytest.raises(NotFound):
            volume.read_into(path, ByteRange(0, 1), bytearray(1))
        with pytest.raises(NotFound):
            volume.delete(path)
    with pytest.raises(VolumeError):
        volume.put("directory-link/new", b"x")
    with pytest.raises(VolumeError):
        volume.make_directory("directory-link/new")
    with pytest.raises((NotFound, NotADirectory)):
        volume.list_page("directory-link")
    assert [found.name for found in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_put_over_a_link_replaces_the_link_and_not_its_target(
    volume: DirectoryVolume, root: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    (root / "name").symlink_to(target)
    volume.put("name", b"new")
    assert target.read_bytes() == b"old"
    assert not (root / "name").is_symlink()


@pytest.mark.parametrize("path", ["..", "a/../b", "/abs", "a//b", ".", "a/", "a\0b"])
def test_a_path_that_could_leave_the_root_is_refused(volume: DirectoryVolume, path: str) -> None:
    for call in (
        lambda: volume.stat(path),
        lambda: volume.put(path, b""),
        lambda: volume.delete(path),
        lambda: volume.rename("x", path),
        lambda: volume.make_directory(path),
    ):
        with pytest.raises(InvalidRequest):
            call()


def test_the_staging_directory_cannot_be_seen_or_used(volume: DirectoryVolume, root: Path) -> None:
    volume.put("a", b"1")
    assert (root / ".trainmount-staging").is_dir()
    assert [entry.name for entry in list_directory(volume, "")] == ["a"]
    with pytest.raises(InvalidRequest, match="reserved"):
        volume.stat(".trainmount-staging")
    with pytest.raises(InvalidRequest, match="reserved"):
        volume.put(".trainmount-staging/x", b"")


def test_two_contents_of_the_same_size_and_time_have_two_versions(
    volume: DirectoryVolume, root: Path
) -> None:
    first = volume.put("a", b"1111")
    volume.put("a", b"2222")
    os.utime(root / "a", ns=(first.mtime_ns, first.mtime_ns))
    assert volume.stat("a").mtime_ns == first.mtime_ns
    assert volume.stat("a").version != first.version
    with pytest.raises(PreconditionFailed):
        volume.read_into("a", ByteRange(0, 4), bytearray(4), version=first.version)


def test_pages_neither_lose_nor_repeat_names_while_the_directory_changes(
    volume: DirectoryVolume, root: Path
) -> None:
    names = [f"{number:05}" for number in range(2500)]
    for name in names:
        (root / name).touch()
    first = volume.list_page("")
    assert len(first.entries) == 1000
    (root / "00000x").touch()
    (root / first.entries[-1].name).unlink()
    second = volume.list_page("", first.next_page_token)
    third = volume.list_page("", second.next_page_token)
    assert third.next_page_token is None
    seen = [entry.name for page in (first, second, third) for entry in page.entries]
    assert seen == names


def test_one_of_many_exclusive_writers_wins(volume: DirectoryVolume) -> None:
    outcomes: list[bytes] = []

    def write(content: bytes) -> None:
        try:
            volume.put("deep/er/name", content, overwrite=False)
        except AlreadyExists:
            return
        outcomes.append(content)

    threads = [threading.Thread(target=write, args=(b"%d" % n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1
    buffer = bytearray(1)
    volume.read_into("deep/er/name", ByteRange(0, 1), buffer)
    assert bytes(buffer) == outcomes[0]


def test_nothing_is_left_in_staging_after_success_failure_and_abort(
    volume: DirectoryVolume, root: Path, tmp_path: Path
) -> None:
    volume.put("a", b"1")
    with pytest.raises(AlreadyExists):
        volume.put("a", b"2", overwrite=False)
    volume.make_directory("d")
    with pytest.raises(IsADirectory):
        volume.put("d", b"2")
    short = tmp_path / "short"
    short.write_bytes(b"123")
    with short.open("rb") as source, pytest.raises(InvalidRequest, match="3 of 10 bytes"):
        volume.upload("b", source, 10)
    upload = volume.start_upload("c")
    upload.put_part(2, b"22")
    upload.put_part(1, b"11")
    upload.put_part(2, b"33")
    upload.abort()
    upload.abort()
    finished = volume.start_upload("e")
    finished.put_part(2, b"22")
    finished.put_part(1, b"11")
    finished.put_part(2, b"33")
    assert finished.complete().size_bytes == 4
    finished.abort()
    assert (root / "e").read_bytes() == b"1133"
    assert list((root / ".trainmount-staging").iterdir()) == []
    assert sorted(entry.name for entry in list_directory(volume, "")) == ["a", "d", "e"]


def test_a_fifo_is_not_opened(volume: DirectoryVolume, root: Path) -> None:
    os.mkfifo(root / "fifo")
    with pytest.raises(NotFound):
        volume.read_into("fifo", ByteRange(0, 1), bytearray(1))


def test_a_name_that_is_no_unicode_can_be_listed_and_read(
    volume: DirectoryVolume, root: Path
) -> None:
    Path(os.fsdecode(bytes(root) + b"/\xff")).write_bytes(b"x")
    (entry,) = list_directory(volume, "")
    volume.read_into(entry.path, ByteRange(0, 1), bytearray(1))


def test_a_file_url_may_hold_encoded_and_special_characters(tmp_path: Path) -> None:
    directory = tmp_path / "a b#c?d%e"
    directory.mkdir()
    volume = open_volume(directory.as_uri())
    assert isinstance(volume, DirectoryVolume)
    assert volume.url == directory.as_uri()
    volume.put("x", b"1")
    assert (directory / "x").read_bytes() == b"1"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="missing"):
        open_volume((tmp_path / "missing").as_uri())


@pytest.mark.parametrize("url", ["", "relative", "ftp://host/x", "/Volumes/c/s/../t", "file:dir"])
def test_a_url_of_no_volume_is_refused_and_says_what_is_expected(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"must be /Volumes\["):
        open_volume(url)


def test_a_volume_survives_pickling(volume: DirectoryVolume) -> None:
    volume.put("a", b"1")
    assert pickle.loads(pickle.dumps(volume)).stat("a") == volume.stat("a")


def test_calls_after_close_raise(volume: DirectoryVolume) -> None:
    volume.close()
    with pytest.raises(ValueError, match="closed"):
        volume.stat("")


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, NoSpace), (errno.EDQUOT, QuotaExceeded)]
)
def test_a_disk_without_room_is_told_apart_from_one_that_fails(
    volume: DirectoryVolume,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[VolumeError],
) -> None:
    volume.put("f", b"before")

    def write(descriptor: int, data: memoryview) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(kind):
        volume.put("f", b"new")
    monkeypatch.undo()
    assert (root / "f").read_bytes() == b"before"
