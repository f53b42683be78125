"""Files from streams of unknown length: one whole object, or the old one and an error."""

from __future__ import annotations

import gc
import io
import os
import random
import re
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN

from trainmount_files import (
    AlreadyExists,
    ByteRange,
    Cancelled,
    Capabilities,
    InvalidRequest,
    LocalError,
    NotFound,
    PermissionDenied,
    TooLarge,
    Unavailable,
    Volume,
    VolumeError,
)
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.transfer import iterate, open_writer, upload_file, upload_stream
from trainmount_files.transfer.budget import MemoryBudget, shared_budget
from trainmount_files.transfer.parts import PartSizes
from trainmount_files.volume import MIB

DATA = random.Random(9).randbytes(300_000)
PART = 32 << 10


@pytest.fixture
def hasty_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not wait for the requests that a fault holds up."""
    monkeypatch.setattr("trainmount_files.server.embedded._STOP_SECONDS", 0.05)


def content(volume: Volume, path: str = "file") -> bytes:
    return b"".join(iterate(volume, path))


def count(server: LocalServer, route: str) -> int:
    return int(server.statistics()["requests"].get(route, 0))


def assert_nothing_is_left(server: LocalServer) -> None:
    statistics = server.statistics()
    assert (statistics["open_uploads"], statistics["staged_bytes"]) == (0, 0)
    assert threads_left() == []
    assert shared_budget().taken_bytes == 0


def threads_left() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "trainmount-upload"]


@pytest.mark.parametrize("size_bytes", [0, 1, PART - 1, PART, PART + 1, 2 * PART, len(DATA)])
@pytest.mark.parametrize("step", [1000, 5 * PART])
def test_a_stream_of_any_length_becomes_one_file(
    volume: Volume, size_bytes: int, step: int
) -> None:
    arrived: list[int] = []
    with open_writer(volume, "dir/file", part_bytes=PART, progress=arrived.append) as writer:
        for start in range(0, size_bytes, step):
            piece = memoryview(DATA)[start : min(start + step, size_bytes)]
            assert writer.write(piece) == len(piece)
            assert writer.tell() == start + len(piece)
    assert content(volume, "dir/file") == DATA[:size_bytes]
    assert writer.stored == volume.stat("dir/file")
    assert sum(arrived) == size_bytes
    assert threads_left() == []
    assert shared_budget().taken_bytes == 0


@pytest.mark.parametrize(("size_bytes", "parts"), [(0, 0), (PART, 0), (2 * PART, 2), (PART + 1, 2)])
def test_there_are_as_many_parts_as_are_needed_and_no_empty_one(
    remote: FilesApiVolume, server: LocalServer, size_bytes: int, parts: int
) -> None:
    upload_stream(remote, "empty", io.BytesIO())
    with open_writer(remote, "file", part_bytes=PART) as writer:
        writer.write(DATA[:size_bytes])
    assert count(server, "presigned_put") == parts
    assert count(server, "initiate_upload") == (1 if parts else 0)
    assert count(server, "put_file") == (1 if parts else 2)
    assert remote.stat("empty").size_bytes == 0
    remote.read_into("empty", ByteRange(0, 0), bytearray())
    assert content(remote) == DATA[:size_bytes]


@pytest.mark.parametrize(
    "fault", [{"status": 503}, {"lose_reply": True}, {"cut_after_bytes": 9000}]
)
@pytest.mark.parametrize("size_bytes", [PART, 3 * PART])
def test_a_request_that_failed_carries_the_same_bytes_again(
    remote: FilesApiVolume, server: LocalServer, fault: dict[str, Any], size_bytes: int
) -> None:
    route = "put_file" if size_bytes == PART else "presigned_put"
    server.inject(Fault(route=route, skip=0 if size_bytes == PART else 1, count=2, **fault))
    reading, writing = os.pipe()

    def feed() -> None:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(DATA[:size_bytes])

    feeder = threading.Thread(target=feed)
    feeder.start()
    with (
        os.fdopen(reading, "rb", buffering=0) as pipe,
        open_writer(remote, "file", part_bytes=PART) as writer,
    ):
        while piece := pipe.read(10_000):
            writer.write(piece)
    feeder.join()
    assert content(remote) == DATA[:size_bytes]
    assert_nothing_is_left(server)


@pytest.mark.parametrize("written", [1000, 6 * PART])
def test_a_body_that_raises_leaves_the_path_as_it_was(volume: Volume, written: int) -> None:
    old = volume.put("file", b"old")

    def fill() -> None:
        with open_writer(volume, "file", part_bytes=PART) as writer:
            writer.write(DATA[:written])
            raise RuntimeError("the disk of the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        fill()
    assert volume.stat("file") == old
    assert content(volume) == b"old"
    assert threads_left() == []
    assert shared_budget().taken_bytes == 0


def test_a_store_that_never_begins_makes_write_or_close_raise(
    remote: FilesApiVolume, server: LocalServer, served: Path
) -> None:
    server.inject(Fault(route="initiate_upload", status=503))
    writer = open_writer(remote, "file", part_bytes=PART)
    with pytest.raises(Unavailable, match="HTTP 503"):
        writer.write(DATA)
    with pytest.raises(Unavailable, match="HTTP 503"):
        writer.close()
    writer.close()
    assert not (served / "file").exists()
    assert count(server, "presigned_put") == count(server, "put_file") == 0
    assert_nothing_is_left(server)


def test_a_part_that_failed_in_the_background_surfaces_at_the_next_write_and_at_close(
    remote: FilesApiVolume, server: LocalServer, served: Path
) -> None:
    server.inject(Fault(route="presigned_put", status=403, skip=1))
    writer = open_writer(remote, "file", part_bytes=PART, parallelism=2)

    def write_on() -> None:
        for _ in range(20):
            writer.write(DATA[:PART])

    # Two are under way at once, and either may be the second to arrive.
    with pytest.raises(PermissionDenied, match=r"part [123]:") as failure:
        write_on()
    sent = count(server, "presigned_put")
    with pytest.raises(PermissionDenied, match=re.escape(str(failure.value))):
        writer.write(b"more")
    with pytest.raises(PermissionDenied, match=re.escape(str(failure.value))):
        writer.close()
    assert sent <= 5
    assert count(server, "presigned_put") == sent
    assert count(server, "abort_upload") == 1
    assert not (served / "file").exists()
    assert_nothing_is_left(server)


@pytest.mark.parametrize("route", ["initiate_upload", "presigned_put"])
@pytest.mark.parametrize("status", [400, 403, 404, 501])
def test_a_stream_to_a_store_that_takes_no_parts_goes_in_one_request(
    remote: FilesApiVolume, server: LocalServer, route: str, status: int
) -> None:
    server.inject(Fault(route=route, status=status))
    arrived: list[int] = []
    with open_writer(remote, "file", part_bytes=PART, progress=arrived.append) as writer:
        writer.write(DATA)
    assert content(remote) == DATA
    assert sum(arrived) == len(DATA)
    assert count(server, "put_file") == 1
    assert_nothing_is_left(server)


def test_a_stream_that_one_request_cannot_hold_is_refused_where_there_are_no_parts(
    server: LocalServer, served: Path
) -> None:
    options = replace(OPTIONS, max_put_bytes=100_000)
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    server.inject(Fault(route="initiate_upload", status=403))
    with pytest.raises(TooLarge, match=r"one request may store 100000 bytes.*HTTP 403"):
        upload_stream(volume, "file", io.BytesIO(DATA * 100))
    volume.close()
    assert not (served / "file").exists()
    assert count(server, "put_file") == 0
    assert_nothing_is_left(server)


def test_an_abort_may_be_repeated_and_ends_the_writer(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    writer = open_writer(remote, "file", part_bytes=PART)
    writer.write(DATA)
    writer.abort()
    writer.abort()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"more")
    with pytest.raises(ValueError, match="nothing is stored"):
        _ = writer.stored
    with pytest.raises(NotFound):
        remote.stat("file")
    assert count(server, "abort_upload") == 1
    assert_nothing_is_left(server)
    done = open_writer(remote, "file", part_bytes=PART)
    done.write(b"x")
    done.close()
    done.abort()
    assert content(remote) == b"x"


def test_an_exclusive_writer_loses_to_what_is_there(volume: Volume) -> None:
    volume.put("file", b"old")
    for size_bytes in (10, 3 * PART):
        with (
            pytest.raises(AlreadyExists),
            open_writer(volume, "file", overwrite=False, part_bytes=PART) as writer,
        ):
            writer.write(DATA[:size_bytes])
    assert content(volume) == b"old"


def test_a_cancelled_writer_leaves_nothing(remote: FilesApiVolume, server: LocalServer) -> None:
    cancel = threading.Event()
    writer = open_writer(remote, "file", part_bytes=PART, cancel=cancel)
    writer.write(DATA)
    cancel.set()
    with pytest.raises(Cancelled):
        writer.write(b"more")
    with pytest.raises(Cancelled):
        writer.close()
    with pytest.raises(NotFound):
        remote.stat("file")
    assert_nothing_is_left(server)


def test_a_writer_that_is_forgotten_stores_nothing_and_is_named(
    remote: FilesApiVolume, server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer(remote, "dir/file", part_bytes=PART)
    writer.write(DATA)
    del writer
    gc.collect()
    assert "dir/file was being written and never closed; nothing of it is stored" in caplog.text
    with pytest.raises(NotFound):
        remote.stat("dir/file")
    assert_nothing_is_left(server)


PROGRAM = """
import sys
from tests.files.conftest import OPTIONS, ROOT, TOKEN
from trainmount_files.files_api import Credentials, FilesApiVolume
from trainmount_files.transfer import open_reader, open_writer
volume = FilesApiVolume(ROOT, Credentials(host=sys.argv[1], token=TOKEN), OPTIONS)
writer = open_writer(volume, "left/open", part_bytes=32768)
# No more than may be on its way: a write beyond that waits for the store.
writer.write(bytes(4 * 32768))
kept = [writer, open_reader(volume, "there", block_bytes=1000)]
kept[1].read(50_000)
"""


@pytest.mark.usefixtures("hasty_stop")
@pytest.mark.parametrize("silent", [False, True])
def test_a_writer_that_is_open_at_the_end_of_the_program_is_reported_and_does_not_hang(
    remote: FilesApiVolume, server: LocalServer, served: Path, silent: bool
) -> None:
    remote.put("there", DATA)
    if silent:
        # The first part goes alone, and `write` waits for it.
        server.inject(Fault(route="presigned_put", latency_ms=60_000, skip=1))
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, server.url],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert program.returncode == 0
    assert "left/open was being written and never closed" in program.stderr
    assert not (served / "left" / "open").exists()
    assert server.statistics()["open_uploads"] == 0


def test_a_tar_is_written_as_it_is_made(volume: Volume) -> None:
    with (
        open_writer(volume, "file", part_bytes=PART) as writer,
        tarfile.open(fileobj=writer, mode="w|") as tar,
    ):
        info = tarfile.TarInfo("member")
        info.size = len(DATA)
        tar.addfile(info, io.BytesIO(DATA))
    with tarfile.open(fileobj=io.BytesIO(content(volume))) as tar:
        member = tar.extractfile("member")
        assert member is not None
        assert member.read() == DATA


class Endless(io.RawIOBase):
    """Zeros without an end."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        buffer[:] = bytes(len(buffer))
        return len(buffer)


