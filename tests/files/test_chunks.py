"""Files larger than an object may be, over a directory and over a Files API that takes no parts."""

from __future__ import annotations

import io
import json
import pickle
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.files.conftest import OPTIONS, ROOT, TOKEN

from trainmount_files import (
    AlreadyExists,
    ByteRange,
    Cancelled,
    FileStat,
    InexactRange,
    InvalidRequest,
    IsADirectory,
    LocalError,
    NotADirectory,
    NotFound,
    PreconditionFailed,
    TooLarge,
    Unavailable,
    Unsupported,
    Volume,
    VolumeError,
    list_directory,
    open_volume,
)
from trainmount_files.chunks import ChunkedVolume
from trainmount_files.chunks import manifest as manifests
from trainmount_files.chunks.manifest import Manifest
from trainmount_files.directory import DirectoryVolume
from trainmount_files.files_api import Credentials, FilesApiVolume
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.transfer import download_file, open_writer, upload_stream

LIMIT = 4096
CHUNK = 1500


@lru_cache(maxsize=100)
def pattern(size_bytes: int, seed: int = 0) -> bytes:
    return bytes((number * 31 + number // 251 + seed) % 256 for number in range(size_bytes))


def content(volume: Volume, path: str) -> bytes:
    found = volume.stat(path)
    buffer = bytearray(found.size_bytes)
    volume.read_into(path, ByteRange(0, found.size_bytes), buffer, version=found.version)
    return bytes(buffer)


def store(volume: Volume, path: str, data: bytes, tmp_path: Path, **options: Any) -> FileStat:
    local = tmp_path / "source"
    local.write_bytes(data)
    with local.open("rb") as source:
        return volume.upload(path, source, len(data), **options)


def names(volume: Volume, path: str = "") -> list[str]:
    return sorted(entry.name for entry in list_directory(volume, path))


@pytest.fixture
def plain(tmp_path: Path) -> DirectoryVolume:
    """What is stored, without chunks being one file."""
    (tmp_path / "plain").mkdir()
    return DirectoryVolume(tmp_path / "plain")


@pytest.fixture
def chunked(plain: DirectoryVolume) -> ChunkedVolume:
    return ChunkedVolume(plain, max_object_bytes=LIMIT, chunk_bytes=CHUNK)


class Failing:
    """A volume whose calls fail, on purpose, before or after they are carried out."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self.calls: list[str] = []
        self.fail_at: int | None = None
        """Number of the changing call that fails, from 0."""
        self.after = False
        """Whether it is carried out first."""
        self.error: type[VolumeError] = Unavailable
        self.hook: Any = None
        """Called before each call: its name and path."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._volume, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            if self.hook is not None:
                self.hook(name, arguments[0] if arguments else "")
            if name not in ("put", "upload", "delete", "rename", "remove_directory"):
                return value(*arguments, **options)
            number = len(self.calls)
            self.calls.append(f"{name} {arguments[0]}")
            fails = number == self.fail_at
            if fails and not self.after:
                raise self.error(name, arguments[0], "on purpose")
            result = value(*arguments, **options)
            if fails:
                raise self.error(name, arguments[0], "on purpose")
            return result

        return call


def test_a_file_is_one_object_up_to_the_limit_and_chunks_above(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    store(chunked, "small", pattern(LIMIT), tmp_path)
    found = store(chunked, "big", pattern(LIMIT + 1), tmp_path)
    assert (found.path, found.size_bytes, found.is_directory) == ("big", LIMIT + 1, False)
    assert chunked.stat("big") == found
    assert found.mtime_ns == plain.stat("big.chunks/trainmount-chunks.json").mtime_ns
    assert names(plain) == ["big.chunks", "small"]
    generation = next(n for n in names(plain, "big.chunks") if n != "trainmount-chunks.json")
    assert names(plain, f"big.chunks/{generation}") == ["00001", "00002", "00003"]
    assert content(plain, f"big.chunks/{generation}/00003") == pattern(LIMIT + 1)[2 * CHUNK :]
    assert content(chunked, "small") == pattern(LIMIT)
    assert content(chunked, "big") == pattern(LIMIT + 1)
    assert [(e.name, e.size_bytes, e.version) for e in list_directory(chunked, "")] == [
        ("big", LIMIT + 1, found.version),
        ("small", LIMIT, chunked.stat("small").version),
    ]


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, 1), (0, 1500), (1499, 1501), (1500, 3000), (2999, 4500), (0, 5000), (4999, 5000)],
)
def test_a_range_over_chunks_is_exact(
    chunked: ChunkedVolume, tmp_path: Path, start: int, end: int
) -> None:
    found = store(chunked, "d/big", pattern(5000), tmp_path)
    for version in (found.version, None):
        buffer = bytearray(b"#" * 5002)
        chunked.read_into("d/big", ByteRange(start, end), buffer, version=version)
        assert bytes(buffer) == pattern(5000)[start:end] + b"#" * (5002 - (end - start))


