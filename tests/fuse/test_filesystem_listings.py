"""Directories as programs read them: page by page, at positions that stay, in bounded memory."""

from __future__ import annotations

import errno
import threading
from itertools import islice
from typing import Any

import pytest
import trio

from trainmount_files.errors import InvalidRequest, Unavailable
from trainmount_files.volume import FileStat, Page
from trainmount_fuse.attributes import ROOT_INO
from trainmount_fuse.names import inodes


def _names(entries: list[Any]) -> list[str]:
    return [entry.name.decode() for entry in entries]


async def _read_on(node: Any, fh: int, start: int = 0, most: int = 7) -> list[Any]:
    """From a position to the end, as the kernel does it: some entries a call."""
    found: list[Any] = []
    while page := list(islice(await node.fs.readdir(fh, start), most)):
        found += page
        start = page[-1].next_id
    return found


def _paged(node: Any, names: list[str], size: int) -> None:
    """Make the store list these files of no directory, `size` a page."""

    def list_page(path: str, page_token: str | None = None) -> Page:
        node.volume.calls["list"] += 1
        start = int(page_token or 0)
        stats = [FileStat(name, False, 5, 10**18, "v") for name in names[start : start + size]]
        more = start + size < len(names)
        return Page(tuple(stats), str(start + size) if more else None)

    node.volume.list_page = list_page


async def test_a_directory_shows_itself_and_its_parent_first(world: Any) -> None:
    a = await world.node()
    await a.mkdir("d")
    await a.mkdir("d/e")
    inos = {path: (await a.stat(path)).ino for path in ("d", "d/e")}
    fh = await a.fs.opendir(inos["d/e"])
    shown = [(one.name, one.attributes.ino) for one in await a.fs.readdir(fh, 0)]
    assert shown == [(b".", inos["d/e"]), (b"..", inos["d"])]
    root = await a.fs.opendir(ROOT_INO)
    first = list(await a.fs.readdir(root, 0))[:2]
    assert [(one.name, one.attributes.ino) for one in first] == [(b".", 1), (b"..", 1)]
    assert all(one.attributes.is_directory for one in first)


async def test_first_entries_come_after_one_page_of_the_store(world: Any) -> None:
    a = await world.node()
    names = [f"f{number:03}" for number in range(100)]
    _paged(a, names, 10)
    fh = await a.fs.opendir(ROOT_INO)
    first = list(await a.fs.readdir(fh, 0))
    assert _names(first) == [".", "..", *names[:10]]
    assert a.volume.calls["list"] == 1
    assert _names(await _read_on(a, fh, first[-1].next_id)) == names[10:]
    assert a.volume.calls["list"] == 10


async def test_readers_of_one_directory_share_the_pages_of_one_reading(world: Any) -> None:
    a = await world.node(directory_timeout_seconds=1000.0)
    names = [f"f{number:03}" for number in range(50)]
    _paged(a, names, 10)
    handles = [await a.fs.opendir(ROOT_INO) for _ in range(3)]
    for fh in handles:
        await _read_on(a, fh, most=3)
    assert a.volume.calls["list"] == 5
    assert _names(await _read_on(a, handles[0])) == [".", "..", *names]
    assert a.volume.calls["list"] == 5


@pytest.mark.quotes(
    "Positions of `telldir` stay valid while names come and go, and when the daemon dies.",
)
async def test_a_position_means_the_same_while_names_come_and_go_and_daemons_die(
    world: Any,
) -> None:
    a = await world.node(directory_timeout_seconds=0.0)
    names = [f"f{number:02}" for number in range(40)]
    for name in names:
        (world.remote / name).write_bytes(b"x")
    fh = await a.fs.opendir(ROOT_INO)
    page = list(islice(await a.fs.readdir(fh, 0), 20))
    told = page[-1].next_id
    assert page[-1].name == b"f17"
    for name in ("f00", "f17", "f20"):
        await a.unlink(name)
    (world.remote / "a-new").write_bytes(b"")
    expected = [name for name in names[18:] if name != "f20"]
    for _ in range(2):
        assert _names(await _read_on(a, fh, told)) == expected
        # Back to a position before (seekdir): what is gone is left out, nothing is doubled.
        assert _names(await _read_on(a, fh, page[4].next_id))[:13] == names[3:16]
        await a.crash()
    assert _names(await _read_on(a, fh)) == [
        *(".", "..", "a-new"),
        *(name for name in names if name not in ("f00", "f17", "f20")),
    ]


