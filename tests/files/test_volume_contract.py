"""What every volume promises, run over each kind: a directory, the Files API by both ways to the
bytes, and a bucket; `conftest.py` says how to run it over a real one.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import cast

import pytest

from trainmount_files import (
    AlreadyExists,
    ByteRange,
    Cancelled,
    DirectoryNotEmpty,
    FileStat,
    InexactRange,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotFound,
    Page,
    PreconditionFailed,
    Unavailable,
    Volume,
    VolumeError,
    list_directory,
)
from trainmount_files.bucket import BucketVolume
from trainmount_files.paths import join
from trainmount_files.transfer import (
    download_file,
    iterate,
    open_reader,
    open_writer,
    upload_file,
    upload_stream,
)
from trainmount_files.volume import list_pages

ODD_NAMES = [
    "a b",
    "a+b",
    "a%20b",
    "100%",
    "a#b",
    "a?b=c",
    "[x]",
    "lit%2Fslash",
    "café",
    "cafe\u0301",
    "a&b;c=d",
    "'quoted\"",
    "back\\slash",
    "~tilde",
    "…",
]


def content(volume: Volume, path: str) -> bytes:
    found = volume.stat(path)
    buffer = bytearray(found.size_bytes)
    volume.read_into(path, ByteRange(0, found.size_bytes), buffer, version=found.version)
    return bytes(buffer)


@cache
def pattern(size_bytes: int) -> bytes:
    return bytes((number * 31 + number // 251) % 256 for number in range(size_bytes))


def store_file(volume: Volume, path: str, data: bytes, tmp_path: Path) -> FileStat:
    local = tmp_path / "source"
    local.write_bytes(data)
    with local.open("rb") as source:
        return volume.upload(path, source, len(data))


def blob(size_bytes: int) -> bytes:
    """As `pattern`, but quick."""
    block = pattern(65_521)
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def several_parts(volume: Volume) -> int:
    """A size that every kind moves in several steps."""
    part_bytes = volume.capabilities.part_bytes
    if part_bytes < 1 << 20 or isinstance(volume, BucketVolume):
        return 6 * part_bytes + 1
    return (21 << 20) + 1


def names_of(volume: Volume) -> list[str]:
    """The odd names that the volume can keep; it refuses others."""
    if volume.url.startswith("az:"):
        return [name for name in ODD_NAMES if "\\" not in name]
    return ODD_NAMES


def make_empty_files(volume: Volume, tmp_path: Path, directory: str, names: list[str]) -> None:
    """Many at once; where the store is a directory of this machine, straight into it."""
    for root in (tmp_path / "served" / "main" / "default" / "data", tmp_path / "plain"):
        if root.exists():
            for name in names:
                (root / directory / name).touch()
            return
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda name: volume.put(join(directory, name), b""), names):
            pass


def names(volume: Volume, path: str = "") -> list[str]:
    return sorted(entry.name for entry in list_directory(volume, path))


def test_a_file_that_was_put_can_be_read_listed_and_found(volume: Volume) -> None:
    put = volume.put("a/b/file", b"0123456789")
    assert put.size_bytes == 10
    assert put.path == "a/b/file"
    assert put.name == "file"
    assert not put.is_directory
    assert put.mtime_ns > 0
    assert volume.stat("a/b/file") == put
    (listed,) = list_directory(volume, "a/b")
    assert (listed.path, listed.size_bytes) == ("a/b/file", 10)
    assert listed.version == put.version
    assert volume.stat("a/b").is_directory
    assert content(volume, "a/b/file") == b"0123456789"


@pytest.mark.parametrize(("start", "end"), [(0, 1), (3, 7), (9, 10), (0, 10)])
def test_exactly_the_range_is_read(volume: Volume, start: int, end: int) -> None:
    put = volume.put("file", b"0123456789")
    buffer = bytearray(b"#" * 12)
    volume.read_into("file", ByteRange(start, end), buffer, version=put.version)
    assert bytes(buffer) == b"0123456789"[start:end] + b"#" * (12 - (end - start))


def test_an_empty_range_and_an_empty_file_are_read_without_error(volume: Volume) -> None:
    empty = volume.put("empty", b"")
    assert empty.size_bytes == 0
    volume.read_into("empty", ByteRange(0, 0), bytearray(0), version=empty.version)
    volume.put("file", b"123")
    volume.read_into("file", ByteRange(3, 3), bytearray(0))


@pytest.mark.parametrize(("start", "end"), [(5, 11), (10, 11), (100, 200)])
def test_a_range_past_the_end_is_refused(volume: Volume, start: int, end: int) -> None:
    put = volume.put("file", b"0123456789")
    for version in (None, put.version):
        with pytest.raises(InexactRange):
            volume.read_into("file", ByteRange(start, end), bytearray(200), version=version)


def test_a_buffer_that_is_too_short_is_the_callers_mistake(volume: Volume) -> None:
    volume.put("file", b"0123456789")
    with pytest.raises(ValueError, match="shorter"):
        volume.read_into("file", ByteRange(0, 10), bytearray(9))


def test_bytes_of_another_version_are_never_read(volume: Volume) -> None:
    old = volume.put("file", b"0123456789")
    volume.put("file", b"01234567890")
    with pytest.raises(PreconditionFailed):
        volume.read_into("file", ByteRange(0, 10), bytearray(10), version=old.version)


def test_what_is_missing_is_not_found(volume: Volume) -> None:
    for path in ("missing", "missing/deeper"):
        with pytest.raises(NotFound, match="missing"):
            volume.stat(path)
        with pytest.raises(NotFound):
            volume.list_page(path)
        with pytest.raises(NotFound):
            volume.read_into(path, ByteRange(0, 1), bytearray(1))
        with pytest.raises(NotFound):
            volume.delete(path)
        with pytest.raises(NotFound):
            volume.remove_directory(path)
        with pytest.raises(NotFound):
            volume.rename(path, "other")
    assert names(volume) == []


def test_a_file_below_a_file_is_refused_and_leaves_it_as_it_was(volume: Volume) -> None:
    volume.put("file", b"1")
    with pytest.raises(NotFound):
        volume.stat("file/below")
    with pytest.raises(VolumeError):
        volume.put("file/below", b"2")
    with pytest.raises(VolumeError):
        volume.make_directory("file/below")
    assert content(volume, "file") == b"1"


def test_a_file_is_no_directory(volume: Volume) -> None:
    volume.put("file", b"1")
    with pytest.raises(NotADirectory):
        volume.list_page("file")
    with pytest.raises(NotADirectory):
        volume.remove_directory("file")
    with pytest.raises(AlreadyExists):
        volume.make_directory("file")
    assert content(volume, "file") == b"1"


def test_a_directory_is_no_file(volume: Volume) -> None:
    volume.make_directory("directory")
    with pytest.raises(IsADirectory):
        volume.put("directory", b"1")
    with pytest.raises(AlreadyExists):
        volume.put("directory", b"1", overwrite=False)
    with pytest.raises(IsADirectory):
        volume.delete("directory")
    with pytest.raises(IsADirectory):
        volume.rename("directory", "other")
    for call in (
        lambda: volume.put("", b""),
        lambda: volume.delete(""),
        lambda: volume.read_into("", ByteRange(0, 0), bytearray()),
    ):
        with pytest.raises(IsADirectory):
            call()
    assert names(volume) == ["directory"]


def test_the_root_is_a_directory(volume: Volume) -> None:
    assert volume.stat("").is_directory
    assert names(volume) == []
    with pytest.raises(InvalidRequest):
        volume.remove_directory("")


def test_an_exclusive_put_loses_to_what_is_there(volume: Volume) -> None:
    volume.put("file", b"old", overwrite=False)
    with pytest.raises(AlreadyExists):
        volume.put("file", b"new", overwrite=False)
    assert content(volume, "file") == b"old"
    volume.put("file", b"new")
    assert content(volume, "file") == b"new"


@pytest.mark.parametrize("size_bytes", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_an_upload_of_any_size_is_the_file(volume: Volume, tmp_path: Path, size_bytes: int) -> None:
    data = pattern(size_bytes)
    assert store_file(volume, "d/file", data, tmp_path).size_bytes == size_bytes
    assert content(volume, "d/file") == data
    assert names(volume, "d") == ["file"]


def test_an_upload_takes_the_size_it_was_told(volume: Volume, tmp_path: Path) -> None:
    local = tmp_path / "grown"
    local.write_bytes(pattern(150_000))
    with local.open("rb") as source:
        source.seek(77)
        volume.upload("file", source, 100_000)
    assert content(volume, "file") == pattern(100_000)


@pytest.mark.parametrize("size_bytes", [100, 100_000])
def test_a_source_that_is_too_short_leaves_nothing(
    volume: Volume, tmp_path: Path, size_bytes: int
) -> None:
    local = tmp_path / "short"
    local.write_bytes(pattern(size_bytes))
    with local.open("rb") as source, pytest.raises(InvalidRequest, match=str(size_bytes + 1)):
        volume.upload("file", source, size_bytes + 1)
    assert names(volume) == []


@pytest.mark.parametrize("size_bytes", [100, 200_000])
def test_a_cancelled_upload_leaves_the_old_file(
    volume: Volume, tmp_path: Path, size_bytes: int
) -> None:
    volume.put("file", b"old")
    local = tmp_path / "local"
    local.write_bytes(pattern(size_bytes))
    cancel = threading.Event()
    cancel.set()
    with local.open("rb") as source, pytest.raises(Cancelled):
        volume.upload("file", source, size_bytes, cancel=cancel)
    assert content(volume, "file") == b"old"


def test_a_cancelled_read_raises(volume: Volume) -> None:
    volume.put("file", b"0123456789")
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        volume.read_into("file", ByteRange(0, 10), bytearray(10), cancel=cancel)


@pytest.mark.parametrize("size_bytes", [100, 200_000])
def test_an_exclusive_upload_loses_to_what_is_there(
    volume: Volume, tmp_path: Path, size_bytes: int
) -> None:
    volume.put("file", b"old")
    local = tmp_path / "local"
    local.write_bytes(pattern(size_bytes))
    with local.open("rb") as source, pytest.raises(AlreadyExists):
        volume.upload("file", source, size_bytes, overwrite=False)
    assert content(volume, "file") == b"old"


def test_parts_in_any_order_become_one_file_at_complete(volume: Volume) -> None:
    upload = volume.start_upload("d/file")
    upload.put_part(3, b"33")
    upload.put_part(1, bytearray(b"111"))
    upload.put_part(2, memoryview(b"wrong"))
    with pytest.raises(NotFound):
        volume.stat("d/file")
    upload.put_part(2, b"2222")
    assert upload.complete().size_bytes == 9
    upload.abort()
    assert content(volume, "d/file") == b"111222233"


def test_parts_from_many_threads_become_one_file(volume: Volume) -> None:
    upload = volume.start_upload("file")
    pieces = [bytes([number]) * (1000 + number) for number in range(16)]
    threads = [
        threading.Thread(target=upload.put_part, args=(number + 1, piece))
        for number, piece in enumerate(pieces)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    upload.complete()
    assert content(volume, "file") == b"".join(pieces)


def test_an_upload_without_parts_is_an_empty_file(volume: Volume) -> None:
    assert volume.start_upload("file").complete().size_bytes == 0
    assert content(volume, "file") == b""


def test_an_aborted_upload_leaves_the_old_file(volume: Volume) -> None:
    volume.put("file", b"old")
    upload = volume.start_upload("file")
    upload.put_part(1, b"new")
    upload.abort()
    upload.abort()
    assert content(volume, "file") == b"old"
    with pytest.raises(VolumeError):
        upload.put_part(2, b"x")
    with pytest.raises(VolumeError):
        upload.complete()
    assert content(volume, "file") == b"old"


def test_an_exclusive_upload_loses_the_race_at_complete(volume: Volume) -> None:
    upload = volume.start_upload("file", overwrite=False)
    upload.put_part(1, b"late")
    volume.put("file", b"early")
    with pytest.raises(AlreadyExists):
        upload.complete()
    upload.abort()
    assert content(volume, "file") == b"early"


def test_a_file_that_was_deleted_is_gone(volume: Volume) -> None:
    volume.put("d/file", b"1")
    volume.put("d/other", b"2")
    volume.delete("d/file")
    with pytest.raises(NotFound):
        volume.stat("d/file")
    assert names(volume, "d") == ["other"]


def test_a_directory_that_was_made_stays_without_its_files(volume: Volume) -> None:
    volume.make_directory("d")
    volume.put("d/file", b"1")
    volume.delete("d/file")
    assert volume.stat("d").is_directory
    assert names(volume, "d") == []
    assert names(volume) == ["d"]


def test_a_directory_that_came_with_a_file_stays_as_the_volume_says(volume: Volume) -> None:
    volume.put("d/file", b"1")
    volume.delete("d/file")
    if volume.capabilities.keeps_directories:
        assert names(volume, "d") == []
    else:
        with pytest.raises(NotFound):
            volume.stat("d")
        with pytest.raises(NotFound):
            volume.list_page("d")


@pytest.mark.parametrize("size_bytes", [0, 10, 200_000])
def test_a_rename_moves_a_file_over_another(
    volume: Volume, tmp_path: Path, size_bytes: int
) -> None:
    data = pattern(size_bytes)
    store_file(volume, "old", data, tmp_path)
    volume.put("d/new", b"replaced")
    assert volume.rename("old", "d/new").size_bytes == size_bytes
    assert content(volume, "d/new") == data
    assert names(volume) == ["d"]
    assert volume.rename("d/new", "fresh/new").path == "fresh/new"
    assert content(volume, "fresh/new") == data
    volume.rename("fresh/new", "fresh/new")
    assert content(volume, "fresh/new") == data


def test_a_rename_over_a_directory_is_refused(volume: Volume) -> None:
    volume.put("file", b"1")
    volume.make_directory("directory")
    with pytest.raises(IsADirectory):
        volume.rename("file", "directory")
    assert content(volume, "file") == b"1"


def test_directories_are_made_with_parents_and_removed_when_empty(volume: Volume) -> None:
    volume.make_directory("a/b/c")
    volume.make_directory("a/b/c")
    assert volume.stat("a/b/c").is_directory
    assert names(volume, "a/b/c") == []
    with pytest.raises(DirectoryNotEmpty):
        volume.remove_directory("a/b")
    volume.remove_directory("a/b/c")
    volume.remove_directory("a/b")
    assert names(volume, "a") == []


@pytest.mark.parametrize("directory", ["", "a/b"])
def test_a_directory_of_more_than_a_page_is_listed_whole(
    volume: Volume, tmp_path: Path, directory: str
) -> None:
    pages = list_pages(volume, directory)
    if directory:
        volume.make_directory(directory)
    count = volume._options.page_entries + 150 if isinstance(volume, BucketVolume) else 1100
    expected = [f"{number:05}" for number in range(count)]
    make_empty_files(volume, tmp_path, directory, expected)
    found = [[entry.name for entry in page.entries] for page in pages]
    assert sorted(name for page in found for name in page) == expected
    assert len(found) >= 2
    assert max(len(page) for page in found) <= 1000


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_odd_name_is_kept_byte_for_byte(volume: Volume, tmp_path: Path, name: str) -> None:
    path = f"{name}/{name}"
    if name not in names_of(volume):
        with pytest.raises(InvalidRequest):
            volume.put(path, b"1")
        return
    volume.put(path, name.encode())
    assert volume.stat(path).name == name
    assert [entry.name for entry in list_directory(volume, name)] == [name]
    assert names(volume) == [name]
    assert content(volume, path) == name.encode()
    volume.rename(path, f"{name}/copy")
    volume.make_directory(path)
    volume.remove_directory(path)
    store_file(volume, path, pattern(70_000), tmp_path)
    assert content(volume, path) == pattern(70_000)
    volume.delete(path)
    assert names(volume, name) == ["copy"]


def test_odd_names_side_by_side_are_as_many_files(volume: Volume) -> None:
    odd = names_of(volume)
    for name in odd:
        volume.put(name, name.encode())
    assert names(volume) == sorted(odd)
    assert [content(volume, name) for name in odd] == [name.encode() for name in odd]


@pytest.mark.parametrize("path", ["..", "a/../b", "/abs", "a//b", ".", "a/", "a\0b"])
def test_a_path_that_could_leave_the_volume_is_refused(volume: Volume, path: str) -> None:
    for call in (
        lambda: volume.stat(path),
        lambda: volume.list_page(path),
        lambda: volume.put(path, b""),
        lambda: volume.start_upload(path),
        lambda: volume.delete(path),
        lambda: volume.rename("x", path),
        lambda: volume.make_directory(path),
        lambda: volume.remove_directory(path),
    ):
        with pytest.raises(InvalidRequest):
            call()


def test_a_copy_by_pickle_while_spawning_is_the_same_volume(volume: Volume) -> None:
    assert pickle.loads(pickle.dumps(volume)).url == volume.url


def test_calls_after_close_raise(volume: Volume) -> None:
    volume.put("file", b"1")
    volume.close()
    with pytest.raises(ValueError, match="closed"):
        volume.stat("file")


@pytest.mark.parametrize("size_bytes", [0, 10, None])
def test_progress_of_an_upload_sums_to_the_size(
    volume: Volume, tmp_path: Path, size_bytes: int | None
) -> None:
    size = several_parts(volume) if size_bytes is None else size_bytes
    local = tmp_path / "local"
    local.write_bytes(blob(size))
    moved: list[int] = []
    with local.open("rb") as source:
        volume.upload("file", source, size, progress=moved.append)
    assert sum(moved) == size
    assert content(volume, "file") == blob(size)


def test_an_upload_that_is_cancelled_under_way_leaves_the_old_file(
    volume: Volume, tmp_path: Path
) -> None:
    volume.put("file", b"old")
    size = several_parts(volume)
    local = tmp_path / "local"
    local.write_bytes(blob(size))
    cancel = threading.Event()
    with local.open("rb") as source, pytest.raises(Cancelled):
        volume.upload("file", source, size, cancel=cancel, progress=lambda _: cancel.set())
    assert content(volume, "file") == b"old"
    assert names(volume) == ["file"]


def test_an_upload_whose_progress_raises_leaves_the_old_file(
    volume: Volume, tmp_path: Path
) -> None:
    volume.put("file", b"old")
    size = several_parts(volume)
    local = tmp_path / "local"
    local.write_bytes(blob(size))

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with local.open("rb") as source, pytest.raises(KeyboardInterrupt):
        volume.upload("file", source, size, progress=stop)
    assert content(volume, "file") == b"old"


def test_an_exclusive_upload_of_several_parts_is_the_only_file(
    volume: Volume, tmp_path: Path
) -> None:
    size = several_parts(volume)
    local = tmp_path / "local"
    local.write_bytes(blob(size))
    with local.open("rb") as source:
        assert volume.upload("d/file", source, size, overwrite=False).size_bytes == size
        with pytest.raises(AlreadyExists):
            volume.upload("d/file", source, size, overwrite=False)
    assert content(volume, "d/file") == blob(size)
    assert names(volume) == ["d"]
    assert names(volume, "d") == ["file"]


def test_of_many_exclusive_puts_one_wins(volume: Volume) -> None:
    won: list[bytes] = []

    def put(number: int) -> None:
        try:
            volume.put("file", bytes([number]) * 100, overwrite=False)
        except AlreadyExists:
            return
        won.append(bytes([number]) * 100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(16)))
    assert won == [content(volume, "file")]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_size_around_whole_parts_is_the_file(
    volume: Volume, tmp_path: Path, parts: int, more: int
) -> None:
    part_bytes = min(volume.capabilities.part_bytes, 5 << 20)
    data = blob(parts * part_bytes + more)
    local = tmp_path / "local"
    local.write_bytes(data)
    assert upload_file(volume, local, "uploaded").size_bytes == len(data)
    with open_writer(volume, "written", part_bytes=part_bytes) as writer:
        for start in range(0, len(data), 100_003):
            writer.write(data[start : start + 100_003])
    for path in ("uploaded", "written"):
        download_file(volume, path, tmp_path / path, range_bytes=part_bytes)
        assert (tmp_path / path).read_bytes() == data


def test_a_stream_without_bytes_is_an_empty_file(volume: Volume, tmp_path: Path) -> None:
    assert upload_stream(volume, "empty", io.BytesIO(b"")).size_bytes == 0
    download_file(volume, "empty", tmp_path / "empty")
    assert (tmp_path / "empty").read_bytes() == b""
    assert list(iterate(volume, "empty")) == []


def test_a_writer_that_is_left_by_an_exception_leaves_the_old_file(volume: Volume) -> None:
    volume.put("file", b"old")

    def write_half() -> None:
        with open_writer(volume, "file") as writer:
            writer.write(blob(several_parts(volume)))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert content(volume, "file") == b"old"
    assert names(volume) == ["file"]


def test_a_file_is_read_as_a_stream_and_anywhere(volume: Volume) -> None:
    data = blob(300_000)
    volume.put("file", data)
    assert b"".join(iterate(volume, "file", block_bytes=70_001)) == data
    with open_reader(volume, "file") as reader:
        reader.seek(123_456)
        assert reader.read(1000) == data[123_456:124_456]
        reader.seek(-5, os.SEEK_END)
        assert reader.read() == data[-5:]


def test_threads_do_not_disturb_each_other(volume: Volume) -> None:
    def run(number: int) -> bool:
        path, data = f"d{number % 3}/file{number}", blob(30_000 + number)
        put = volume.put(path, data)
        buffer = bytearray(len(data))
        volume.read_into(path, ByteRange(0, len(data)), buffer, version=put.version)
        listed = path in [entry.path for entry in list_directory(volume, f"d{number % 3}")]
        if number % 2:
            volume.delete(path)
        return bytes(buffer) == data and listed

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(run, range(24)))
    left = [entry.path for n in range(3) for entry in list_directory(volume, f"d{n}")]
    assert sorted(left) == sorted(f"d{n % 3}/file{n}" for n in range(0, 24, 2))


def test_nothing_is_refused_where_all_names_can_be_paths(volume: Volume) -> None:
    volume.put("d/a b", b"1")
    volume.make_directory("d/e")
    assert [page.refused for page in list_pages(volume, "d")] == [()]


def test_a_page_token_that_comes_again_is_an_error() -> None:
    class Endless:
        def list_page(self, path: str, page_token: str | None = None) -> Page:
            return Page((), "again")

    with pytest.raises(Unavailable, match="repeated a page token"):
        list(list_directory(cast("Volume", Endless()), "d"))