def test_a_range_past_the_end_and_an_empty_one(chunked: ChunkedVolume, tmp_path: Path) -> None:
    found = store(chunked, "big", pattern(5000), tmp_path)
    for version in (found.version, None):
        with pytest.raises(InexactRange):
            chunked.read_into("big", ByteRange(4999, 5001), bytearray(2), version=version)
        chunked.read_into("big", ByteRange(5000, 5000), bytearray(), version=version)
    with pytest.raises(ValueError, match="shorter"):
        chunked.read_into("big", ByteRange(0, 2), bytearray(1))


def test_a_new_generation_under_a_reader_is_told_and_never_mixed(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    old = store(chunked, "big", pattern(5000), tmp_path)
    reader = pickle.loads(pickle.dumps(chunked))
    buffer = bytearray(100)
    reader.read_into("big", ByteRange(0, 100), buffer, version=old.version)
    new = store(chunked, "big", pattern(5000, 7), tmp_path)
    assert new.version != old.version
    for volume in (chunked, reader, pickle.loads(pickle.dumps(chunked))):
        with pytest.raises(PreconditionFailed):
            volume.read_into("big", ByteRange(2000, 2100), buffer, version=old.version)
        assert content(volume, "big") == pattern(5000, 7)
    # The old generation is gone from the store.
    assert len(names(plain, "big.chunks")) == 2


def test_a_generation_that_is_replaced_in_the_middle_of_a_range_is_told(
    plain: DirectoryVolume, tmp_path: Path
) -> None:
    failing = Failing(plain)
    chunked = ChunkedVolume(failing, max_object_bytes=LIMIT, chunk_bytes=CHUNK)
    writer = ChunkedVolume(plain, max_object_bytes=LIMIT, chunk_bytes=CHUNK)
    old = store(writer, "big", pattern(5000), tmp_path)

    def replace_before_the_second_part(name: str, path: str) -> None:
        if name == "read_into" and path.endswith("00002"):
            failing.hook = None
            store(writer, "big", pattern(5000, 9), tmp_path)

    for version in (old.version, None):
        failing.hook = replace_before_the_second_part
        with pytest.raises(PreconditionFailed, match="read big: the file has changed"):
            chunked.read_into("big", ByteRange(0, 5000), bytearray(5000), version=version)
        assert content(chunked, "big") == pattern(5000, 9)
        store(writer, "big", pattern(5000), tmp_path)


def test_a_plain_object_replaces_chunks_and_chunks_a_plain_object(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    versions = []
    for size in (10, 5000, 20, 6000, LIMIT):
        found = store(chunked, "file", pattern(size), tmp_path)
        versions.append(found.version)
        assert chunked.stat("file").size_bytes == size
        assert names(chunked) == ["file"]
        assert content(chunked, "file") == pattern(size)
        assert names(plain) == (["file.chunks"] if size > LIMIT else ["file"])
        for version in versions[:-1]:
            with pytest.raises(PreconditionFailed):
                chunked.read_into("file", ByteRange(0, 10), bytearray(10), version=version)


def test_a_plain_object_beside_chunks_is_the_file_and_nothing_comes_to_light(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    store(chunked, "file", pattern(5000), tmp_path)
    # By a program that knows nothing of chunks.
    plain.put("file", b"plain")
    assert content(chunked, "file") == b"plain"
    assert [(e.name, e.size_bytes) for e in list_directory(chunked, "")] == [("file", 5)]
    chunked.delete("file")
    assert names(plain) == []
    store(chunked, "file", pattern(5000), tmp_path)
    plain.put("file", b"plain")
    chunked.rename("file", "moved")
    assert names(plain) == ["moved"]


def test_a_delete_leaves_nothing(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    store(chunked, "d/big", pattern(9000), tmp_path)
    chunked.delete("d/big")
    assert names(plain, "d") == []
    with pytest.raises(NotFound):
        chunked.delete("d/big")
    with pytest.raises(NotFound):
        chunked.stat("d/big")
    with pytest.raises(NotFound):
        chunked.read_into("d/big", ByteRange(0, 1), bytearray(1))


def test_a_rename_moves_chunks_over_whatever_file_is_there(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    for replaced in (0, 10, 5000):
        store(chunked, "a/big", pattern(9000, 3), tmp_path)
        if replaced:
            store(chunked, "b/new", pattern(replaced), tmp_path)
        found = chunked.rename("a/big", "b/new")
        assert (found.path, found.size_bytes) == ("b/new", 9000)
        assert content(chunked, "b/new") == pattern(9000, 3)
        assert names(plain, "a") == []
        assert names(plain, "b") == ["new.chunks"]
        assert chunked.rename("b/new", "b/new").size_bytes == 9000
    store(chunked, "small", b"1", tmp_path)
    chunked.rename("small", "b/new")
    assert names(plain, "b") == ["new"]
    assert names(chunked) == ["a", "b"]
    store(chunked, "big", pattern(5000), tmp_path)
    with pytest.raises(IsADirectory):
        chunked.rename("big", "a")
    assert names(chunked) == ["a", "b", "big"]


def test_a_chunked_file_is_no_directory_and_a_directory_no_file(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    store(chunked, "big", pattern(5000), tmp_path)
    chunked.make_directory("d")
    with pytest.raises(NotADirectory):
        chunked.list_page("big")
    with pytest.raises(NotADirectory):
        chunked.remove_directory("big")
    with pytest.raises(AlreadyExists):
        chunked.make_directory("big")
    with pytest.raises(IsADirectory):
        store(chunked, "d", pattern(5000), tmp_path)
    with pytest.raises(IsADirectory):
        chunked.start_upload("d")
    with pytest.raises(IsADirectory):
        chunked.delete("d")
    for call in (lambda: chunked.put("", pattern(5000)), lambda: chunked.start_upload("")):
        with pytest.raises(IsADirectory):
            call()
    assert names(plain) == ["big.chunks", "d"]


def test_an_exclusive_write_loses_to_either_kind(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    store(chunked, "big", pattern(5000), tmp_path, overwrite=False)
    store(chunked, "small", pattern(10), tmp_path, overwrite=False)
    for path, size in (("big", 5000), ("small", 10)):
        for new in (20, 6000):
            with pytest.raises(AlreadyExists):
                store(chunked, path, pattern(new, 1), tmp_path, overwrite=False)
            with pytest.raises(AlreadyExists):
                chunked.put(path, pattern(new, 1), overwrite=False)
        with pytest.raises(AlreadyExists):
            chunked.start_upload(path, overwrite=False)
        assert content(chunked, path) == pattern(size)
    assert names(plain) == ["big.chunks", "small"]
    assert len(names(plain, "big.chunks")) == 2


@pytest.mark.parametrize("early", [10, 5000])
def test_an_exclusive_stream_loses_the_race_at_complete(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path, early: int
) -> None:
    for late in (10, 6000):
        upload = chunked.start_upload(f"file{late}", overwrite=False)
        for number, start in enumerate(range(0, late, 1000), start=1):
            upload.put_part(number, pattern(late)[start : start + 1000])
        store(chunked, f"file{late}", pattern(early, 5), tmp_path)
        with pytest.raises(AlreadyExists):
            upload.complete()
        upload.abort()
        assert content(chunked, f"file{late}") == pattern(early, 5)
        held = names(plain, f"file{late}.chunks") if early > LIMIT else []
        assert len(held) == (2 if early > LIMIT else 0)


def test_a_stream_stays_one_object_as_long_as_it_can(
    chunked: ChunkedVolume, plain: DirectoryVolume
) -> None:
    for size in (0, 1, LIMIT - 1, LIMIT, LIMIT + 1, 5 * LIMIT):
        with open_writer(chunked, f"s{size}", part_bytes=1000) as writer:
            for start in range(0, size, 333):
                writer.write(pattern(size)[start : start + 333])
        assert writer.stored.size_bytes == size
        assert content(chunked, f"s{size}") == pattern(size)
        assert f"s{size}{'.chunks' if size > LIMIT else ''}" in names(plain)
    stored = upload_stream(chunked, "stream", io.BytesIO(pattern(3 * LIMIT)))
    assert content(chunked, "stream") == pattern(3 * LIMIT)
    assert stored.version == chunked.stat("stream").version


def test_parts_in_any_order_with_repeats_are_one_file(
    chunked: ChunkedVolume, plain: DirectoryVolume
) -> None:
    for path, length in (("small", 500), ("big", 1500)):
        upload = chunked.start_upload(path)
        for number in (4, 1, 3, 2, 7):
            upload.put_part(number, pattern(length, number))
            upload.put_part(number, b"!" + pattern(length, number * 2))
        with pytest.raises(NotFound):
            chunked.stat(path)
        assert names(chunked) == (["small"] if path == "big" else [])
        assert upload.complete().size_bytes == 5 * (length + 1)
        expected = b"".join(b"!" + pattern(length, number * 2) for number in (1, 2, 3, 4, 7))
        assert content(chunked, path) == expected
        with pytest.raises(Unsupported):
            upload.put_part(1, b"")
        with pytest.raises(Unsupported):
            upload.complete()
        upload.abort()
    assert names(plain) == ["big.chunks", "small"]


def test_parts_from_many_threads_become_one_file(chunked: ChunkedVolume) -> None:
    upload = chunked.start_upload("big")
    pieces = [pattern(400 + number, number) for number in range(32)]
    threads = [
        threading.Thread(target=upload.put_part, args=(number, piece))
        for number, piece in enumerate(pieces, start=1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    upload.complete()
    assert content(chunked, "big") == b"".join(pieces)


def test_a_stream_that_is_given_up_leaves_the_old_file_and_nothing_else(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    store(chunked, "old", pattern(5000), tmp_path)
    before = names(plain, "old.chunks")
    for path in ("old", "new"):
        upload = chunked.start_upload(path)
        for number in range(1, 9):
            upload.put_part(number, pattern(1000))
        upload.abort()
        upload.abort()
        with pytest.raises(Unsupported):
            upload.complete()
    assert content(chunked, "old") == pattern(5000)
    assert names(plain) == ["old.chunks"]
    assert names(plain, "old.chunks") == before


def test_limits_are_named(chunked: ChunkedVolume, tmp_path: Path) -> None:
    assert chunked.capabilities.max_put_bytes is None
    assert chunked.capabilities.max_part_bytes == LIMIT
    upload = chunked.start_upload("big")
    with pytest.raises(TooLarge, match="part 10001 is not among the 1 to 10000 parts"):
        upload.put_part(10_001, b"1")
    with pytest.raises(TooLarge, match="a part may have 4096 bytes, this one has 4097"):
        upload.put_part(1, bytes(4097))
    upload.abort()
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(LIMIT * 10_000 + 1)
    with sparse.open("rb") as source, pytest.raises(TooLarge, match=r"40960000 .* has 40960001"):
        chunked.upload("big", source, LIMIT * 10_000 + 1)
    with pytest.raises(ValueError, match="at least 1"):
        ChunkedVolume(chunked, max_object_bytes=0)


def test_chunks_grow_where_ten_thousand_would_not_hold_the_file(plain: DirectoryVolume) -> None:
    chunked = ChunkedVolume(plain, max_object_bytes=1 << 30, chunk_bytes=1 << 20)
    assert chunked._chunk_size("upload", "x", 10_000 << 20) == 1 << 20
    assert chunked._chunk_size("upload", "x", (10_000 << 20) + 1) == (1 << 20) + 1


@pytest.mark.parametrize("size", [100, 9000])
def test_a_source_that_is_too_short_or_cancelled_leaves_nothing(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path, size: int
) -> None:
    local = tmp_path / "short"
    local.write_bytes(pattern(size))
    cancel = threading.Event()
    cancel.set()
    with local.open("rb") as source:
        with pytest.raises(InvalidRequest, match=str(size + 1)):
            chunked.upload("file", source, size + 1)
        with pytest.raises(Cancelled):
            chunked.upload("file", source, size, cancel=cancel)
    assert names(plain) == []


def test_open_volume_makes_one(tmp_path: Path, plain: DirectoryVolume) -> None:
    volume = open_volume(plain.url, chunk_above_bytes=LIMIT)
    store(volume, "big", pattern(LIMIT + 1), tmp_path)
    assert names(plain) == ["big.chunks"]
    assert content(open_volume(plain.url, chunk_above_bytes=1 << 30), "big") == pattern(LIMIT + 1)
    volume.close()
    with pytest.raises(ValueError, match="closed"):
        volume.stat("big")
    with pytest.raises(ValueError, match="at least 1"):
        open_volume(plain.url, chunk_above_bytes=0)


def test_a_range_is_read_into_its_place_of_a_local_file(
    chunked: ChunkedVolume, tmp_path: Path
) -> None:
    for path, size in (("small", 3000), ("big", 9000)):
        found = store(chunked, path, pattern(size), tmp_path)
        local = tmp_path / path
        local.write_bytes(b"#" * size)
        seen: list[int] = []
        for version in (found.version, None):
            with local.open("r+b") as file:
                chunked.read_to_file(
                    path,
                    ByteRange(1400, 2900),
                    file.fileno(),
                    version=version,
                    progress=seen.append,
                )
        expected = b"#" * 1400 + pattern(size)[1400:2900] + b"#" * (size - 2900)
        assert local.read_bytes() == expected
        assert sum(seen) == 3000
        store(chunked, path, pattern(size, 1), tmp_path)
        with local.open("r+b") as file, pytest.raises(PreconditionFailed):
            chunked.read_to_file(path, ByteRange(0, 1), file.fileno(), version=found.version)


def test_a_temporary_directory_without_room_is_told_or_done_without(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(LocalError, match="upload big: no such file or directory"):
        store(chunked, "big", pattern(5000), tmp_path)
    assert names(plain) == []
    upload = chunked.start_upload("stream")
    for number in (2, 1, 3):
        upload.put_part(number, pattern(900, number))
    upload.complete()
    assert content(chunked, "stream") == b"".join(pattern(900, number) for number in (1, 2, 3))
    assert names(plain) == ["stream.chunks"]


@pytest.mark.parametrize("error", [Unavailable, NotFound, Cancelled])
def test_an_error_is_about_the_file_and_not_about_where_its_parts_are(
    plain: DirectoryVolume, tmp_path: Path, error: type[VolumeError]
) -> None:
    failing = Failing(plain)
    chunked = ChunkedVolume(failing, max_object_bytes=LIMIT, chunk_bytes=CHUNK, parallelism=1)
    failing.fail_at, failing.error = 2, error
    with pytest.raises(error, match=r"^upload d/big: part 3: on purpose$") as raised:
        store(chunked, "d/big", pattern(5000), tmp_path)
    assert (raised.value.path, raised.value.args[1]) == ("d/big", "d/big")
    assert names(plain) == ["d"]
    assert names(plain, "d") == []


def test_progress_counts_each_byte_once(chunked: ChunkedVolume, tmp_path: Path) -> None:
    seen: list[int] = []
    store(chunked, "big", pattern(9001), tmp_path, progress=seen.append)
    assert sorted(seen) == [1, *[CHUNK] * 6]


def test_parts_of_a_write_under_way_are_not_listed_and_go_with_the_directory(
    chunked: ChunkedVolume, plain: DirectoryVolume
) -> None:
    upload = chunked.start_upload("d/big")
    for number in range(1, 9):
        upload.put_part(number, pattern(1000))
    assert names(plain, "d") == ["big.chunks"]
    assert names(chunked, "d") == []
    chunked.remove_directory("d")
    assert names(plain) == []
    upload.abort()


def test_a_directory_that_only_has_such_a_name_is_shown(
    chunked: ChunkedVolume, plain: DirectoryVolume
) -> None:
    chunked.put("data.chunks/manifest.json", b"{}")
    chunked.put("data.chunks/trainmount", b"1")
    chunked.make_directory("empty.chunks")
    chunked.make_directory(".chunks")
    assert names(chunked) == [".chunks", "data.chunks", "empty.chunks"]
    assert names(chunked, "data.chunks") == ["manifest.json", "trainmount"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not json",
        b"[]",
        b'{"format":"trainmount-chunks/2"}',
        b'{"format":"trainmount-chunks/1","generation":"../x","size_bytes":1,"parts":[[1,1]]}',
    ],
)
def test_a_damaged_manifest_is_told_hides_no_other_file_and_can_be_replaced(
    chunked: ChunkedVolume,
    plain: DirectoryVolume,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    text: bytes,
) -> None:
    store(chunked, "big", pattern(5000), tmp_path)
    chunked.put("other", b"1")
    plain.put("big.chunks/trainmount-chunks.json", text)
    with pytest.raises(Unavailable, match="is no manifest that can be understood"):
        chunked.stat("big")
    page = chunked.list_page("")
    assert [entry.name for entry in page.entries] == ["other"]
    assert page.refused == ("big.chunks",)
    store(chunked, "big", pattern(6000), tmp_path)
    assert content(chunked, "big") == pattern(6000)
    plain.put("big.chunks/trainmount-chunks.json", text)
    chunked.delete("big")
    assert names(chunked) == ["other"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


GOOD = {
    "format": "trainmount-chunks/1",
    "generation": "20260131T120000Z-0123456789abcdef",
    "size_bytes": 30,
    "parts": [[1, 10], [3, 20]],
}


@pytest.mark.parametrize(
    "change",
    [
        {"generation": "x"},
        {"generation": None},
        {"size_bytes": 31},
        {"parts": [[3, 20], [1, 10]]},
        {"parts": [[1, 10], [1, 20]]},
        {"parts": [[0, 10], [1, 20]]},
        {"parts": [[1, 10], [10_001, 20]]},
        {"parts": [[1, 30], [2, 0]]},
        {"parts": [[1, 40], [2, -10]]},
        {"parts": [[1, True], [2, 29]]},
        {"parts": [[1, 10.0], [2, 20]]},
        {"parts": [[1], [2, 30]]},
        {"parts": {"1": 30}},
        {"parts": [[n, 1] for n in range(1, 10_002)]},
        {"format": "other"},
    ],
)
def test_only_a_consistent_manifest_is_one(change: dict[str, Any]) -> None:
    parsed = Manifest.parse(json.dumps(GOOD).encode(), 7)
    assert parsed == Manifest("20260131T120000Z-0123456789abcdef", ((1, 10), (3, 20)), 7)
    assert Manifest.parse(parsed.to_json(), 7) == parsed
    assert Manifest.parse(json.dumps({**GOOD, **change}).encode(), 7) is None


def test_a_part_that_is_missing_or_cut_is_damage_and_no_bytes(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    found = store(chunked, "big", pattern(5000), tmp_path)
    generation = found.version.removeprefix("chunks-")
    plain.put(f"big.chunks/{generation}/00002", b"short")
    for version in (found.version, None):
        with pytest.raises(InexactRange, match="part 2 is missing or cut: the file is damaged"):
            chunked.read_into("big", ByteRange(0, 5000), bytearray(5000), version=version)
    with pytest.raises(InexactRange, match="part 2"):
        chunked.rename("big", "other")
    assert names(chunked) == ["big"]


def test_what_a_writer_that_died_has_left_is_collected_after_a_week(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "20200131T120000Z-0123456789abcdef"
    young = manifests.new_generation()
    for generation in (old, young):
        plain.put(f"big.chunks/{generation}/00001", b"1")
    plain.put("big.chunks/notes", b"1")
    found = store(chunked, "big", pattern(5000), tmp_path)
    current = found.version.removeprefix("chunks-")
    assert names(plain, "big.chunks") == sorted([current, young, "notes", "trainmount-chunks.json"])


def test_a_look_costs_no_read_while_the_manifest_is_the_same(
    plain: DirectoryVolume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(plain)
    chunked = ChunkedVolume(failing, max_object_bytes=LIMIT, chunk_bytes=CHUNK)
    store(chunked, "big", pattern(5000), tmp_path)
    seen: list[str] = []
    failing.hook = lambda name, path: seen.append(name)
    for _ in range(2):
        # Too young: another one of the same second could look the same.
        chunked.stat("big")
    assert seen == ["stat", "stat", "read_into"] * 2
    monkeypatch.setattr(manifests, "_SETTLED_SECONDS", -1.0)
    chunked.stat("big")
    seen.clear()
    chunked.stat("big")
    assert names(chunked) == ["big"]
    assert seen == ["stat", "stat", "list_page", "stat"]


def test_two_writers_at_once_never_make_a_mix(
    chunked: ChunkedVolume, plain: DirectoryVolume, tmp_path: Path
) -> None:
    sizes = [5000, 6000, 3000, 7000]
    whole = {pattern(size, seed) for seed, size in enumerate(sizes)}
    wrong: list[bytes] = []
    stop = threading.Event()

    def write(seed: int) -> None:
        for _ in range(5):
            with open_writer(chunked, "file", part_bytes=1000) as writer:
                writer.write(pattern(sizes[seed], seed))

    def read() -> None:
        while not stop.is_set():
            with suppress(NotFound, PreconditionFailed, Unavailable):
                found = content(chunked, "file")
                if found not in whole:
                    wrong.append(found)

    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(len(sizes))]
    reader = threading.Thread(target=read)
    reader.start()
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert wrong == []
    assert content(chunked, "file") in whole


ERRORS = st.sampled_from([Unavailable, Cancelled, NotFound, InvalidRequest])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 12_000), min_size=2, max_size=4),
    fail_at=st.integers(0, 25),
    after=st.booleans(),
    error=ERRORS,
    as_stream=st.booleans(),
)
# The directory of the chunks that a small file has replaced, at its removal.
@example(sizes=[9001, 0], fail_at=10, after=False, error=Unavailable, as_stream=False)
@example(sizes=[9001, 0], fail_at=10, after=False, error=NotFound, as_stream=False)
def test_a_write_that_fails_at_any_step_leaves_one_whole_file(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    fail_at: int,
    after: bool,
    error: type[VolumeError],
    as_stream: bool,
) -> None:
    root = tmp_path_factory.mktemp("failing")
    (root / "volume").mkdir()
    failing = Failing(DirectoryVolume(root / "volume"))
    chunked = ChunkedVolume(failing, max_object_bytes=LIMIT, chunk_bytes=CHUNK, parallelism=1)
    for seed, size in enumerate(sizes[:-1]):
        store(chunked, "file", pattern(size, seed), root)
    old, new = pattern(sizes[-2], len(sizes) - 2), pattern(sizes[-1], 99)
    failing.calls.clear()
    failing.fail_at, failing.after, failing.error = fail_at, after, error
    failed = False
    try:
        if as_stream:
            with open_writer(chunked, "file", part_bytes=1000, parallelism=1) as writer:
                writer.write(new)
        else:
            store(chunked, "file", new, root)
    except VolumeError:
        failed = True
    failing.fail_at = None
    found = content(chunked, "file")
    assert found in (old, new)
    if not failed:
        assert found == new
    assert names(chunked) == ["file"]
    chunked.delete("file")
    with pytest.raises(NotFound):
        chunked.stat("file")
    assert names(chunked) == []


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(LIMIT + 1, 30_000),
    limits=st.tuples(st.integers(500, LIMIT), st.integers(1, 5000)),
    ranges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5),
)
def test_any_range_of_any_size_in_any_chunks_is_exact(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    limits: tuple[int, int],
    ranges: list[tuple[float, float]],
) -> None:
    root = tmp_path_factory.mktemp("ranges")
    (root / "volume").mkdir()
    volume = DirectoryVolume(root / "volume")
    chunked = ChunkedVolume(volume, max_object_bytes=limits[0], chunk_bytes=max(limits[1], 100))
    data = pattern(size)
    version = store(chunked, "file", data, root).version
    for ends in ranges:
        start, end = sorted(int(each * size) for each in ends)
        buffer = bytearray(end - start)
        chunked.read_into("file", ByteRange(start, end), buffer, version=version)
        assert bytes(buffer) == data[start:end]


# Over a Files API that takes no upload in parts, as storage behind a firewall.


@pytest.fixture
def walled(server: LocalServer) -> Iterator[FilesApiVolume]:
    options = replace(OPTIONS, max_put_bytes=LIMIT, multipart_threshold_bytes=1000)
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    yield volume
    volume.close()


@pytest.mark.parametrize(("route", "status"), [("initiate_upload", 403), ("initiate_upload", 501)])
def test_a_file_above_the_limit_is_refused_with_the_way_out_where_parts_are(
    walled: FilesApiVolume,
    server: LocalServer,
    served: Path,
    tmp_path: Path,
    route: str,
    status: int,
) -> None:
    server.inject(Fault(route=route, status=status))
    with pytest.raises(TooLarge, match=rf"4096 bytes, .*HTTP {status} .*chunk_above_bytes=4096"):
        store(walled, "big", pattern(LIMIT + 1), tmp_path)
    store(walled, "small", pattern(LIMIT), tmp_path)
    assert sorted(each.name for each in served.iterdir()) == ["small"]


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(route="initiate_upload", status=403)],
        [Fault(route="initiate_upload", status=501)],
        [Fault(route="presigned_put", status=403)],
        [
            Fault(route="initiate_upload", status=403),
            Fault(route="put_file", status=503, probability=0.2),
            Fault(route="head_file", status=503, probability=0.2),
            Fault(route="get_file", cut_after_bytes=700, probability=0.2),
        ],
    ],
)
def test_a_file_above_the_limit_is_stored_read_and_replaced_where_parts_are_refused(
    walled: FilesApiVolume,
    server: LocalServer,
    served: Path,
    tmp_path: Path,
    faults: list[Fault],
) -> None:
    chunked = ChunkedVolume(walled, max_object_bytes=LIMIT, chunk_bytes=3000)
    server.inject(*faults)
    for seed, size in enumerate((20_000, 20_000, 12_345, 100, LIMIT + 1)):
        found = store(chunked, "d/big", pattern(size, seed), tmp_path)
        assert chunked.stat("d/big") == found
        assert content(chunked, "d/big") == pattern(size, seed)
        assert [(e.name, e.size_bytes) for e in list_directory(chunked, "d")] == [("big", size)]
        download_file(chunked, "d/big", tmp_path / "down", range_bytes=7000)
        assert (tmp_path / "down").read_bytes() == pattern(size, seed)
    server.inject()
    with open_writer(chunked, "d/stream", part_bytes=1000) as writer:
        writer.write(pattern(9999))
    assert content(chunked, "d/stream") == pattern(9999)
    chunked.rename("d/stream", "moved")
    assert content(chunked, "moved") == pattern(9999)
    chunked.delete("moved")
    chunked.delete("d/big")
    assert list((served / "d").iterdir()) == []
    statistics = server.statistics()
    assert (statistics["open_uploads"], statistics["staged_bytes"]) == (0, 0)


def test_what_it_costs_is_what_is_said(
    remote: FilesApiVolume, server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "_SETTLED_SECONDS", -1.0)
    chunked = ChunkedVolume(remote, max_object_bytes=LIMIT, chunk_bytes=3000)
    for name in ("big1", "big2"):
        store(chunked, name, pattern(5000), tmp_path)
    chunked.put("small", b"1")
    names(chunked)

    def cost(call: Any) -> int:
        before = sum(server.statistics()["requests"].values())
        with suppress(NotFound):
            call()
        return int(sum(server.statistics()["requests"].values())) - before

    def more(call: str, *arguments: Any) -> int:
        below = cost(lambda: getattr(remote, call)(*arguments))
        return cost(lambda: getattr(chunked, call)(*arguments)) - below

    assert more("stat", "small") == 0
    assert more("stat", "nothing") == 2
    assert more("stat", "big1") == 1
    assert more("list_page", "") == 2
    assert more("put", "small", b"2") == 2
    assert more("make_directory", "d") == 2
    assert more("delete", "nothing") == 2