async def test_a_listing_of_many_pages_goes_on_in_a_successor(world: Any) -> None:
    a = await world.node()
    names = [f"f{number:03}" for number in range(60)]
    _paged(a, names, 10)
    fh = await a.fs.opendir(ROOT_INO)
    first = await _read_on_until(a, fh, 25)
    await a.crash()
    a.volume.calls.clear()
    rest = await _read_on(a, fh, first[-1].next_id)
    assert _names(first + rest) == [".", "..", *names]
    # The pages from before are not asked for again.
    assert a.volume.calls["list"] == 3


async def _read_on_until(node: Any, fh: int, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        start = found[-1].next_id if found else 0
        found += list(islice(await node.fs.readdir(fh, start), count - len(found)))
    return found


async def test_a_successor_whose_page_token_is_refused_lists_anew_and_doubles_nothing(
    world: Any,
) -> None:
    a = await world.node()
    names = [f"f{number:03}" for number in range(60)]
    _paged(a, names, 10)
    fh = await a.fs.opendir(ROOT_INO)
    first = await _read_on_until(a, fh, 25)
    await a.crash()
    answer = a.volume.list_page
    issued: set[str | None] = {None}

    def forgetful(path: str, page_token: str | None = None) -> Page:
        if page_token not in issued:
            raise InvalidRequest("list", path, "unknown page token")
        page = answer(path, page_token)
        issued.add(page.next_page_token)
        return page

    a.volume.list_page = forgetful
    rest = await _read_on(a, fh, first[-1].next_id)
    assert _names(first + rest) == [".", "..", *names]


async def test_a_page_of_which_nothing_is_left_is_not_the_end(world: Any) -> None:
    a = await world.node()
    for number in range(3):
        (world.remote / f"f{number}").write_bytes(b"")
    names = [f"f{number}" for number in range(3)] + [f"g{number}" for number in range(3)]
    _paged(a, names, 3)
    fh = await a.fs.opendir(ROOT_INO)
    first = await _read_on_until(a, fh, 2)
    list(await a.fs.readdir(fh, first[-1].next_id))
    for number in range(3):
        await a.unlink(f"f{number}")
    assert _names(await _read_on(a, fh, first[-1].next_id)) == ["g0", "g1", "g2"]


async def test_a_file_made_while_its_directory_is_read_shows_once(world: Any) -> None:
    a = await world.node()
    for name in ("a", "z"):
        (world.remote / name).write_bytes(b"1")
    fh = await a.fs.opendir(ROOT_INO)
    _paged(a, ["a", "z"], 1)
    first = await _read_on_until(a, fh, 3)
    await a.write("a", b"changed")
    await a.write("new", b"22")
    rest = await _read_on(a, fh, first[-1].next_id)
    assert [(one.name, one.attributes.size) for one in rest] == [(b"z", 5), (b"new", 2)]


async def test_memory_of_a_large_directory_does_not_grow_with_it(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inodes, "_MAX_IN_MEMORY", 1000)
    monkeypatch.setattr("trainmount_fuse.names.readings.MAX_KEPT", 1000)
    a = await world.node()
    names = [f"f{number:05}" for number in range(5000)]
    _paged(a, names, 500)
    fh = await a.fs.opendir(ROOT_INO)
    shown = await _read_on(a, fh, most=100)
    assert _names(shown) == [".", "..", *names]
    core = a.fs._core
    assert len(core.inodes.in_memory()) <= 1500
    assert core.metadata.statistics().num_entries == 0
    # Those that left memory are still valid.
    assert core.inodes.get(shown[2].attributes.ino).name == "f00000"
    await a.fs.releasedir(fh)
    assert list((a.settings.state_dir / "listings").iterdir()) == []


async def test_numbers_the_kernel_forgot_leave_the_database_and_come_back_the_same(
    world: Any,
) -> None:
    for number in range(50):
        (world.remote / f"f{number}").write_bytes(b"x")
    a = await world.node()
    await a.write("renamed-before", b"1")
    await a.rename("renamed-before", "renamed")
    first = {name: one.ino for name, one in (await a.entries()).items()}

    def num_rows() -> int:
        return int(a.fs._core.inodes._database.execute("SELECT count(*) FROM inodes").fetchone()[0])

    assert num_rows() == 52
    await a.fs.forget([(ino, 9) for ino in first.values()])
    # The root, and what the name alone would not give back.
    assert num_rows() == 2
    assert {name: one.ino for name, one in (await a.entries()).items()} == first
    await a.remount()
    assert num_rows() == 2
    assert {name: one.ino for name, one in (await a.entries()).items()} == first


async def test_a_number_that_was_forgotten_by_mistake_is_found_again_by_its_name(
    world: Any,
) -> None:
    (world.remote / "f").write_bytes(b"x")
    a = await world.node()
    ino = (await a.stat("f")).ino
    await a.fs.forget([(ino, 1)])
    assert await world.errno_from(a.fs.getattr(ino)) == errno.ESTALE
    assert (await a.stat("f")).ino == ino


async def test_many_names_of_a_directory_asked_for_at_once_take_one_listing(world: Any) -> None:
    a = await world.node(num_worker_threads=16, entry_timeout_seconds=1000.0)
    await a.mkdir("d")
    for number in range(320):
        (world.remote / "d" / f"f{number:03}").write_bytes(b"x" * number)
    ino = (await a.stat("d")).ino
    a.volume.calls.clear()
    is_open = threading.Event()
    a.volume.fault = lambda _operation, _path: is_open.wait(30)
    sizes: dict[int, int] = {}

    async def look_up(begin: int) -> None:
        for number in range(begin, 320, 16):
            sizes[number] = (await a.fs.lookup(ino, b"f%03d" % number)).size

    async with trio.open_nursery() as nursery:
        for begin in range(16):
            nursery.start_soon(look_up, begin)
        await a.settled(lambda: a.volume.calls["list"] == 1, "it is listed")
        is_open.set()
    assert sizes == {number: number for number in range(320)}
    assert a.volume.calls["list"] == 1
    assert a.volume.calls["stat"] <= 4


@pytest.mark.parametrize(("num_at_once", "is_listed"), [(7, False), (30, True)])
async def test_a_directory_of_several_pages_is_listed_only_for_so_many_more_names(
    world: Any, num_at_once: int, is_listed: bool
) -> None:
    a = await world.node(num_worker_threads=32, entry_timeout_seconds=0.0)
    for number in range(1_500):
        (world.remote / f"f{number:04}").write_bytes(b"x")
    assert len(await a.entries()) == 1_500
    a.volume.calls.clear()
    is_open = threading.Event()
    a.volume.fault = lambda _operation, _path: is_open.wait(30)
    sizes: list[int] = []

    async def look_up(number: int) -> None:
        sizes.append((await a.fs.lookup(ROOT_INO, b"f%04d" % number)).size)

    async with trio.open_nursery() as nursery:
        for number in range(num_at_once):
            nursery.start_soon(look_up, number)
        first = "list" if is_listed else "stat"
        goal = 1 if is_listed else num_at_once
        await a.settled(lambda: a.volume.calls[first] == goal, "the store is asked")
        is_open.set()
    assert sizes == [1] * num_at_once
    assert bool(a.volume.calls["list"]) == is_listed
    assert a.volume.calls["stat"] <= 8


async def test_names_looked_up_one_after_the_other_are_soon_answered_by_a_listing(
    world: Any,
) -> None:
    a = await world.node(entry_timeout_seconds=1000.0)
    for number in range(200):
        (world.remote / f"f{number:03}").write_bytes(b"x" * number)
    a.volume.calls.clear()
    sizes = [(await a.stat(f"f{number:03}")).size for number in range(200)]
    assert sizes == list(range(200))
    assert (a.volume.calls["list"], a.volume.calls["stat"]) == (1, 16)


async def test_a_listing_that_does_not_count_for_others_is_not_asked_for(world: Any) -> None:
    """Names are believed for no time; or each is looked up by an `open`, which takes no listing's
    word.
    """
    for number in range(60):
        (world.remote / f"f{number:02}").write_bytes(b"x")
    a = await world.node("a", entry_timeout_seconds=0.0)
    a.volume.calls.clear()
    for number in range(60):
        assert (await a.stat(f"f{number:02}")).size == 1
    assert (a.volume.calls["list"], a.volume.calls["stat"]) == (0, 60)
    b = await world.node("b", entry_timeout_seconds=1000.0)
    b.volume.calls.clear()
    for number in range(60):
        await b.fs.release(await b.open(f"f{number:02}"))
    assert (b.volume.calls["list"], b.volume.calls["stat"]) == (0, 60)


@pytest.mark.parametrize(("num_files", "num_stats"), [(1_500, 16), (4_500, 100)])
async def test_a_directory_that_proves_large_is_asked_for_its_names_one_by_one(
    world: Any, num_files: int, num_stats: int
) -> None:
    """Two pages tell whether it is, once."""
    a = await world.node(entry_timeout_seconds=1000.0)
    for number in range(num_files):
        (world.remote / f"f{number:04}").write_bytes(b"")
    a.volume.calls.clear()
    for number in range(100):
        await a.stat(f"f{number:04}")
    assert (a.volume.calls["list"], a.volume.calls["stat"]) == (2, num_stats)


async def test_opens_at_once_each_have_an_answer_from_after_they_came(world: Any) -> None:
    """Also where one listing answers for many of them."""
    a, b = await world.node("a", num_worker_threads=16), await world.node("b")
    names = [f"f{number}" for number in range(12)]
    for name in names:
        await b.write(name, b"1")
    assert set(await a.entries()) == set(names)
    for length in (2, 3, 4):
        for name in names:
            await b.write(name, b"x" * length)
        read: dict[str, bytes] = {}

        async def read_one(name: str, read: dict[str, bytes] = read) -> None:
            read[name] = await a.read(name)

        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(read_one, name)
        assert read == dict.fromkeys(names, b"x" * length)


async def test_a_large_directory_is_not_listed_for_a_few_names(world: Any) -> None:
    a = await world.node(num_worker_threads=16)
    names = [f"f{number:03}" for number in range(40)]
    for name in names:
        (world.remote / name).write_bytes(b"22")
    _paged(a, names, 10)
    sizes: list[int] = []

    async def look_up(name: str) -> None:
        sizes.append((await a.fs.lookup(ROOT_INO, name.encode())).size)

    for _ in range(2):
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(look_up, name)
    assert sizes == [2] * 80
    assert a.volume.calls["list"] == 2


async def test_a_store_that_is_down_leaves_no_absence_and_no_half_listing(world: Any) -> None:
    """Its errors are EAGAIN each time, and what is there shows as soon as it answers."""
    a = await world.node(negative_timeout_seconds=1000.0, directory_timeout_seconds=1000.0)
    names = [f"f{number}" for number in range(4)]
    for name in names:
        (world.remote / name).write_bytes(b"x")
    _paged(a, names, 2)
    good = a.volume.list_page

    def fail(operation: str, path: str) -> None:
        raise Unavailable(operation, path, "HTTP 503")

    def fail_behind_the_first_page(path: str, page_token: str | None = None) -> Page:
        if page_token is not None:
            fail("list", path)
        return good(path, page_token)

    a.volume.fault = fail
    for _ in range(2):
        assert await world.errno_from(a.fs.lookup(ROOT_INO, b"f0")) == errno.EAGAIN
    a.volume.list_page = fail_behind_the_first_page
    fh = await a.fs.opendir(ROOT_INO)
    first = list(await a.fs.readdir(fh, 0))
    for _ in range(2):
        again = a.fs.readdir(fh, first[-1].next_id)
        assert await world.errno_from(again) == errno.EAGAIN
    a.volume.fault, a.volume.list_page = None, good
    assert _names(await _read_on(a, fh, first[-1].next_id)) == names[2:]
    assert (await a.stat("f0")).size == 5
    assert set(await a.entries()) == set(names)
