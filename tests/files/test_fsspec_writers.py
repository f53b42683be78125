"""Files that are written through fsspec appear whole, once, or not at all."""

from __future__ import annotations

import errno
import gc
import gzip
import logging
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import fsspec
import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN
from tests.files.fsspec_over import over

from trainmount_files import Unavailable, Volume
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.filesystem import VolumesFileSystem
from trainmount_files.retry import RetryPolicy
from trainmount_files.server import LocalServer
from trainmount_files.server.faults import Fault


@pytest.fixture
def fs(volume: Volume) -> VolumesFileSystem:
    return over(volume)


class Broken(Exception):
    """What the body of a `with` raises."""


def test_a_file_appears_when_it_is_closed(fs: VolumesFileSystem) -> None:
    content = os.urandom(300_000)
    with fs.open("/dir/file", "wb") as file:
        assert (file.write(content[:1000]), file.tell()) == (1000, 1000)
        file.flush()
        assert not fs.exists("/dir/file")
        file.write(memoryview(content)[1000:])
    assert fs.cat_file("/dir/file") == content
    assert file.closed
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")


def test_an_exclusive_file_never_replaces_another(fs: VolumesFileSystem) -> None:
    with fs.open("/file", "xb") as file:
        file.write(b"first")
    with pytest.raises(FileExistsError):
        fs.open("/file", "xb")
    late = fs.open("/late", "xb")
    late.write(b"second")
    fs.pipe_file("/late", b"faster")
    with pytest.raises(FileExistsError):
        late.close()
    assert fs.cat("/", recursive=True) == {"/file": b"first", "/late": b"faster"}


def test_text_and_compressed_files_are_closed_with_what_is_under_them(
    fs: VolumesFileSystem,
) -> None:
    with fs.open("/text", "w", encoding="utf-8", newline="") as text:
        text.write("grün\n")
    assert fs.cat_file("/text") == "grün\n".encode()
    with fs.open("/a.gz", "wb", compression="infer") as packed:
        packed.write(b"x" * 1000)
    assert gzip.decompress(fs.cat_file("/a.gz")) == b"x" * 1000
    with fs.open("/b.xz", "wt", compression="infer") as packed:
        packed.write("line\n")
    with fs.open("/b.xz", "rt", compression="infer") as packed:
        assert packed.read() == "line\n"
    fs.write_text("/c", "text")
    assert fs.read_text("/c") == "text"


def opened_by_fs(fs: VolumesFileSystem, mode: str, compression: str | None) -> Any:
    return fs.open("/file", mode, compression=compression)


def opened_by_fsspec(fs: VolumesFileSystem, mode: str, compression: str | None) -> Any:
    return fsspec.core.OpenFile(fs, "/file", mode, compression=compression)


@pytest.mark.parametrize("opened", [opened_by_fs, opened_by_fsspec])
@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("mode", ["wb", "w"])
@pytest.mark.parametrize("size", [100, 100_000])
def test_an_exception_in_the_block_leaves_the_path_as_it_was(
    remote: FilesApiVolume,
    server: LocalServer,
    opened: Callable[..., Any],
    mode: str,
    compression: str | None,
    size: int,
) -> None:
    fs = over(remote)
    content = os.urandom(size).hex()
    data: Any = content if mode == "w" else content.encode()
    with pytest.raises(Broken), opened(fs, mode, compression) as file:  # noqa: PT012
        file.write(data)
        raise Broken
    assert not fs.exists("/file")
    fs.pipe_file("/file", b"old")
    with pytest.raises(Broken), opened(fs, mode, compression) as file:  # noqa: PT012
        file.write(data)
        raise Broken
    gc.collect()
    assert fs.cat_file("/file") == b"old"
    assert server.statistics()["open_uploads"] == 0
    with opened(fs, mode, compression) as file:
        file.write(data)
    packed = fs.cat_file("/file")
    assert (gzip.decompress(packed) if compression else packed) == content.encode()


