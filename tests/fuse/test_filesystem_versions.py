"""Versions and times: a store that tells versions apart by size only, as the Files API does within
one second, and times that programs set."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio

from trainmount_files.directory import DirectoryVolume
from trainmount_files.volume import Capabilities, FileStat, Page
from trainmount_fuse import core
from trainmount_fuse.attributes import AttributeChanges


def _coarse(stat: FileStat) -> FileStat:
    return stat if stat.is_directory else replace(stat, version=f"{stat.size_bytes}")


def _coarsely(call: Callable[..., FileStat]) -> Callable[..., FileStat]:
    return lambda *arguments, **options: _coarse(call(*arguments, **options))


async def _node(world: Any, name: str = "a") -> Any:
    node = await world.node(name)
    inner = node.volume.inner
    for name in ("stat", "put", "upload", "rename"):
        setattr(inner, name, _coarsely(getattr(inner, name)))
    list_page, read_into = inner.list_page, inner.read_into

    def list_coarsely(*arguments: Any, **options: Any) -> Page:
        page = list_page(*arguments, **options)
        return replace(page, entries=tuple(_coarse(one) for one in page.entries))

    def read_coarsely(*arguments: Any, **options: Any) -> None:
        read_into(*arguments, **(options | {"version": None}))

    inner.list_page, inner.read_into = list_coarsely, read_coarsely
    return node


async def test_a_file_rewritten_with_equal_length_reads_as_rewritten(world: Any) -> None:
    node = await _node(world)
    for content in (b"one" * 3000, b"two" * 3000, b"six" * 3000):
        await node.write("f", content)
        assert await node.read("f") == content


async def test_a_file_renamed_over_one_of_equal_length_reads_as_itself(world: Any) -> None:
    node = await _node(world)
    for content in (b"one" * 3000, b"two" * 3000, b"six" * 3000):
        await node.write("f.part", content)
        await node.rename("f.part", "f")
        assert await node.read("f") == content


async def test_local_bytes_that_a_successor_uploads_replace_what_was_cached(world: Any) -> None:
    node = await _node(world)
    await node.write("f", b"one" * 3000)
    assert await node.read("f") == b"one" * 3000
    handle = await node.open("f", 1)
    await node.fs.write(handle, 0, b"two" * 3000)
    await node.remount()
    await node.settled(lambda: node.staging_files() == [], "all is uploaded")
    assert world.remote_files() == {"f": b"two" * 3000}
    assert await node.read("f") == b"two" * 3000


async def test_a_time_set_while_the_uploaded_bytes_are_still_here_stays(world: Any) -> None:
    node = await world.node()
    handle = await node.open("f", os.O_CREAT | os.O_WRONLY)
    await node.fs.write(handle, 0, b"bytes")
    await node.fs.flush(handle)
    ino = (await node.stat("f")).ino
    await node.fs.setattr(ino, AttributeChanges(mtime_ns=10**18))
    await node.fs.release(handle)
    assert (await node.stat("f")).mtime_ns == 10**18


async def test_a_time_that_was_set_stays_with_an_open_file_that_is_removed(world: Any) -> None:
    node = await world.node()
    await node.write("f", b"bytes")
    ino = (await node.stat("f")).ino
    await node.fs.setattr(ino, AttributeChanges(mtime_ns=10**18))
    handle = await node.open("f", os.O_RDONLY)
    await node.unlink("f")
    assert (await node.fs.getattr(ino)).mtime_ns == 10**18
    await node.close(handle)


async def test_an_open_sees_another_nodes_close_while_uploaded_bytes_are_still_here(
    world: Any,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    await a.write("f", b"first")
    writer = await a.open("f", os.O_WRONLY | os.O_TRUNC)
    await a.fs.write(writer, 0, b"second")
    await a.fs.flush(writer)
    reader = await a.open("f")
    await b.write("f", b"third")
    assert await a.read("f") == b"third"
    assert await a.read_handle(reader) == b"second"
    with pytest.raises(OSError, match="replaced") as raised:
        await a.fs.write(writer, 0, b"fourth")
    assert raised.value.errno == errno.ESTALE
    await a.close(reader)
    await a.close(writer)
    assert await a.read("f") == b"third"
    assert world.remote_files() == {"f": b"third"}


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store says of itself that its versions are not exact."""
    inexact = Capabilities(atomic_rename=True, min_part_bytes=1, coarse_versions=True)
    monkeypatch.setattr(DirectoryVolume, "capabilities", property(lambda _: inexact))


