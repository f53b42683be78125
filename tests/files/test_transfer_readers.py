"""Reading a file in order and at will: the right bytes of one version, and no thread left."""

from __future__ import annotations

import io
import os
import pickle
import random
import tarfile
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.files.conftest import MakeVolume, Request, Scripted
from tests.files.test_files_api_downloads import MODIFIED_SECONDS, cut, exact, range_of

from trainmount_files import (
    ByteRange,
    Cancelled,
    FileStat,
    InexactRange,
    IsADirectory,
    NotFound,
    PreconditionFailed,
    Unavailable,
    Volume,
)
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.transfer import VolumeReader, download_file, iterate, open_reader, open_writer

DATA = random.Random(7).randbytes(300_000)
BLOCK = 16 << 10


def small_reader(volume: Volume) -> VolumeReader:
    return open_reader(volume, "file", block_bytes=BLOCK)


def threads_left() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "trainmount-read"]


@pytest.fixture
def stored(volume: Volume) -> Volume:
    volume.put("file", DATA)
    return volume


@pytest.mark.parametrize(
    ("start", "end"), [(0, len(DATA)), (0, 0), (5, 6), (BLOCK - 1, 3 * BLOCK + 1), (1000, 1000)]
)
def test_the_bytes_come_in_order_and_in_blocks(stored: Volume, start: int, end: int) -> None:
    blocks = list(iterate(stored, "file", ByteRange(start, end), block_bytes=BLOCK))
    assert b"".join(blocks) == DATA[start:end]
    assert [len(block) for block in blocks[:-1]] == [BLOCK] * (len(blocks) - 1)
    assert all(type(block) is bytes for block in blocks)
    assert threads_left() == []


def test_an_empty_file_has_no_blocks(volume: Volume) -> None:
    volume.put("file", b"")
    assert list(iterate(volume, "file")) == []
    with open_reader(volume, "file") as reader:
        assert (reader.read(), reader.read(5)) == (b"", b"")


def test_an_iterator_that_is_left_in_the_middle_leaves_no_thread(stored: Volume) -> None:
    closed, forgotten = (iterate(stored, "file", block_bytes=BLOCK) for _ in range(2))
    assert next(closed) == next(forgotten) == DATA[:BLOCK]
    closed.close()  # type: ignore[attr-defined]
    del forgotten
    assert threads_left() == []


