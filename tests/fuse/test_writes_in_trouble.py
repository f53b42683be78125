"""Writes where disk, quota, journal or store have an end, and names that go from open files."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import trio

from trainmount_files.errors import PermissionDenied, Unavailable
from trainmount_fuse.writes import content, staging

NEW = os.O_CREAT | os.O_WRONLY
KIB = 1 << 10


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.quotes(
    "ENOSPC, EDQUOT | the disk of the state directory is full, at its reserve or at a quota; a "
    "`write` that fits in part is short",
)
async def test_a_write_that_does_not_fit_is_taken_in_part_or_not_at_all(
    world: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    a = await world.node()
    fh = await a.open("f", NEW)
    assert await a.fs.write(fh, 0, b"0123456789") == 10
    real, room = os.pwrite, 4

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal room
        if not room:
            raise OSError(number, os.strerror(number))
        taken, room = data[:room], room - min(room, len(data))
        return real(fd, taken, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert await a.fs.write(fh, 10, b"abcdefghij") == 4
        assert await world.errno_from(a.fs.write(fh, 14, b"efghij")) == number
    assert (await a.stat("f")).size == 14
    await a.close(fh)
    assert world.remote_files() == {"f": b"0123456789abcd"}


async def test_writes_to_a_disk_that_is_slow_wait_in_threads_until_it_is_quick_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await world.node()
    fh = await a.open("f", NEW)
    real, loop = os.pwrite, threading.get_ident()
    now, takes, were_in_thread = 0.0, 0.0, []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal now
        now += takes
        were_in_thread.append(threading.get_ident() != loop)
        return real(fd, data, offset)

    monkeypatch.setattr(staging, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(os, "pwrite", pwrite)
    for takes in (0.0, 0.1, 0.0, 0.1, 0.1, *[0.0] * 17):  # noqa: B007  (pwrite reads it)
        await a.fs.write(fh, 0, b"bytes")
    assert were_in_thread == [False] * 5 + [True] * 16 + [False]
    monkeypatch.undo()
    await a.close(fh)


async def test_a_journal_that_cannot_be_written_is_enospc_before_a_byte_is_taken(
    world: Any,
) -> None:
    a = await world.node()
    await a.write("f", b"base")
    fh = await a.open("f", os.O_RDWR)
    database = a.fs.core.staging._journal._database
    num_pages = database.execute("PRAGMA page_count").fetchone()[0]
    # What the journal holds in reserve is used up, too.
    database.execute("CREATE TABLE filler (bytes BLOB)")
    database.execute(f"PRAGMA max_page_count={num_pages}")
    with suppress(sqlite3.OperationalError):
        while True:
            database.execute("INSERT INTO filler VALUES (zeroblob(500))")
    refused: Exception | None = None
    for number in range(1000):
        try:
            await a.open(f"new{number}", NEW)
        except sqlite3.OperationalError as error:
            refused = error
            break
    assert refused is not None
    assert world.errno_of(refused) == errno.ENOSPC
    with pytest.raises(sqlite3.OperationalError):
        await a.fs.write(fh, 0, b"x" * 10)
    assert await a.read_handle(fh) == b"base"
    database.execute("PRAGMA max_page_count=1000000")
    assert await a.fs.write(fh, 0, b"BASE") == 4
    await a.close(fh)
    assert world.remote_files()["f"] == b"BASE"


async def test_a_quota_that_stops_the_journal_is_edquot(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sqlite calls it a failed write and nothing more."""
    a = await world.node()
    await a.write("f", b"base")
    fh = await a.open("f", os.O_RDWR)
    refused = sqlite3.OperationalError("disk I/O error")
    refused.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    journal = a.fs.core.staging._journal
    database = SimpleNamespace(execute=Mock(side_effect=refused))
    full = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_database", database)
        with pytest.raises(sqlite3.OperationalError):
            await a.fs.write(fh, 0, b"new")
        patch.setattr(os, "posix_fallocate", Mock(side_effect=full))
        assert await world.errno_from(a.fs.write(fh, 0, b"new")) == errno.EDQUOT
    assert await a.fs.write(fh, 0, b"new") == 3
    await a.close(fh)
    assert world.remote_files() == {"f": b"newe"}


