"""Names, directories and errors of one mount."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest
import trio

from trainmount_files.errors import Unavailable, Unsupported
from trainmount_fuse.attributes import ROOT_INO, AttributeChanges


async def test_directories_are_made_listed_and_removed(world: Any) -> None:
    a = await world.node()
    await a.mkdir("d")
    await a.mkdir("d/e")
    await a.write("d/f", b"1")
    await a.write("d/e/g", b"22")
    assert {n: (x.is_directory, x.size) for n, x in (await a.entries("d")).items()} == {
        "e": (True, 0),
        "f": (False, 1),
    }
    assert (world.remote / "d" / "e" / "g").read_bytes() == b"22"
    await a.unlink("d/e/g")
    await a.rmdir("d/e")
    await a.unlink("d/f")
    await a.rmdir("d")
    assert await a.entries() == {}
    assert not (world.remote / "d").exists()


async def test_errors_of_names_have_their_usual_numbers(world: Any) -> None:
    """Although the store's call to make a directory succeeds where one is."""
    a = await world.node()
    await a.mkdir("d")
    await a.write("d/f", b"x")
    assert await world.errno_from(a.mkdir("d")) == errno.EEXIST
    assert await world.errno_from(a.mkdir("d/f")) == errno.EEXIST
    assert await world.errno_from(a.rmdir("d")) == errno.ENOTEMPTY
    assert await world.errno_from(a.rmdir("d/f")) == errno.ENOTDIR
    assert await world.errno_from(a.unlink("d")) == errno.EISDIR
    assert await world.errno_from(a.unlink("none")) == errno.ENOENT
    assert await world.errno_from(a.rmdir("none")) == errno.ENOENT
    assert await world.errno_from(a.rename("none", "other")) == errno.ENOENT
    assert await world.errno_from(a.rename("d/f", "d", 0)) == errno.EISDIR
    assert await world.errno_from(a.rename("d", "d/f")) == errno.ENOTDIR
    assert await world.errno_from(a.rename("d/f", "x", 2)) == errno.EINVAL
    assert await world.errno_from(a.open("d", os.O_WRONLY)) == errno.EISDIR
    name = b"n" * 256
    assert await world.errno_from(a.fs.lookup(ROOT_INO, name)) == errno.ENAMETOOLONG
    assert await world.errno_from(a.fs.lookup(ROOT_INO, b"\xff")) == errno.EILSEQ
    assert await world.errno_from(a.fs.lookup((await a.stat("d/f")).ino, b"x")) == errno.ENOTDIR
    assert await world.errno_from(a.fs.getattr(99_999)) == errno.ESTALE
    assert await world.errno_from(a.fs.read(99_999, 0, 1)) == errno.EBADF


@pytest.mark.quotes(
    "EROFS | every change below a mount with `--read-only`",
)
async def test_a_read_only_mount_refuses_every_change(world: Any) -> None:
    (world.remote / "f").write_bytes(b"data")
    (world.remote / "d").mkdir()
    a = await world.node(read_only=True)
    assert await a.read("f") == b"data"
    ino = (await a.stat("f")).ino
    for change in (
        a.open("f", os.O_WRONLY),
        a.open("f", os.O_RDONLY | os.O_TRUNC),
        a.open("new", os.O_CREAT | os.O_WRONLY),
        a.mkdir("e"),
        a.rmdir("d"),
        a.unlink("f"),
        a.rename("f", "g"),
        a.fs.setattr(ino, AttributeChanges(mode=0o600)),
        a.fs.setattr(ino, AttributeChanges(size=0)),
    ):
        assert await world.errno_from(change) == errno.EROFS
    assert world.remote_files() == {"f": b"data"}


async def test_a_file_not_uploaded_yet_shows_in_lookups_and_listings(world: Any) -> None:
    a = await world.node()
    assert await a.entries() == {}
    fh = await a.open("new", os.O_CREAT | os.O_WRONLY)
    await a.fs.write(fh, 0, b"12345")
    assert {name: one.size for name, one in (await a.entries()).items()} == {"new": 5}
    assert (await a.stat("new")).size == 5
    assert world.remote_files() == {}
    assert await world.errno_from(a.rmdir("new")) == errno.ENOTDIR
    await a.close(fh)
    assert set(await a.entries()) == {"new"}


async def test_a_directory_with_a_file_not_uploaded_yet_is_not_empty(world: Any) -> None:
    a = await world.node()
    await a.mkdir("d")
    fh = await a.open("d/new", os.O_CREAT | os.O_WRONLY)
    assert await world.errno_from(a.rmdir("d")) == errno.ENOTEMPTY
    await a.close(fh)
    assert world.remote_files() == {"d/new": b""}