def test_the_parts_of_an_endless_stream_grow_until_the_stated_maximum_and_then_it_is_aborted(
    server: LocalServer, served: Path
) -> None:
    options = replace(
        OPTIONS, part_size_bytes=64, min_part_bytes=64, max_part_bytes=16 << 10, max_parts=20
    )
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    total = 2 * sum(64 << step for step in range(9)) + 2 * (16 << 10)
    with pytest.raises(TooLarge, match=f"a stream may have {total} bytes in 20 parts"):
        upload_stream(volume, "file", Endless())
    volume.close()
    assert count(server, "presigned_put") <= 20
    assert count(server, "abort_upload") == 1
    assert not (served / "file").exists()
    assert_nothing_is_left(server)


def test_the_smallest_parts_lead_to_five_terabytes_without_one_part_too_many() -> None:
    capabilities = Capabilities(min_part_bytes=5 * MIB, part_bytes=16 * MIB)
    sizes = PartSizes.of(capabilities, part_bytes=None, parallelism=4, size_bytes=None)
    assert sizes.size_of(1) == 5 * MIB
    assert sizes.size_of(1000) == 5 * MIB
    assert sizes.size_of(1001) == 10 * MIB
    assert sizes.size_of(10_000) == 2560 * MIB
    assert sizes.total_bytes == 1000 * 5 * MIB * 1023 > 5 * 10**12
    known = PartSizes.of(capabilities, part_bytes=None, parallelism=4, size_bytes=250 << 30)
    assert known.size_of(1) == 26 * MIB
    with pytest.raises(ValueError, match="part_bytes must be from"):
        PartSizes.of(capabilities, part_bytes=MIB, parallelism=4, size_bytes=None)