def test_no_more_is_fetched_ahead_than_was_allowed(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    remote.put("file", DATA)
    blocks = iterate(remote, "file", block_bytes=BLOCK, read_ahead=3)
    next(blocks)
    for taken in range(1, 5):
        asked = server.statistics()["requests"]["presigned_get"]
        assert asked <= taken + 3
        next(blocks)
    blocks.close()  # type: ignore[attr-defined]


def test_a_range_past_the_end_is_refused(stored: Volume) -> None:
    with pytest.raises(InexactRange):
        next(iterate(stored, "file", ByteRange(0, len(DATA) + 1)))


def test_what_is_missing_or_a_directory_cannot_be_opened(volume: Volume) -> None:
    with pytest.raises(NotFound):
        open_reader(volume, "missing")
    volume.make_directory("directory")
    with pytest.raises(IsADirectory):
        open_reader(volume, "directory")
    with pytest.raises(IsADirectory):
        next(iterate(volume, "directory"))


def test_a_reader_behaves_as_a_local_file_whatever_is_asked(stored: Volume, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(DATA)
    choose = random.Random(11)
    with small_reader(stored) as reader, (tmp_path / "local").open("rb", buffering=0) as local:
        for _ in range(150):
            match choose.randrange(4):
                case 0:
                    position = choose.randrange(len(DATA) + 1000)
                    assert reader.seek(position) == local.seek(position)
                case 1:
                    step = choose.randrange(-5000, 5000)
                    if local.tell() + step >= 0:
                        assert reader.seek(step, io.SEEK_CUR) == local.seek(step, io.SEEK_CUR)
                case 2:
                    back = -choose.randrange(len(DATA))
                    assert reader.seek(back, io.SEEK_END) == local.seek(back, io.SEEK_END)
                case _:
                    for _ in range(choose.randrange(1, 5)):
                        size = choose.randrange(3 * BLOCK)
                        assert reader.read(size) == local.read(size)
            assert reader.tell() == local.tell()
        reader.seek(10)
        assert reader.readall() == DATA[10:]
        assert (reader.readable(), reader.seekable(), reader.writable()) == (True, True, False)
        with pytest.raises(ValueError, match="negative"):
            reader.seek(-1)
    assert threads_left() == []
    with pytest.raises(ValueError, match="closed"):
        reader.read(1)


def test_archives_are_read_in_place(volume: Volume) -> None:
    members = {f"member-{number}": DATA[number * 1000 :][:9000] for number in range(20)}
    with (
        open_writer(volume, "file.tar") as target,
        tarfile.open(fileobj=target, mode="w|gz") as tar,
    ):
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    volume.put("file.zip", archive.getvalue())
    with (
        open_reader(volume, "file.tar", block_bytes=BLOCK) as reader,
        tarfile.open(fileobj=io.BufferedReader(reader), mode="r:gz") as tar,
    ):
        found = {one.name: tar.extractfile(one) for one in tar.getmembers()}
        assert {name: file.read() for name, file in found.items() if file} == members
    with (
        open_reader(volume, "file.zip", block_bytes=BLOCK) as reader,
        zipfile.ZipFile(reader) as packed,
    ):
        assert {name: packed.read(name) for name in reversed(packed.namelist())} == members


def test_a_pickle_and_lines_are_read_through_a_buffer(volume: Volume) -> None:
    value = {"numbers": list(range(5000)), "bytes": DATA[:50_000]}
    volume.put("file", pickle.dumps(value))
    with io.BufferedReader(small_reader(volume)) as buffered:
        assert pickle.load(buffered) == value
    volume.put("file", b"".join(b"line %d\n" % number for number in range(10_000)))
    with io.TextIOWrapper(io.BufferedReader(small_reader(volume))) as text:
        assert list(text) == [f"line {number}\n" for number in range(10_000)]


def test_a_file_that_is_replaced_is_never_mixed(stored: Volume) -> None:
    blocks = iterate(stored, "file", block_bytes=BLOCK, read_ahead=1)
    with small_reader(stored) as reader:
        assert reader.read(100) == DATA[:100] == next(blocks)[:100]
        # Another size, since a store may tell times by the second only.
        stored.put("file", DATA[::-1] + b"!")
        reader.seek(len(DATA) // 2)
        with pytest.raises(PreconditionFailed):
            reader.read(2 * BLOCK)
        with pytest.raises(PreconditionFailed):
            list(blocks)
    with pytest.raises(PreconditionFailed):
        open_reader(stored, "file", version=reader.stat.version)


def test_a_read_that_broke_gives_the_right_bytes_when_it_is_tried_again(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    remote.put("file", DATA)
    with small_reader(remote) as reader:
        assert reader.read(3 * BLOCK) == DATA[: 3 * BLOCK]
        server.inject(
            Fault(route="presigned_get", cut_after_bytes=100, count=1),
            Fault(route="presigned_get", status=503),
            Fault(route="get_file", status=503, retry_after="60"),
        )
        reader.seek(100_000)
        with pytest.raises(Unavailable):
            reader.read(50_000)
        assert reader.tell() == 100_000
        server.inject()
        assert reader.read(50_000) == DATA[100_000:150_000]
        assert reader.readall() == DATA[150_000:]


def test_a_cancelled_reader_raises(stored: Volume) -> None:
    cancel = threading.Event()
    blocks = iterate(stored, "file", block_bytes=BLOCK, cancel=cancel)
    next(blocks)
    cancel.set()
    with pytest.raises(Cancelled):
        list(blocks)
    with open_reader(stored, "file", cancel=cancel) as reader, pytest.raises(Cancelled):
        reader.read(1)
    assert threads_left() == []


def test_a_small_file_needs_no_thread(stored: Volume) -> None:
    with open_reader(stored, "file") as reader:
        assert reader.read(10) == DATA[:10]
        assert reader.read() == DATA[10:]
        assert threads_left() == []
    blocks = iterate(stored, "file")
    assert next(blocks) == DATA
    assert threads_left() == []


def test_a_forked_child_reads_on_with_connections_of_its_own(remote: FilesApiVolume) -> None:
    remote.put("file", DATA)
    with small_reader(remote) as reader:
        assert reader.read(5 * BLOCK) == DATA[: 5 * BLOCK]
        child = os.fork()
        if not child:
            status = 1
            try:
                status = 0 if reader.read(100_000) == DATA[5 * BLOCK :][:100_000] else 2
            finally:
                os._exit(status)
        assert reader.read(100_000) == DATA[5 * BLOCK :][:100_000]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("name", ["block_bytes", "read_ahead"])
def test_sizes_of_nothing_are_refused(stored: Volume, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        list(iterate(stored, "file", **{name: 0}))  # type: ignore[arg-type]


def by_iterate(volume: Volume, known: FileStat, _: Path) -> bytes:
    return b"".join(iterate(volume, "file", known=known, block_bytes=BLOCK, read_ahead=2))


def by_reader(volume: Volume, known: FileStat, _: Path) -> bytes:
    with open_reader(volume, "file", known=known, block_bytes=BLOCK) as reader:
        return reader.read()


def by_download(volume: Volume, known: FileStat, directory: Path) -> bytes:
    target = directory / "downloaded"
    download_file(volume, "file", target, known=known, range_bytes=BLOCK, parallelism=3)
    return target.read_bytes()


@pytest.mark.parametrize("fetch", [by_iterate, by_reader, by_download])
def test_bodies_cut_at_growing_offsets_and_a_shifted_one_come_to_the_files_bytes(
    scripted: MakeVolume, tmp_path: Path, fetch: Callable[[Volume, FileStat, Path], bytes]
) -> None:
    lock = threading.Lock()
    cuts = [1000 * number for number in range(1, 12)]
    shifted = 0

    def script(request: Request) -> Scripted:
        nonlocal shifted
        answer = exact(request, DATA)
        with lock:
            start, end = range_of(request)
            if not shifted and start >= 4096:
                shifted = start
                headers = {"Content-Range": f"bytes {start - 4096}-{end - 4097}/{len(DATA)}"}
                return replace(answer, headers=headers, body=DATA[start - 4096 : end - 4096])
            if cuts:
                return cut(answer, cuts.pop(0))
        return answer

    server, volume = scripted(script)
    known = FileStat(
        "file",
        is_directory=False,
        size_bytes=len(DATA),
        mtime_ns=MODIFIED_SECONDS * 10**9,
        version=f"{len(DATA)}-{MODIFIED_SECONDS}",
    )
    assert fetch(volume, known, tmp_path) == DATA
    assert cuts == []
    asked = [range_of(request) for request in server.requests]
    # What was shifted is asked for again as it was, and nothing else that had arrived.
    assert [start for start, _ in asked].count(shifted) == 2
    assert len(set(asked)) == len(asked) - 1