async def test_another_nodes_content_of_equal_length_in_the_same_second_is_read(
    world: Any, coarse: None
) -> None:
    """Its version is the one that is known and cached, but its second is not over."""
    a, b = await _node(world), await _node(world, "b")
    for content in (b"one" * 3000, b"two" * 3000, b"six" * 3000):
        await a.write("f", content)
        assert await b.read("f") == content
        fh = await b.open("f")
        assert await b.read_handle(fh) == content
        await b.close(fh)
        assert await a.read("f") == content
    await b.write("f", b"ten" * 3000)
    assert await a.read("f") == b"ten" * 3000


@pytest.mark.quotes(
    "Files API: A closes, B closes other bytes of equal length in the same second, A opens | A "
    "reads B's bytes; above 4 MiB its own, if it opens more than 3 s later"
)
@pytest.mark.parametrize(("size_bytes", "is_told"), [(4 << 20, True), ((4 << 20) + 1, False)])
async def test_large_files_of_equal_length_in_the_same_second_may_be_taken_for_one(
    world: Any, coarse: None, monkeypatch: pytest.MonkeyPatch, size_bytes: int, is_told: bool
) -> None:
    a, b = await _node(world), await _node(world, "b")
    for name in ("at once", "later"):
        await a.write(name, b"a" * size_bytes)
        await b.write(name, b"b" * size_bytes)
    assert await a.read("at once") == b"b" * size_bytes
    assert core._YOUNG_NS == 3 * 10**9
    monkeypatch.setattr(core, "_YOUNG_NS", 0)
    assert await a.read("later") == (b"b" if is_told else b"a") * size_bytes


async def test_a_version_whose_second_is_over_is_cached(world: Any, coarse: None) -> None:
    (world.remote / "f").write_bytes(b"old" * 3000)
    os.utime(world.remote / "f", ns=(10**18, 10**18))
    b = await _node(world, "b")
    for _ in range(3):
        assert await b.read("f") == b"old" * 3000
    assert len(b.volume.fetched_ranges) == 1