def test_a_block_that_ends_well_within_the_handling_of_another_exception_is_stored(
    fs: VolumesFileSystem,
) -> None:
    try:
        raise Broken
    except Broken:
        with fsspec.core.OpenFile(fs, "/a", "wb") as file:
            file.write(b"1")
        with closing(fs.open("/b", "wb")) as file:
            file.write(b"2")
        file = fs.open("/c", "wb")
        file.write(b"3")
        file.close()
    assert fs.cat("/", recursive=True) == {"/a": b"1", "/b": b"2", "/c": b"3"}


def test_a_file_that_the_store_refuses_leaves_the_path_as_it_was(server: LocalServer) -> None:
    impatient = replace(OPTIONS, retry=RetryPolicy(deadline_seconds=0.2, first_delay_seconds=0.02))
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), impatient)
    fs = over(volume)
    fs.pipe_file("/file", b"old")
    server.inject(Fault(route="initiate_upload", status=503), Fault(route="put_file", status=503))
    for size in (100, 300_000):
        with pytest.raises(OSError, match="HTTP 503") as error:
            write(fs, os.urandom(size))
        assert isinstance(error.value.__cause__, Unavailable)
    server.inject()
    assert fs.cat_file("/file") == b"old"
    statistics = server.statistics()
    assert (statistics["open_uploads"], statistics["staged_bytes"]) == (0, 0)
    assert "presigned_put" not in statistics["requests"]
    volume.close()


@pytest.mark.parametrize(
    ("status", "code", "number"),
    [(507, "RESOURCE_EXHAUSTED", errno.ENOSPC), (403, "QuotaExceeded", errno.EDQUOT)],
)
def test_a_store_without_room_is_a_full_disk_to_who_writes(
    server: LocalServer, status: int, code: str, number: int
) -> None:
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), OPTIONS)
    routes = ("presigned_put", "put_file")
    server.inject(*(Fault(route=route, status=status, error_code=code) for route in routes))
    for size in (100, 300_000):
        with pytest.raises(OSError, match=f"HTTP {status} {code}") as error:
            write(over(volume), os.urandom(size))
        assert error.value.errno == number
    assert server.statistics()["open_uploads"] == 0
    volume.close()


def write(fs: VolumesFileSystem, content: bytes) -> None:
    with fs.open("/file", "wb") as file:
        for start in range(0, len(content), 10_000):
            file.write(content[start : start + 10_000])


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_a_forgotten_file_is_not_stored_and_reported(
    remote: FilesApiVolume, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    fs = over(remote)
    file = fs.open("/file", mode)
    file.write("x" if mode == "w" else b"x")
    if mode == "wb":
        with caplog.at_level(logging.WARNING):
            del file
            gc.collect()
        assert "never closed" in caplog.text
    else:
        del file
        gc.collect()
    assert not fs.exists("/file")


def test_a_transaction_stores_all_at_its_end_or_nothing(fs: VolumesFileSystem) -> None:
    big = os.urandom(200_000)
    with fs.transaction:
        with fs.open("/a", "wb") as file:
            file.write(b"1")
        with fs.open("/b", "w") as file:
            file.write("2")
        with fs.open("/c", "wb") as file:
            file.write(big)
        assert fs.find("/") == []
    assert fs.cat("/", recursive=True) == {"/a": b"1", "/b": b"2", "/c": big}
    with pytest.raises(Broken), fs.transaction:  # noqa: PT012
        for name, content in (("/a", b"new"), ("/d", big)):
            with fs.open(name, "wb") as file:
                file.write(content)
        raise Broken
    assert fs.cat("/", recursive=True) == {"/a": b"1", "/b": b"2", "/c": big}
    with fs.open("/e", "wb") as file:
        file.write(b"after")
    assert fs.cat_file("/e") == b"after"
    with fs.open("/f", "wb", autocommit=False) as file:
        file.write(b"later")
    assert not fs.exists("/f")
    file.commit()
    assert fs.cat_file("/f") == b"later"


def test_a_discarded_transaction_frees_what_was_sent(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    fs = over(remote)
    with pytest.raises(Broken), fs.transaction:  # noqa: PT012
        write(fs, os.urandom(300_000))
        raise Broken
    statistics = server.statistics()
    assert (statistics["open_uploads"], statistics["staged_bytes"]) == (0, 0)
    assert fs.find("/") == []