@pytest.mark.quotes(
    "Unsent bytes are in the state directory, and the cache never takes their room.",
)
async def test_the_cache_makes_room_for_writes_and_never_takes_it_from_them(world: Any) -> None:
    """The store is down and three files wait while other files fill the cache and leave it."""
    a = await world.node(cache_size_bytes=200 * KIB)
    others = {f"o{number}": os.urandom(100 * KIB) for number in range(6)}
    for name, data in others.items():
        (world.remote / name).write_bytes(data)
    files = {f"f{number}": os.urandom(150 * KIB) for number in range(3)}
    handles = {name: await a.open(name, NEW) for name in files}

    def no_uploads(operation: str, path: str) -> None:
        if operation == "upload":
            raise Unavailable(operation, path, "connection refused")

    a.volume.fault = no_uploads
    for name, fh in handles.items():
        await a.fs.write(fh, 0, files[name])
        assert await world.errno_from(a.fs.flush(fh), transfer=True) == errno.EIO
    num_uploads = a.volume.calls["upload"]
    for _round in range(2):
        for name, data in others.items():
            assert await a.read(name) == data
    await a.settled(lambda: a.fs.cache_statistics().evicted_bytes > 0, "some were thrown out")
    assert (a.volume.calls["upload"], a.volume.calls["delete"]) == (num_uploads, 0)
    a.volume.fault = None
    for name, fh in handles.items():
        assert await a.read(name) == files[name]
        await a.close(fh)
    assert world.remote_files() == others | files


async def test_a_file_written_beside_and_renamed_over_an_empty_one_is_whole_in_the_store(
    world: Any,
) -> None:
    a = await world.node()
    data = os.urandom(500 * KIB)
    await a.write("t.part", data)
    await a.write("t", b"")
    await a.rename("t.part", "t")
    b = await world.node("b")
    assert world.remote_files() == {"t": data}
    assert await b.read("t") == data
    assert not await b.exists("t.part")


async def test_a_rename_over_an_empty_file_waits_for_the_upload_that_is_under_way(
    world: Any,
) -> None:
    """A part file beside an empty one, as downloaders make them, and a slow store."""
    a = await world.node()
    begun, go_on = threading.Event(), threading.Event()

    def wait(operation: str, path: str) -> None:
        if (operation, path) == ("upload", "f.part"):
            begun.set()
            assert go_on.wait(60)

    await a.write("f", b"")
    a.volume.fault = wait
    fh = await a.open("f.part", NEW)
    await a.fs.write(fh, 0, b"whole")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.close, fh)
        await a.settled(begun.is_set, "the upload")
        nursery.start_soon(a.rename, "f.part", "f")
        assert await a.read("f") == b""
        assert world.remote_files() == {"f": b""}
        go_on.set()
    assert world.remote_files() == {"f": b"whole"}
    assert (await a.read("f"), set(await a.entries())) == (b"whole", {"f"})


async def test_who_lists_while_a_file_is_appended_to_sees_it_grow_and_never_shrink(
    world: Any,
) -> None:
    a = await world.node()
    await a.write("log", b"")
    seen: list[int] = []
    is_over = False

    async def look() -> None:
        while not is_over:
            seen.append((await a.entries())["log"].size)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        for number in range(100):
            await a.append("log", b"%09d\n" % number)
        is_over = True
    assert seen == sorted(seen)
    assert {size % 10 for size in seen} == {0}
    assert world.remote_files() == {"log": b"".join(b"%09d\n" % n for n in range(100))}


@pytest.mark.quotes(
    "Of a stored file above 64 MiB, what is not cached is ESTALE then.",
)
async def test_a_large_open_file_is_not_fetched_when_its_name_goes(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cached is read on; the rest is gone with the store's file."""
    assert content._KEPT_BYTES == 64 << 20
    monkeypatch.setattr(content, "_KEPT_BYTES", 50 * KIB)
    data, other = os.urandom(200 * KIB), os.urandom(60 * KIB)
    for name in ("removed", "replaced"):
        (world.remote / name).write_bytes(data)
    a = await world.node(prefetch_max_bytes=0)
    handles = {name: await a.open(name) for name in ("removed", "replaced")}
    for fh in handles.values():
        assert bytes(await a.fs.read(fh, 0, 8 * KIB)) == data[: 8 * KIB]
    await a.write("new", other)
    fetched = sum(len(one) for one in a.volume.fetched_ranges)
    await a.unlink("removed")
    await a.rename("new", "replaced")
    assert sum(len(one) for one in a.volume.fetched_ranges) == fetched
    assert world.remote_files() == {"replaced": other}
    for fh in handles.values():
        assert bytes(await a.fs.read(fh, 0, 8 * KIB)) == data[: 8 * KIB]
        read = a.fs.read(fh, 100 * KIB, 8 * KIB)
        assert await world.errno_from(read, transfer=True) == errno.ESTALE
        await a.close(fh)
    assert await a.read("replaced") == other
    assert a.staging_files() == []


async def test_a_store_that_takes_nothing_from_this_identity_says_so_at_close(world: Any) -> None:
    a = await world.node()

    def refuse(operation: str, path: str) -> None:
        if operation == "upload":
            raise PermissionDenied(operation, path, "no WRITE VOLUME")

    a.volume.fault = refuse
    fh = await a.open("f", NEW)
    await a.fs.write(fh, 0, b"data")
    assert await world.errno_from(a.close(fh), transfer=True) == errno.EACCES
    assert [(one.path, one.size_bytes) for one in a.fs.failed_files()] == [("f", 4)]
    assert not await a.exists("f")