async def test_renaming_a_file_not_uploaded_yet_asks_nothing_of_the_store(world: Any) -> None:
    a = await world.node()
    fh = await a.open("tmp", os.O_CREAT | os.O_WRONLY)
    await a.fs.write(fh, 0, b"data")
    ino = (await a.stat("tmp")).ino
    await a.rename("tmp", "final")
    assert a.volume.calls["rename"] == a.volume.calls["upload"] == 0
    assert set(await a.entries()) == {"final"}
    assert (await a.stat("final")).ino == ino
    await a.close(fh)
    assert world.remote_files() == {"final": b"data"}


async def test_rename_over_a_file_replaces_it_and_keeps_the_inode(world: Any) -> None:
    a = await world.node()
    old, new = os.urandom(30_000), os.urandom(40_000)
    await a.write("target", old)
    reader = await a.open("target")
    await a.write("target.tmp", new)
    ino = (await a.stat("target.tmp")).ino
    await a.rename("target.tmp", "target")
    assert world.remote_files() == {"target": new}
    assert (await a.stat("target")).ino == ino
    assert await a.read("target") == new
    assert not await a.exists("target.tmp")
    # Who had the replaced file open goes on reading it.
    assert await a.read_handle(reader) == old
    await a.close(reader)
    assert await world.errno_from(a.rename("target", "target", 1)) == 0
    await a.write("third", b"3")
    assert await world.errno_from(a.rename("target", "third", 1)) == errno.EEXIST


async def test_an_empty_file_and_a_rename_over_it_end_with_the_renamed_bytes(world: Any) -> None:
    """Without a slow store: a part file is renamed over the empty one made in its place."""
    a = await world.node()
    data = os.urandom(50_000)
    await a.write("t.part", data)
    await a.write("t", b"")
    await a.rename("t.part", "t")
    assert world.remote_files() == {"t": data}
    await a.remount(cache_dir=world.tmp_path / "other-cache")
    assert await a.read("t") == data
    assert set(await a.entries()) == {"t"}


async def test_a_renamed_file_keeps_its_cached_blocks_and_its_open_handles(world: Any) -> None:
    data = os.urandom(40_000)
    (world.remote / "f").write_bytes(data)
    a = await world.node()
    assert await a.read("f") == data
    fh = await a.open("f")
    fetched = a.volume.calls["read"]
    await a.rename("f", "g")
    assert await a.read_handle(fh) == data
    assert await a.read("g") == data
    assert a.volume.calls["read"] == fetched
    await a.close(fh)


async def test_renaming_a_directory_moves_what_is_in_it_uploaded_or_not(world: Any) -> None:
    a = await world.node()
    await a.mkdir("old")
    await a.mkdir("old/deep")
    await a.write("old/deep/f", b"uploaded")
    reader = await a.open("old/deep/f")
    fh = await a.open("old/new", os.O_CREAT | os.O_WRONLY)
    await a.fs.write(fh, 0, b"not yet")
    ino = (await a.stat("old/deep/f")).ino
    await a.mkdir("empty")
    assert await world.errno_from(a.rename("old", "old/deep/x")) == errno.EINVAL
    await a.rename("old", "empty")
    await a.close(fh)
    assert world.remote_files() == {"empty/deep/f": b"uploaded", "empty/new": b"not yet"}
    assert (await a.stat("empty/deep/f")).ino == ino
    assert await a.read_handle(reader) == b"uploaded"
    await a.close(reader)
    assert set(await a.entries()) == {"empty"}
    await a.mkdir("full")
    await a.write("full/x", b"")
    assert await world.errno_from(a.rename("empty", "full")) == errno.ENOTEMPTY


@pytest.mark.quotes(
    "Inode numbers stay over listings, `rename` and remounts.",
)
async def test_inode_numbers_stay_over_listings_renames_and_restarts(world: Any) -> None:
    """St_ino is the same each time, d_ino equals it, a rename keeps it."""
    for number in range(100):
        (world.remote / f"f{number}").write_bytes(b"x" * number)
    times = {f"{kind}_timeout_seconds": 0.0 for kind in ("entry", "attr", "directory", "negative")}
    a = await world.node(**times)
    first = {name: one.ino for name, one in (await a.entries()).items()}
    assert len(first) == len(set(first.values())) == 100
    assert {name: (await a.stat(name)).ino for name in first} == first
    await a.fs.forget([(ino, 1) for ino in first.values()])
    await a.rename("f7", "g")
    expected = {**first, "g": first["f7"]}
    del expected["f7"]
    for restart in (a.crash, a.remount, a.crash):
        await restart()
        assert {name: one.ino for name, one in (await a.entries()).items()} == expected
        assert (await a.stat("g")).ino == first["f7"]


async def test_an_editor_that_saves_twice_sees_the_time_it_saw_before(world: Any) -> None:
    """Nothing but the save itself changes what `stat` shows."""
    a = await world.node(attr_timeout_seconds=0.0, entry_timeout_seconds=0.0)
    for text in (b"first", b"second"):
        await a.write("f", text)
        after_close = await a.stat("f")
        assert await a.entries()
        await a.crash()
        again = await a.stat("f")
        assert (again.mtime_ns, again.ino) == (after_close.mtime_ns, after_close.ino)


