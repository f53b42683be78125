"""Two nodes over one volume: what the second one sees, and when."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import trio

from trainmount_fuse.names import inodes


async def test_an_open_after_another_nodes_close_sees_its_bytes_and_size(world: Any) -> None:
    """With cached attributes and pages of old content, at another and at the same length."""
    a, b = await world.node("a"), await world.node("b")
    await a.write("f", b"twelve bytes")
    assert (await b.stat("f")).size == 12
    assert await b.read("f") == b"twelve bytes"
    for new in (b"fourteen bytes", b"14 other bytes", b"!"):
        await a.write("f", new)
        fh = await b.open("f")
        assert (await b.stat("f")).size == len(new)
        assert bytes(await b.fs.read(fh, 0, 100)) == new
        await b.close(fh)


async def test_the_kernels_pages_are_kept_while_the_version_stands_and_not_longer(
    world: Any,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    await a.write("f", b"one")
    ino = (await b.stat("f")).ino
    assert (await b.fs.open(ino, os.O_RDONLY)).keep_cache is False
    second = await b.fs.open(ino, os.O_RDONLY)
    assert second.keep_cache is True
    for fh in (1, 2):
        await b.fs.release(fh)
    await a.write("f", b"two")
    fh = await b.open("f")
    assert await b.read_handle(fh) == b"two"
    await b.close(fh)
    # Another version is another inode, so that pages and sizes of two can never mix.
    assert await world.errno_from(b.fs.open(ino, os.O_RDONLY)) == errno.ESTALE
    ino = (await b.stat("f")).ino
    assert (await b.fs.open(ino, os.O_RDONLY)).keep_cache is True


async def test_a_follower_reads_each_record_that_was_appended(world: Any) -> None:
    """In small: attributes come with the listing, then the tail is read."""
    times = {f"{kind}_timeout_seconds": 0.0 for kind in ("entry", "attr", "directory")}
    a, b = await world.node("a"), await world.node("b", **times)
    held = None
    for count in range(30):
        record = b"record %04d\n" % count
        await a.append("events", record)
        size = (await b.entries())["events"].size
        assert size == len(record) * (count + 1)
        fh = await b.open("events")
        assert bytes(await b.fs.read(fh, size - len(record), len(record))) == record
        await b.close(fh)
        if held is None:
            held = await b.open("events")
    # A handle from before gives what it was opened at.
    assert await b.read_handle(held) == b"record 0000\n"
    await b.close(held)


async def test_a_listing_shows_another_nodes_file_within_its_timeout(world: Any) -> None:
    a, b = await world.node("a"), await world.node("b", directory_timeout_seconds=0.2)
    assert await b.entries() == {}
    await a.write("f", b"1")
    started = trio.current_time()
    while "f" not in await b.entries():
        assert trio.current_time() - started < 10
        await trio.sleep(0.01)
    assert trio.current_time() - started >= 0.0
    assert (await b.entries())["f"].size == 1


async def test_a_name_cached_as_missing_is_found_within_its_timeout(world: Any) -> None:
    a, b = await world.node("a"), await world.node("b", negative_timeout_seconds=0.2)
    assert not await b.exists("f")
    answer = await b.fs.lookup(1, b"f")
    assert answer.ino == 0
    assert 0 < answer.entry_timeout_seconds <= 0.2
    await a.write("f", b"1")
    with trio.fail_after(10):
        while not await b.exists("f"):
            await trio.sleep(0.01)


async def test_a_name_seen_missing_at_open_is_not_shown_again_from_older_knowledge(
    world: Any,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    await a.write("f", b"1")
    # The kernel opens without a lookup what it remembers from a listing.
    ino = (await b.entries())["f"].ino
    await a.unlink("f")
    assert await world.errno_from(b.fs.open(ino, os.O_RDONLY)) == errno.ESTALE
    assert not await b.exists("f")


async def test_a_name_that_another_node_has_removed_is_made_anew_by_an_open_that_creates(
    world: Any,
) -> None:
    """The kernel takes it for there, and asks for an open: a lock file that comes and goes."""
    a, b = await world.node("a"), await world.node("b")
    for number in range(3):
        await a.write("lock", b"a")
        assert await b.read("lock") == b"a"
        await a.unlink("lock")
        await b.write("lock", b"%d" % number)
        assert world.remote_files() == {"lock": b"%d" % number}


async def test_an_open_asks_the_store_once_and_a_cached_file_is_not_fetched_again(
    world: Any,
) -> None:
    contents = {f"f{number}": os.urandom(10_000) for number in range(10)}
    for name, data in contents.items():
        (world.remote / name).write_bytes(data)
    a = await world.node(
        prefetch_max_bytes=0,
        prefetch_fetch_bytes=65536,
        block_size_bytes=65536,
        entry_timeout_seconds=0.0,
    )
    for expected in ({"stat": 10, "read": 10}, {"stat": 10}):
        a.volume.calls.clear()
        for name, data in contents.items():
            assert await a.read(name) == data
        assert a.volume.calls == expected


async def test_a_lookup_that_did_not_ask_the_store_does_not_serve_an_open(world: Any) -> None:
    a, b = await world.node("a"), await world.node("b")
    await b.write("f", b"1")
    assert (await a.stat("f")).size == 1
    await b.write("f", b"22")
    # Looked up again within the timeout, so from memory; the open asks.
    assert await a.read("f") == b"22"


async def test_each_of_two_opens_takes_the_lookup_that_asked_the_store_for_it(world: Any) -> None:
    a = await world.node("a", entry_timeout_seconds=0.0)
    (world.remote / "f").write_bytes(b"1")
    (ino,) = {(await a.stat("f")).ino for _ in range(2)}
    opened = [(await a.fs.open(ino, os.O_RDONLY)).fh for _ in range(2)]
    assert a.volume.calls["stat"] == 2
    # Once more, as by /proc/self/fd: nobody has asked for this one.
    opened.append((await a.fs.open(ino, os.O_RDONLY)).fh)
    assert a.volume.calls["stat"] == 3
    for fh in opened:
        await a.close(fh)


async def test_an_open_does_not_take_what_was_asked_before_the_newest_lookup(world: Any) -> None:
    a, b = await world.node("a"), await world.node("b")
    await b.write("f", b"1")
    ino = (await a.stat("f")).ino
    await b.write("f", b"22")
    # Answered from memory: this program came after the other node's close.
    assert (await a.stat("f")).ino == ino
    for _ in range(2):
        assert await world.errno_from(a.fs.open(ino, os.O_RDONLY)) == errno.ESTALE


async def test_a_lookup_that_the_kernel_gives_back_at_once_is_nobodys(world: Any) -> None:
    """It asks twice where the name has another inode now, and opens once."""
    a, b = await world.node("a", entry_timeout_seconds=0.0), await world.node("b")
    await b.write("f", b"1")
    (ino,) = {(await a.stat("f")).ino for _ in range(2)}
    await a.fs.forget([(ino, 1)])
    await a.close((await a.fs.open(ino, os.O_RDONLY)).fh)
    await b.write("f", b"22")
    assert await world.errno_from(a.fs.open(ino, os.O_RDONLY)) == errno.ESTALE


async def test_the_lookups_of_other_calls_serve_no_later_open(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await world.node("a"), await world.node("b")
    await b.write("f", b"1")
    ino = (await a.stat("f")).ino
    await b.write("f", b"22")
    monkeypatch.setattr(inodes, "_OPEN_FOLLOWS_SECONDS", 0.0)
    assert await world.errno_from(a.fs.open(ino, os.O_RDONLY)) == errno.ESTALE


async def _try_in_vain(node: Any, other: Any) -> int:
    """An open of `f` that is ESTALE; the inode that the kernel finds when it looks again."""
    await other.write("f", b"1")
    # The second is answered from memory.
    (ino,) = {(await node.stat("f")).ino for _ in range(2)}
    await other.write("f", b"22")
    with pytest.raises(OSError, match="changed") as raised:
        await node.fs.open(ino, os.O_RDONLY)
    assert raised.value.errno == errno.ESTALE
    # The first time it sees that it is another, and looks again.
    (again,) = {(await node.stat("f")).ino for _ in range(2)}
    return again


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("finds", [False, True])
async def test_the_second_try_of_an_open_succeeds_whatever_other_programs_do_meanwhile(
    world: Any, opens: bool, finds: bool
) -> None:
    a, b = await world.node("a"), await world.node("b")
    ino = await _try_in_vain(a, b)
    if opens:
        # The other program is faster.
        assert await a.read("f") == b"22"
    await b.write("f", b"333")
    if finds:
        # Its inode has no name any more.
        assert (await a.stat("f")).size == 3
    fh = (await a.fs.open(ino, os.O_RDONLY)).fh
    assert (await a.fs.getattr(ino)).size == 2
    await a.close(fh)
    assert await a.read("f") == b"333"


async def test_a_second_try_to_write_is_told_that_the_file_was_replaced(world: Any) -> None:
    a, b = await world.node("a"), await world.node("b")
    ino = await _try_in_vain(a, b)
    await b.write("f", b"333")
    await a.stat("f")
    assert await world.errno_from(a.fs.open(ino, os.O_WRONLY | os.O_TRUNC)) == errno.ESTALE


async def test_a_listing_lets_no_open_go_without_a_lookup_while_the_name_is_looked_up(
    world: Any,
) -> None:
    a, b = await world.node("a", directory_timeout_seconds=0.0), await world.node("b")
    await b.write("f", b"1")
    assert (await a.entries())["f"].entry_timeout_seconds > 0
    ino = (await a.stat("f")).ino
    await b.write("f", b"22")
    # Another version is another inode.
    listed = (await a.entries())["f"]
    assert (listed.ino == ino, listed.size, listed.entry_timeout_seconds) == (False, 2, 0.0)


async def test_a_local_create_ends_a_cached_absence_at_once(world: Any) -> None:
    b = await world.node("b", negative_timeout_seconds=1000.0, directory_timeout_seconds=1000.0)
    assert not await b.exists("f")
    assert await b.entries() == {}
    await b.write("f", b"1")
    assert (await b.stat("f")).size == 1
    assert set(await b.entries()) == {"f"}
    await b.unlink("f")
    assert not await b.exists("f")
    assert await b.entries() == {}
    await b.mkdir("d")
    assert set(await b.entries()) == {"d"}


async def test_appending_on_two_nodes_in_turn_loses_nothing(world: Any) -> None:
    a, b = await world.node("a"), await world.node("b")
    for count in range(10):
        await (a if count % 2 else b).append("log", b"%d" % count)
    assert world.remote_files() == {"log": b"0123456789"}


async def test_the_last_close_wins_whole(world: Any) -> None:
    a, b = await world.node("a"), await world.node("b")
    await a.write("f", b"base")
    fa, fb = await a.open("f", os.O_RDWR), await b.open("f", os.O_RDWR)
    await a.fs.write(fa, 0, b"AAAAAA")
    await b.fs.write(fb, 2, b"BB")
    await b.close(fb)
    assert world.remote_files() == {"f": b"baBB"}
    await a.close(fa)
    assert world.remote_files() == {"f": b"AAAAAA"}
    assert await b.read("f") == b"AAAAAA"


async def test_training_data_that_nobody_changes_is_opened_without_asking_again(
    world: Any,
) -> None:
    times = {
        f"{kind}_timeout_seconds": 1000.0
        for kind in ("entry", "attr", "directory", "negative", "open")
    }
    for number in range(20):
        (world.remote / f"f{number}").write_bytes(b"%d" % number)
    b = await world.node("b", **times)
    names = list(await b.entries())
    for _epoch in range(2):
        for name in names:
            assert await b.read(name) == name[1:].encode()
    assert b.volume.calls["stat"] == 0
    assert b.volume.calls["list"] == 1
    assert b.volume.calls["read"] == 20