async def test_a_new_file_is_shown_from_here_until_its_upload_is_noted(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await world.node()
    blocks = node.fs.core.blocks
    shown: list[tuple[list[str], bytes]] = []
    real_drop, token = blocks.drop, trio.lowlevel.current_trio_token()

    async def look() -> None:
        shown.append((list(await node.entries()), await node.read("f")))

    def drop(key: Any) -> None:
        # The store has answered, and nothing follows from it here yet.
        if not shown:
            trio.from_thread.run(look, trio_token=token)
        real_drop(key)

    monkeypatch.setattr(blocks, "drop", drop)
    await node.write("f", b"bytes")
    assert shown == [(["f"], b"bytes")]


async def test_a_file_made_where_a_directory_was_survives_a_listing_from_before(world: Any) -> None:
    node = await world.node(directory_timeout_seconds=60.0)
    await node.mkdir("e")
    assert list(await node.entries()) == ["e"]
    await node.rmdir("e")
    handle = await node.open("e", os.O_CREAT | os.O_WRONLY)
    await node.fs.write(handle, 0, b"bytes")
    assert {name: one.is_directory for name, one in (await node.entries()).items()} == {"e": False}
    await node.close(handle)
    assert world.remote_files() == {"e": b"bytes"}


async def test_an_open_while_the_name_is_given_to_another_file_gets_one_of_both_whole(
    world: Any,
) -> None:
    node = await world.node()
    await node.write("f", b"old" * 100)
    await node.write("f.part", b"new" * 100)
    target = node.fs.core.inodes.get((await node.stat("f")).ino)
    token = trio.lowlevel.current_trio_token()
    read: list[bytes] = []

    async def open_and_read() -> None:
        handle = await node.open("f")
        await is_renamed.wait()
        read.append(await node.read_handle(handle))
        await node.close(handle)

    async def until_it_waits() -> None:
        nursery.start_soon(open_and_read)
        with trio.fail_after(30):
            while not target.lock.statistics().tasks_waiting:
                await trio.sleep(0.001)

    def fault(operation: str, path: str) -> None:
        if operation == "rename":
            trio.from_thread.run(until_it_waits, trio_token=token)

    is_renamed = trio.Event()
    node.volume.fault = fault
    async with trio.open_nursery() as nursery:
        await node.rename("f.part", "f")
        is_renamed.set()
    assert read == [b"new" * 100]


async def test_a_file_that_was_left_is_settled_before_a_program_writes_it_anew(world: Any) -> None:
    node = await world.node()
    for is_slow in (False, True):
        handle = await node.open("f", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        await node.fs.write(handle, 0, b"left")
        # Uploaded by a daemon that died before it wrote that down.
        (world.remote / "f").write_bytes(b"left")
        go_on = threading.Event()

        def fault(operation: str, path: str, go_on: threading.Event = go_on) -> None:
            if operation == "read":
                go_on.wait(30)

        node.volume.fault = fault if is_slow else None
        await node.remount()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.write, "f", b"written anew")
            go_on.set()
        assert world.remote_files() == {"f": b"written anew"}


async def test_opening_an_empty_file_to_cut_it_sets_its_time(world: Any) -> None:
    node = await world.node()
    await node.write("stamp", b"")
    before = (await node.stat("stamp")).mtime_ns
    os.utime(world.remote / "stamp", ns=(before, before - 10**9))
    await node.write("stamp", b"")
    assert (world.remote / "stamp").stat().st_mtime_ns >= before
    assert (await node.stat("stamp")).mtime_ns >= before


async def test_a_name_that_a_dead_daemon_took_away_and_gave_anew_can_be_opened(world: Any) -> None:
    node = await world.node()
    await node.write("f", b"old")
    await node.unlink("f")
    handle = await node.open("f", os.O_CREAT | os.O_WRONLY)
    await node.fs.write(handle, 0, b"new")
    await node.fs.flush(handle)
    await node.crash()
    await node.close(handle)
    assert await node.read("f") == b"new"


async def test_a_write_ends_a_set_time_for_a_successor_too(world: Any) -> None:
    node = await world.node()
    await node.write("f", b"bytes")
    ino = (await node.stat("f")).ino
    await node.fs.setattr(ino, AttributeChanges(mtime_ns=10**18))
    handle = await node.open("f", os.O_WRONLY)
    await node.fs.write(handle, 0, b"other")
    await node.crash()
    assert (await node.fs.getattr(ino)).mtime_ns > 10**18
    await node.close(handle)


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_set_time_stays_when_the_directory_is_renamed(world: Any, is_open: bool) -> None:
    node = await world.node()
    rename = node.volume.inner.rename

    def rename_as_a_copy(source: str, destination: str) -> FileStat:
        stat = rename(source, destination)
        os.utime(world.remote / destination)
        return node.volume.inner.stat(stat.path)

    node.volume.inner.rename = rename_as_a_copy
    await node.mkdir("d")
    await node.write("d/f", b"bytes")
    ino = (await node.stat("d/f")).ino
    await node.fs.setattr(ino, AttributeChanges(mtime_ns=10**18))
    handle = await node.open("d/f") if is_open else None
    await node.rename("d", "e")
    assert (await node.stat("e/f")).mtime_ns == 10**18
    assert await node.read("e/f") == b"bytes"
    if handle is not None:
        await node.close(handle)


async def test_a_change_of_a_directory_ends_what_a_dead_daemon_may_have_left_undone_in_it(
    world: Any,
) -> None:
    node = await world.node()
    await node.write("b", b"bytes")
    await node.rename("b", "c")
    await node.unlink("c")
    await node.crash()
    await node.mkdir("b")
    await node.mkdir("c")
    await node.write("c/f", b"bytes")
    # The same names as before: no repetition, so what is in the way counts.
    assert await world.errno_from(node.rename("b", "c")) == errno.ENOTEMPTY
    assert sorted(await node.entries()) == ["b", "c"]


async def test_another_nodes_file_that_stands_there_after_an_upload_is_not_taken_for_what_was_sent(
    world: Any,
) -> None:
    node = await world.node()
    inner = node.volume.inner
    theirs = b"theirs" * 5000

    def overtaken(call: Callable[..., FileStat]) -> Callable[..., FileStat]:
        def store(path: str, *arguments: Any, **options: Any) -> FileStat:
            call(path, *arguments, **options)
            (world.remote / path).write_bytes(theirs)
            return inner.stat(path)

        return store

    for name in ("put", "upload"):
        setattr(inner, name, overtaken(getattr(inner, name)))
    await node.write("f", b"mine" * 10_000)
    assert (await node.stat("f")).size == len(theirs)
    assert await node.read("f") == theirs
