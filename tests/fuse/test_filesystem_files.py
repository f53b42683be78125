"""Reading and writing files through one mount."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import trio

from trainmount_files.errors import NoSpace, PermissionDenied, QuotaExceeded, Unavailable
from trainmount_fuse.attributes import ROOT_INO, AttributeChanges


async def test_what_is_written_is_read_back_and_is_in_the_store(world: Any) -> None:
    a = await world.node()
    data = os.urandom(300_000)
    await a.write("f", data)
    assert world.remote_files() == {"f": data}
    assert await a.read("f") == data
    assert (await a.stat("f")).size == 300_000


async def test_a_file_of_the_store_is_read_at_any_offset(world: Any) -> None:
    data = os.urandom(100_001)
    (world.remote / "f").write_bytes(data)
    a = await world.node()
    fh = await a.open("f")
    for offset, size in [(99_000, 5_000), (0, 1), (4095, 2), (50_000, 20_000), (100_001, 10)]:
        assert bytes(await a.fs.read(fh, offset, size)) == data[offset : offset + size]
    await a.close(fh)


async def test_a_cached_file_is_not_fetched_again_after_a_remount(world: Any) -> None:
    data = os.urandom(200_000)
    (world.remote / "f").write_bytes(data)
    a = await world.node(prefetch_max_bytes=0)
    assert await a.read("f") == data
    fetched = a.volume.calls["read"]
    await a.remount()
    assert await a.read("f") == data
    assert a.volume.calls["read"] == fetched


async def test_an_uploaded_file_is_read_without_asking_the_store_for_bytes(world: Any) -> None:
    a = await world.node()
    data = os.urandom(50_000)
    await a.write("f", data)
    assert await a.read("f") == data
    assert a.volume.calls["read"] == 0


async def test_random_writes_append_and_truncate_make_the_expected_file(world: Any) -> None:
    a = await world.node()
    await a.write("f", b"0123456789")
    fh = await a.open("f", os.O_RDWR)
    await a.fs.write(fh, 8, b"XYZ")
    await a.fs.write(fh, 0, b"ab")
    await a.fs.write(fh, 20, b"end")
    assert await a.read_handle(fh) == b"ab234567XYZ" + bytes(9) + b"end"
    await a.fs.setattr((await a.stat("f")).ino, AttributeChanges(size=22), fh)
    await a.close(fh)
    expected = b"ab234567XYZ" + bytes(9) + b"en"
    assert world.remote_files() == {"f": expected}
    await a.truncate("f", 5)
    assert world.remote_files() == {"f": b"ab234"}
    await a.truncate("f", 7)
    assert world.remote_files() == {"f": b"ab234\0\0"}
    assert a.staging_files() == []


async def test_a_new_empty_file_is_in_the_store_at_close(world: Any) -> None:
    a = await world.node()
    await a.write("empty", b"")
    assert world.remote_files() == {"empty": b""}


async def test_opening_for_update_without_writing_uploads_nothing(world: Any) -> None:
    (world.remote / "f").write_bytes(b"old")
    a = await world.node()
    fh = await a.open("f", os.O_RDWR)
    assert await a.read_handle(fh) == b"old"
    await a.close(fh)
    assert a.volume.calls["upload"] == 0


async def test_each_close_uploads_at_most_once_and_none_without_new_bytes(world: Any) -> None:
    """A forked child closes its copy of the descriptor while the parent goes on writing."""
    a = await world.node()
    fh = await a.open("f", os.O_CREAT | os.O_RDWR)
    first, second = os.urandom(1 << 20), os.urandom(1 << 20)
    await a.fs.write(fh, 0, first)
    await a.fs.flush(fh)
    await a.fs.flush(fh)
    assert a.volume.calls["upload"] == 1
    await a.fs.write(fh, 1 << 20, second)
    await a.close(fh)
    assert a.volume.calls["upload"] == 2
    assert world.remote_files() == {"f": first + second}


async def test_fsync_uploads_and_the_handle_goes_on(world: Any) -> None:
    a = await world.node()
    fh = await a.open("f", os.O_CREAT | os.O_WRONLY)
    await a.fs.write(fh, 0, b"one")
    await a.fs.fsync(fh, False)
    assert world.remote_files() == {"f": b"one"}
    await a.fs.write(fh, 3, b"two")
    await a.close(fh)
    assert world.remote_files() == {"f": b"onetwo"}


async def test_many_appends_lose_and_double_nothing(world: Any) -> None:
    """In small: open for append, write two bytes, close; each stat has grown by two."""
    a = await world.node()
    for count in range(60):
        await a.append("log", b"%02d" % count)
        assert (await a.stat("log")).size == 2 * (count + 1)
    assert world.remote_files() == {"log": b"".join(b"%02d" % count for count in range(60))}
    assert a.staging_files() == []


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        (PermissionDenied("upload", "f", "refused"), errno.EACCES),
        (Unavailable("upload", "f", "answered 500"), errno.EIO),
        (NoSpace("upload", "f", "answered 507"), errno.ENOSPC),
        (QuotaExceeded("upload", "f", "answered 403"), errno.EDQUOT),
    ],
)
async def test_a_refused_overwrite_is_an_error_at_close_and_the_old_file_stays(
    world: Any, fault: Exception, number: int
) -> None:
    """The program is told; store, this node and another go on to give the old content."""
    old = os.urandom(100_000)
    (world.remote / "f").write_bytes(old)
    a, b = await world.node("a"), await world.node("b")

    def refuse(operation: str, path: str) -> None:
        if operation == "upload":
            raise fault

    a.volume.fault = refuse
    fh = await a.open("f", os.O_WRONLY | os.O_TRUNC)
    await a.fs.write(fh, 0, os.urandom(120_000))
    assert await world.errno_from(a.fs.flush(fh), transfer=True) == number
    await a.fs.release(fh)
    a.volume.fault = None
    assert world.remote_files() == {"f": old}
    assert await a.read("f") == old
    assert (await a.stat("f")).size == 100_000
    assert await b.read("f") == old
    # Nothing is lost either: the bytes are kept and named.
    assert [(one.path, one.size_bytes) for one in a.fs.failed_files()] == [("f", 120_000)]


async def test_an_unlinked_open_file_lives_on_and_leaves_nothing(world: Any) -> None:
    """A pid file that is removed before it is closed."""
    a = await world.node()
    fh = await a.open("pid", os.O_CREAT | os.O_RDWR)
    ino = (await a.stat("pid")).ino
    await a.fs.write(fh, 0, b"4711")
    await a.unlink("pid")
    assert not await a.exists("pid")
    await a.fs.setattr(ino, AttributeChanges(size=100), fh)
    await a.fs.write(fh, 50, b"x")
    attributes = await a.fs.getattr(ino, fh)
    assert (attributes.size, attributes.nlink) == (100, 0)
    assert await a.read_handle(fh) == b"4711" + bytes(46) + b"x" + bytes(49)
    await a.close(fh)
    assert world.remote_files() == {}
    assert a.volume.calls["upload"] == 0
    assert a.staging_files() == []
    await a.remount()
    assert a.fs.failed_files() == []
    assert await a.entries() == {}


async def test_an_open_file_of_the_store_is_read_to_its_end_after_unlink(world: Any) -> None:
    data = os.urandom(60_000)
    (world.remote / "f").write_bytes(data)
    a = await world.node(prefetch_max_bytes=0)
    fh = await a.open("f")
    assert bytes(await a.fs.read(fh, 0, 1000)) == data[:1000]
    await a.unlink("f")
    assert world.remote_files() == {}
    assert await a.read_handle(fh) == data
    await a.crash()
    assert await a.read_handle(fh) == data
    await a.close(fh)
    assert a.staging_files() == []


async def test_a_handle_of_a_replaced_file_is_stale_and_a_new_one_reads_the_new_bytes(
    world: Any,
) -> None:
    """Never a mix of two versions, neither in bytes nor in attributes."""
    old, new = os.urandom(400_000), os.urandom(400_000)
    (world.remote / "f").write_bytes(old)
    a, b = await world.node("a", prefetch_max_bytes=0), await world.node("b")
    fh = await a.open("f")
    ino = (await a.stat("f")).ino
    before = await a.fs.getattr(ino, fh)
    assert bytes(await a.fs.read(fh, 0, 8192)) == old[:8192]
    await b.write("f", new + b"more")
    # What is cached is of the version the handle was opened at; what is not cannot be had any more.
    assert bytes(await a.fs.read(fh, 0, 8192)) == old[:8192]
    assert await world.errno_from(a.fs.read(fh, 200_000, 8192), transfer=True) == errno.ESTALE
    assert await a.read("f") == new + b"more"
    held, named = await a.fs.getattr(ino, fh), await a.stat("f")
    assert (held.size, held.mtime_ns) == (400_000, before.mtime_ns)
    assert (named.size, named.ino != ino) == (400_004, True)
    assert await world.errno_from(a.fs.write(fh, 0, b"x")) == errno.EBADF
    await a.close(fh)


async def test_a_writer_whose_file_was_replaced_before_it_wrote_is_told(world: Any) -> None:
    (world.remote / "f").write_bytes(b"old")
    a, b = await world.node("a"), await world.node("b")
    fh = await a.open("f", os.O_RDWR)
    await b.write("f", b"newer")
    assert await a.read("f") == b"newer"
    assert await world.errno_from(a.fs.write(fh, 0, b"x"), transfer=True) == errno.ESTALE
    await a.close(fh)
    assert world.remote_files() == {"f": b"newer"}


async def test_exclusive_create_does_not_overwrite_what_another_node_made_meanwhile(
    world: Any,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    fh = await a.open("lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    await a.fs.write(fh, 0, b"a")
    await b.write("lock", b"b")
    assert await world.errno_from(a.close(fh), transfer=True) == errno.EEXIST
    assert world.remote_files() == {"lock": b"b"}
    parent, name = ROOT_INO, b"lock"
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    assert await world.errno_from(a.fs.create(parent, name, 0o644, flags)) == errno.EEXIST


@pytest.mark.quotes(
    "ENOSPC, EDQUOT | the disk of the state directory is full, at its reserve or at a quota; a "
    "`write` that fits in part is short",
)
async def test_a_full_staging_disk_is_enospc_before_anything_is_acknowledged(world: Any) -> None:
    a = await world.node(free_disk_floor_bytes=1 << 60)
    assert await world.errno_from(a.open("f", os.O_CREAT | os.O_WRONLY)) == errno.ENOSPC
    (world.remote / "g").write_bytes(b"there")
    assert await a.read("g") == b"there"
    fh = await a.open("g", os.O_RDWR)
    assert await world.errno_from(a.fs.write(fh, 0, b"x")) == errno.ENOSPC
    await a.close(fh)
    assert world.remote_files() == {"g": b"there"}


async def test_an_unwritable_cache_still_reads(world: Any) -> None:
    data = os.urandom(50_000)
    (world.remote / "f").write_bytes(data)
    a = await world.node(cache_size_bytes=4096)
    assert await a.read("f") == data


async def test_chmod_and_times_stay_with_the_file(world: Any) -> None:
    a = await world.node()
    fh = await a.open("f", os.O_CREAT | os.O_WRONLY, 0o600)
    await a.fs.write(fh, 0, b"data")
    ino = (await a.stat("f")).ino
    await a.fs.setattr(ino, AttributeChanges(mtime_ns=1_000_000_007, atime_ns=5), fh)
    await a.close(fh)
    await a.crash()
    attributes = await a.stat("f")
    assert (attributes.mtime_ns, attributes.atime_ns) == (1_000_000_007, 5)
    assert attributes.mode & 0o7777 == 0o600
    await a.fs.setattr(ino, AttributeChanges(mode=0o755, uid=7, gid=8))
    attributes = await a.stat("f")
    assert attributes.mode & 0o7777 == 0o755
    assert (attributes.uid, attributes.gid) == (os.getuid(), os.getgid())
    await a.append("f", b"!")
    assert (await a.stat("f")).mtime_ns != 1_000_000_007


async def test_xattrs_tell_version_state_and_cached_bytes(world: Any) -> None:
    a = await world.node()
    fh = await a.open("f", os.O_CREAT | os.O_WRONLY)
    ino = (await a.stat("f")).ino
    await a.fs.write(fh, 0, b"12345")
    assert await a.fs.getxattr(ino, b"user.trainmount.state") == b"dirty"
    await a.close(fh)
    assert await a.fs.getxattr(ino, b"user.trainmount.state") == b"clean"
    assert await a.fs.getxattr(ino, b"user.trainmount.path") == b"f"
    assert await a.fs.getxattr(ino, b"user.trainmount.cached_bytes") == b"5"
    version = a.volume.inner.stat("f").version.encode()
    assert await a.fs.getxattr(ino, b"user.trainmount.version") == version
    assert b"user.trainmount.version" in await a.fs.listxattr(ino)
    name = b"user.trainmount.version"
    assert await world.errno_from(a.fs.setxattr(ino, name, b"x")) == errno.EOPNOTSUPP
    assert await world.errno_from(a.fs.setxattr(ino, b"user.x", b"x")) == errno.EOPNOTSUPP
    assert await world.errno_from(a.fs.getxattr(ino, b"security.capability")) == errno.ENODATA


async def test_parallel_reads_fetch_each_block_once(world: Any) -> None:
    data = os.urandom(512 * 1024)
    (world.remote / "f").write_bytes(data)
    a = await world.node()
    fh = await a.open("f")
    pieces: dict[int, bytes] = {}

    async def read(offset: int) -> None:
        pieces[offset] = bytes(await a.fs.read(fh, offset, 16 * 1024))

    async with trio.open_nursery() as nursery:
        for offset in range(0, len(data), 8 * 1024):
            nursery.start_soon(read, offset)
    for offset, piece in pieces.items():
        assert piece == data[offset : offset + 16 * 1024]
    await a.close(fh)
    await a.fs.stop()
    assert sum(len(one) for one in a.volume.fetched_ranges) == len(data)


async def test_throwing_out_blocks_touches_no_local_bytes_and_sends_nothing(world: Any) -> None:
    (world.remote / "d").mkdir()
    for number in range(8):
        (world.remote / "d" / f"f{number}").write_bytes(os.urandom(100_000))
    a = await world.node(cache_size_bytes=200_704)

    def refuse(operation: str, path: str) -> None:
        if operation == "upload":
            raise Unavailable(operation, path, "the store is down")

    a.volume.fault = refuse
    local = {f"new{number}": os.urandom(50_000) for number in range(3)}
    handles = {}
    for name, data in local.items():
        handles[name] = await a.open(name, os.O_CREAT | os.O_RDWR)
        await a.fs.write(handles[name], 0, data)
        with pytest.raises(Unavailable):
            await a.fs.fsync(handles[name], datasync=False)
    before = {name: a.volume.calls[name] for name in ("upload", "delete", "rename")}
    for number in range(8):
        name = f"d/f{number}"
        assert await a.read(name) == (world.remote / name).read_bytes()
    await a.settled(lambda: a.fs.cache_statistics().evicted_bytes > 0, "some were thrown out")
    assert {name: a.volume.calls[name] for name in before} == before
    a.volume.fault = None
    for name, fh in handles.items():
        await a.close(fh)
        assert (world.remote / name).read_bytes() == local[name]


async def test_a_small_cache_gives_right_bytes_while_it_evicts(world: Any) -> None:
    """In small: more open files than the cache holds, read at once, several rounds."""
    files = {f"f{number}": os.urandom(100_000) for number in range(8)}
    for name, data in files.items():
        (world.remote / name).write_bytes(data)
    a = await world.node(cache_size_bytes=200_704)
    wrong: list[str] = []

    async def check(name: str) -> None:
        if await a.read(name) != files[name]:
            wrong.append(name)

    for _round in range(3):
        async with trio.open_nursery() as nursery:
            for name in files:
                nursery.start_soon(check, name)
    assert wrong == []
    await a.settled(lambda: a.fs.cache_statistics().evicted_bytes > 0, "some were thrown out")
    assert a.fs.cache_statistics().cached_bytes <= 200_704