async def test_a_listing_goes_on_in_a_successor_without_gap_or_double(world: Any) -> None:
    for number in range(40):
        (world.remote / f"f{number:02}").write_bytes(b"")
    a = await world.node()
    fh = await a.fs.opendir(ROOT_INO)
    page = [entry for _, entry in zip(range(15), await a.fs.readdir(fh, 0), strict=False)]
    await a.crash()
    rest = list(await a.fs.readdir(fh, page[-1].next_id))
    assert [entry.name for entry in page + rest] == [
        b".",
        b"..",
        *(b"f%02d" % n for n in range(40)),
    ]
    await a.fs.releasedir(fh)
    assert await world.errno_from(a.fs.readdir(fh, 0)) == errno.EBADF


async def test_names_that_no_file_system_can_show_are_hidden_and_the_rest_is_listed(
    world: Any,
) -> None:
    (world.remote / "ok").write_bytes(b"1")
    (world.remote / "with\nnewline").write_bytes(b"2")
    a = await world.node()
    assert set(await a.entries()) == {"ok", "with\nnewline"}
    assert await a.read("with\nnewline") == b"2"


async def test_a_store_that_does_not_answer_is_no_missing_file(world: Any) -> None:
    """EAGAIN, never ENOENT, and nothing of it is remembered."""
    (world.remote / "f").write_bytes(b"there")
    a = await world.node()

    def refuse(operation: str, path: str) -> None:
        raise Unavailable(operation, path, "answered 503")

    a.volume.fault = refuse
    assert await world.errno_from(a.stat("f")) == errno.EAGAIN
    assert await world.errno_from(a.entries()) == errno.EAGAIN
    a.volume.fault = None
    assert await a.read("f") == b"there"
    assert set(await a.entries()) == {"f"}


@pytest.mark.parametrize("kind", ["file", "directory"])
async def test_a_name_that_changes_its_kind_gets_another_inode(world: Any, kind: str) -> None:
    a = await world.node(entry_timeout_seconds=0.0)
    path = world.remote / "x"
    path.mkdir() if kind == "file" else path.write_bytes(b"x")
    before = await a.stat("x")
    path.rmdir() if kind == "file" else path.unlink()
    path.write_bytes(b"x") if kind == "file" else path.mkdir()
    after = await a.stat("x")
    assert after.is_directory == (kind == "directory")
    assert after.ino != before.ino


async def test_a_listing_that_was_asked_for_before_a_removal_does_not_bring_the_name_back(
    world: Any,
) -> None:
    a = await world.node()
    for name in ("kept", "removed", "replaced"):
        await a.write(name, b"old")
    await a.crash()
    listed, go_on = threading.Event(), threading.Event()

    def hold(operation: str, path: str) -> None:
        if operation == "list":
            listed.set()
            go_on.wait(30)

    a.volume.after = hold
    seen: dict[str, int] = {}

    async def list_slowly() -> None:
        seen.update({name: one.size for name, one in (await a.entries()).items()})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(list_slowly)
        await a.settled(listed.is_set, "the store has made its listing")
        await a.unlink("removed")
        await a.write("replaced", b"newer")
        go_on.set()
    assert seen == {"kept": 3, "replaced": 5}
    assert not await a.exists("removed")
    assert (await a.stat("replaced")).size == 5
    assert {name: one.size for name, one in (await a.entries()).items()} == seen


async def test_statfs_shows_room(world: Any) -> None:
    a = await world.node()
    values = await a.fs.statfs()
    assert values.block_size * values.num_free_blocks == 1 << 50
    assert values.name_max == 255


async def test_forgetting_unknown_numbers_is_harmless(world: Any) -> None:
    a = await world.node()
    await a.write("f", b"1")
    await a.fs.forget([(12345, 3), ((await a.stat("f")).ino, 999), (ROOT_INO, 1)])
    assert await a.read("f") == b"1"


async def test_what_the_store_cannot_move_is_to_be_copied(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one volume to another: mv(1) copies after EXDEV, into a directory that it makes."""
    a = await world.node()
    await a.mkdir("d")
    await a.mkdir("d/e")
    await a.write("d/e/f", b"1")

    def refuse(source: str, destination: str) -> None:
        raise Unsupported("rename", source, "cannot be moved")

    monkeypatch.setattr(a.volume, "rename", refuse)

    assert await world.errno_from(a.rename("d/e/f", "g")) == errno.EXDEV
    assert await world.errno_from(a.rename("d", "other")) == errno.EXDEV
    assert sorted(await a.entries()) == ["d"]
    assert await a.read("d/e/f") == b"1"