@pytest.mark.parametrize("size_bytes", [0, 10, 3 * PART])
def test_a_stream_that_ends_before_its_size_leaves_nothing(volume: Volume, size_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match="the stream ended 1 bytes before"):
        upload_stream(volume, "file", io.BytesIO(DATA[:size_bytes]), size_bytes=size_bytes + 1)
    with pytest.raises(NotFound):
        volume.stat("file")


def test_a_stream_that_goes_on_is_read_to_its_size_only(volume: Volume) -> None:
    stream = io.BytesIO(DATA)
    assert upload_stream(volume, "file", stream, size_bytes=1000).size_bytes == 1000
    assert content(volume) == DATA[:1000]
    assert stream.tell() == 1000


def test_a_part_larger_than_the_memory_of_a_stream_stands_in_a_file(
    remote: FilesApiVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmount_files.transfer.parts.STREAM_BYTES", PART - 1)
    with open_writer(remote, "file", part_bytes=PART) as writer:
        writer.write(DATA)
        assert shared_budget().taken_bytes == 0
    assert content(remote) == DATA

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        pytest.raises(LocalError, match="no space left on device"),
        open_writer(remote, "file", part_bytes=PART) as writer,
    ):
        writer.write(DATA)
    assert content(remote) == DATA


def test_a_stream_without_room_for_more_goes_on_with_one_part(
    remote: FilesApiVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = MemoryBudget(PART)
    monkeypatch.setattr("trainmount_files.transfer.writer.shared_budget", lambda: budget)
    writers = [open_writer(remote, f"file-{number}", part_bytes=PART) for number in range(5)]
    for start in range(0, len(DATA), 10_000):
        for writer in writers:
            writer.write(DATA[start : start + 10_000])
            assert budget.taken_bytes <= 5 * PART
    for writer in writers:
        writer.close()
    assert [content(remote, f"file-{number}") for number in range(5)] == [DATA] * 5
    assert budget.taken_bytes == 0


def test_a_local_file_of_any_size_is_stored(volume: Volume, tmp_path: Path) -> None:
    for size_bytes in (0, 1, len(DATA)):
        (tmp_path / "local").write_bytes(DATA[:size_bytes])
        arrived: list[int] = []
        stored = upload_file(volume, tmp_path / "local", "file", progress=arrived.append)
        assert content(volume) == DATA[:size_bytes]
        assert (stored, sum(arrived)) == (volume.stat("file"), size_bytes)


def test_a_small_file_whose_version_nobody_wants_is_one_request(
    remote: FilesApiVolume, server: LocalServer, tmp_path: Path
) -> None:
    (tmp_path / "local").write_bytes(DATA[:10_000])
    stored = upload_file(remote, tmp_path / "local", "file", want_version=False)
    assert (stored.size_bytes, stored.mtime_ns, stored.version) == (10_000, 0, "")
    assert server.statistics()["requests"] == {"put_file": 1}


def test_a_source_that_cannot_be_read_is_named(volume: Volume, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"upload file: .*/missing: no such file or directory"):
        upload_file(volume, tmp_path / "missing", "file")
    with pytest.raises(LocalError, match="is a directory"):
        upload_file(volume, tmp_path, "file")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(LocalError, match="is no regular file"):
        upload_file(volume, tmp_path / "fifo", "file")
    with pytest.raises(NotFound):
        volume.stat("file")


def test_a_source_that_grows_or_goes_is_stored_as_it_was_opened(
    volume: Volume, tmp_path: Path
) -> None:
    big = DATA * 2
    (tmp_path / "local").write_bytes(big)

    def meddle(_: int) -> None:
        if (tmp_path / "local").exists():
            with (tmp_path / "local").open("ab") as file:
                file.write(b"more")
            (tmp_path / "local").unlink()

    upload_file(volume, tmp_path / "local", "file", progress=meddle)
    assert content(volume) == big


def test_every_error_of_a_stream_names_path_and_operation(remote: FilesApiVolume) -> None:
    remote.put("file", b"")
    with pytest.raises(VolumeError) as caught:
        upload_stream(remote, "file/below", io.BytesIO(DATA))
    assert (caught.value.path, caught.value.operation) == ("file/below", "upload")
