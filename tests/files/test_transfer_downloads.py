"""Whole files to this machine: the right bytes under the name, or nothing there at all."""

from __future__ import annotations

import errno
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN

from trainmount_files import (
    AlreadyExists,
    ByteRange,
    Cancelled,
    FileStat,
    IsADirectory,
    LocalError,
    NotFound,
    PreconditionFailed,
    Unavailable,
    Volume,
)
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.transfer import download_file

DATA = random.Random(5).randbytes(300_000)
RANGE = 32 << 10


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file that does not exist, in a directory that holds nothing."""
    directory = tmp_path / "target"
    directory.mkdir()
    return directory / "file"


def names(target: Path) -> list[str]:
    return sorted(one.name for one in target.parent.iterdir())


def fetch(volume: Volume, target: Path, **options: Any) -> FileStat:
    return download_file(volume, "file", target, range_bytes=RANGE, **options)


@pytest.mark.parametrize("size_bytes", [0, 1, RANGE - 1, RANGE, RANGE + 1, 2 * RANGE, len(DATA)])
def test_a_file_of_any_size_arrives_whole_and_alone(
    volume: Volume, target: Path, size_bytes: int
) -> None:
    stored = volume.put("file", DATA[:size_bytes])
    arrived: list[int] = []
    found = fetch(volume, target, progress=arrived.append)
    assert target.read_bytes() == DATA[:size_bytes]
    assert (found, sum(arrived)) == (stored, size_bytes)
    assert names(target) == ["file"]


def test_a_new_file_has_the_modes_of_any_file_and_an_old_one_is_replaced(
    volume: Volume, target: Path
) -> None:
    volume.put("file", DATA)
    target.write_bytes(b"old")
    before = os.umask(0o027)
    try:
        fetch(volume, target)
    finally:
        os.umask(before)
    assert target.read_bytes() == DATA
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_file_is_not_replaced_where_that_was_not_asked_for(volume: Volume, target: Path) -> None:
    volume.put("file", DATA)
    assert fetch(volume, target, overwrite=False).size_bytes == len(DATA)
    volume.put("file", b"new")
    with pytest.raises(AlreadyExists, match=r"download file: something is at .*target/file"):
        fetch(volume, target, overwrite=False)
    assert target.read_bytes() == DATA
    assert names(target) == ["file"]


def test_a_file_that_appears_meanwhile_is_not_replaced_either(volume: Volume, target: Path) -> None:
    volume.put("file", DATA)

    def appear(_: int) -> None:
        target.write_bytes(b"somebody else's")

    with pytest.raises(AlreadyExists):
        fetch(volume, target, overwrite=False, progress=appear)
    assert target.read_bytes() == b"somebody else's"
    assert names(target) == ["file"]


def test_a_link_at_the_destination_is_replaced_and_not_followed(
    volume: Volume, target: Path, tmp_path: Path
) -> None:
    volume.put("file", DATA)
    (tmp_path / "elsewhere").write_bytes(b"untouched")
    target.symlink_to(tmp_path / "elsewhere")
    fetch(volume, target)
    assert not target.is_symlink()
    assert target.read_bytes() == DATA
    assert (tmp_path / "elsewhere").read_bytes() == b"untouched"


def test_what_is_no_file_is_never_replaced(volume: Volume, target: Path) -> None:
    volume.put("file", DATA)
    target.mkdir()
    with pytest.raises(LocalError, match="is a directory") as caught:
        fetch(volume, target)
    assert caught.value.errno == errno.EISDIR
    target.rmdir()
    os.mkfifo(target)
    with pytest.raises(LocalError, match="is no regular file"):
        fetch(volume, target)
    assert target.is_fifo()
    assert names(target) == ["file"]


def test_a_missing_directory_is_named(volume: Volume, target: Path) -> None:
    volume.put("file", DATA)
    with pytest.raises(LocalError, match=r"missing/file: no such file or directory") as caught:
        fetch(volume, target.parent / "missing" / "file")
    assert caught.value.errno == errno.ENOENT
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert names(target) == []


def test_what_is_missing_or_a_directory_leaves_nothing(volume: Volume, target: Path) -> None:
    with pytest.raises(NotFound):
        fetch(volume, target)
    volume.make_directory("file")
    with pytest.raises(IsADirectory):
        fetch(volume, target)
    assert names(target) == []


def test_a_full_disk_is_told_and_leaves_nothing(
    volume: Volume, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume.put("file", DATA)
    target.write_bytes(b"old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LocalError, match="no space left on device") as caught:
        fetch(volume, target)
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value.__cause__, OSError)
    assert names(target) == ["file"]
    assert target.read_bytes() == b"old"


def test_file_systems_without_nameless_files_end_the_same(
    volume: Volume, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume.put("file", DATA)
    real_open = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real_open(path, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    seen: list[list[str]] = []
    fetch(volume, target, progress=lambda _: seen.append(names(target)))
    assert target.read_bytes() == DATA
    assert all(len(each) == 1 and each[0].startswith(".trainmount-") for each in seen)
    with pytest.raises(AlreadyExists):
        fetch(volume, target, overwrite=False)
    target.unlink()
    fetch(volume, target, overwrite=False)

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    target.unlink()
    with pytest.raises(KeyboardInterrupt):
        fetch(volume, target, progress=fail)
    assert names(target) == []


def test_a_kill_leaves_nothing_where_files_can_be_nameless(volume: Volume, target: Path) -> None:
    volume.put("file", DATA)
    seen: list[list[str]] = []
    fetch(volume, target, progress=lambda _: seen.append(names(target)))
    assert len(seen) >= len(DATA) // RANGE
    assert [each for each in seen if each] == []


@pytest.mark.parametrize("known", [False, True])
def test_a_file_that_is_replaced_meanwhile_never_arrives(
    remote: FilesApiVolume, served: Path, target: Path, known: bool
) -> None:
    stored = remote.put("file", DATA)
    arrived: list[int] = []

    def replace_after_the_third(count: int) -> None:
        arrived.append(count)
        if len(arrived) != 3:
            return
        status = (served / "file").stat()
        (served / "new").write_bytes(DATA[::-1])
        os.utime(served / "new", ns=(status.st_atime_ns, status.st_mtime_ns + 2_000_000_000))
        (served / "new").rename(served / "file")

    target.write_bytes(b"old")
    with pytest.raises(PreconditionFailed):
        fetch(
            remote,
            target,
            known=stored if known else None,
            parallelism=1,
            progress=replace_after_the_third,
        )
    assert target.read_bytes() == b"old"
    assert names(target) == ["file"]


def test_another_version_than_the_callers_is_refused_before_anything_is_made(
    volume: Volume, target: Path
) -> None:
    version = volume.put("file", DATA).version
    volume.put("file", DATA[1:])
    with pytest.raises(PreconditionFailed):
        fetch(volume, target, version=version)
    assert names(target) == []
    known = replace(volume.stat("file"), version=version, size_bytes=len(DATA) - 1)
    with pytest.raises(PreconditionFailed):
        fetch(volume, target, known=known)
    assert names(target) == []


def test_what_a_listing_said_saves_the_question(
    server: LocalServer, target: Path, remote: FilesApiVolume
) -> None:
    remote.put("file", DATA[:1000])
    options = replace(OPTIONS, direct_read_max_bytes=1 << 20)
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    (known,) = volume.list_page("").entries
    before = dict(server.statistics()["requests"])
    download_file(volume, "file", target, known=known)
    after = server.statistics()["requests"]
    volume.close()
    assert target.read_bytes() == DATA[:1000]
    assert {
        name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name)
    } == {"get_file": 1}


def test_a_body_that_is_cut_is_fetched_to_its_end(
    remote: FilesApiVolume, server: LocalServer, target: Path
) -> None:
    remote.put("file", DATA)
    server.inject(Fault(route="presigned_get", cut_after_bytes=20_000, count=8))
    arrived: list[int] = []
    fetch(remote, target, progress=arrived.append)
    assert target.read_bytes() == DATA
    assert sum(arrived) == len(DATA)


def test_a_body_that_is_always_cut_leaves_nothing(
    remote: FilesApiVolume, server: LocalServer, target: Path
) -> None:
    remote.put("file", DATA)
    server.inject(
        Fault(route="presigned_get", cut_after_bytes=0),
        Fault(route="get_file", no_last_modified=True, cut_after_bytes=0),
    )
    with pytest.raises(Unavailable, match=r"read file: the body broke off after 0 of \d+ bytes"):
        fetch(remote, target)
    assert names(target) == []


def test_a_cancelled_download_leaves_the_old_file(volume: Volume, target: Path) -> None:
    volume.put("file", DATA)
    target.write_bytes(b"old")
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        fetch(volume, target, cancel=cancel, progress=lambda _: cancel.set())
    assert target.read_bytes() == b"old"
    cancel.set()
    with pytest.raises(Cancelled):
        fetch(volume, target, cancel=cancel)
    assert names(target) == ["file"]


def test_what_the_callers_progress_raises_ends_the_download(volume: Volume, target: Path) -> None:
    volume.put("file", DATA)

    def fail(_: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fetch(volume, target, progress=fail)
    assert names(target) == []
    assert [t.name for t in threading.enumerate() if t.name == "trainmount-download"] == []


def test_urls_that_end_while_many_threads_read_slowly_are_renewed_once_each(
    remote: FilesApiVolume, server: LocalServer, target: Path
) -> None:
    data = random.Random(6).randbytes(2 << 20)
    remote.put("file", data)
    # Two seconds and a half.
    server.inject(Fault(route="presigned_get", bandwidth_bytes_per_second=100 << 10))
    options = replace(OPTIONS, url_lifetime_seconds=2)
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    began = monotonic()
    download_file(volume, "file", target, range_bytes=32 << 10, parallelism=8)
    took_seconds = monotonic() - began
    volume.close()
    assert target.read_bytes() == data
    requests = server.statistics()["requests"]
    # Their time is told in whole seconds, so that each lives for more than one; eight threads ask
    # once for all of them.
    assert 2 <= requests["create_download_url"] <= 1 + took_seconds
    assert "get_file" not in requests


def test_a_range_is_written_to_its_place_and_nothing_around_it(
    remote: FilesApiVolume, target: Path
) -> None:
    remote.put("file", DATA)
    with target.open("w+b") as file:
        file.write(b"x" * 1000)
        file.flush()
        remote.read_to_file("file", ByteRange(100, 200), file.fileno())
        remote.read_to_file("file", ByteRange(300, 300), file.fileno())
    assert target.read_bytes() == b"x" * 100 + DATA[100:200] + b"x" * 800
