"""Renaming directories, which a store can only do file by file."""

from __future__ import annotations

import errno
import os
from typing import Any
from unittest.mock import Mock

import pytest

from trainmount_files.directory import DirectoryVolume
from trainmount_files.errors import Unavailable
from trainmount_files.volume import Capabilities
from trainmount_fuse.attributes import ROOT_INO


async def _make(node: Any, num_files: int) -> dict[str, bytes]:
    await node.mkdir("old")
    await node.mkdir("old/deep")
    contents = {f"old/deep/f{number}": b"%d" % number for number in range(num_files)}
    for path, data in contents.items():
        await node.write(path, data)
    return contents


async def test_a_directory_above_the_limit_is_to_be_copied_and_nothing_of_it_moves(
    world: Any,
) -> None:
    a = await world.node(rename_max_entries=5)
    contents = await _make(a, 5)
    assert await world.errno_from(a.rename("old", "new")) == errno.EXDEV
    assert world.remote_files() == contents
    assert set(await a.entries()) == {"old"}
    await a.unlink("old/deep/f4")
    await a.rename("old", "new")
    del contents["old/deep/f4"]
    assert world.remote_files() == {f"new{path[3:]}": data for path, data in contents.items()}


@pytest.mark.quotes(
    "Cut off by an error, it leaves each file at one of the two places.",
)
async def test_a_move_that_an_error_cuts_off_leaves_each_file_at_one_of_both_places(
    world: Any,
) -> None:
    a = await world.node()
    contents = await _make(a, 20)

    def fail(operation: str, path: str) -> None:
        if operation == "rename" and path.endswith("7"):
            raise Unavailable(operation, path, "HTTP 503")

    a.volume.fault = fail
    assert await world.errno_from(a.rename("old", "new")) == errno.EAGAIN
    a.volume.fault = None
    found: dict[str, bytes] = {}
    for place in ("old", "new"):
        for name in await a.entries(f"{place}/deep"):
            assert name not in found
            found[name] = await a.read(f"{place}/deep/{name}")
    assert found == {path.rpartition("/")[2]: data for path, data in contents.items()}
    assert "f7" in await a.entries("old/deep")


class _Killed(BaseException):
    """The process ends."""


@pytest.mark.quotes(
    "Cut off by the death of the daemon, it is completed.",
)
async def test_a_move_whose_daemon_dies_in_it_is_completed_by_the_successor(world: Any) -> None:
    """The kernel repeats the request."""
    a = await world.node()
    contents = await _make(a, 20)
    ino = (await a.stat("old/deep/f3")).ino

    def kill(operation: str, path: str) -> None:
        if operation == "rename" and path.endswith("5"):
            raise _Killed

    a.volume.after = kill
    with pytest.raises(_Killed):
        await a.fs.rename(ROOT_INO, b"old", ROOT_INO, b"new", 0)
    a.volume.after = None
    await a.crash()
    await a.fs.rename(ROOT_INO, b"old", ROOT_INO, b"new", 0)
    assert world.remote_files() == {f"new{path[3:]}": data for path, data in contents.items()}
    assert set(await a.entries()) == {"new"}
    assert (await a.stat("new/deep/f3")).ino == ino


@pytest.fixture
def copyless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store cannot copy."""
    capabilities = Capabilities(min_part_bytes=1, renames_through_client=True)
    monkeypatch.setattr(DirectoryVolume, "capabilities", property(lambda _: capabilities))


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_file_whose_bytes_are_here_is_moved_without_fetching_it(
    world: Any, copyless: None, is_open: bool
) -> None:
    a = await world.node()
    data = os.urandom(100_000)
    fh = await a.open("f", os.O_CREAT | os.O_WRONLY)
    await a.fs.write(fh, 0, data)
    await a.fs.flush(fh)
    if not is_open:
        await a.fs.release(fh)
    await a.rename("f", "g")
    assert (a.volume.calls["rename"], a.volume.calls["read"]) == (0, 0)
    assert world.remote_files() == {"g": data}
    if is_open:
        await a.fs.write(fh, 0, b"more")
        await a.close(fh)
        assert world.remote_files() == {"g": b"more" + data[4:]}
        assert set(await a.entries()) == {"g"}


async def test_a_file_whose_bytes_are_not_here_is_moved_by_the_client_of_the_store(
    world: Any, copyless: None
) -> None:
    (world.remote / "f").write_bytes(b"bytes" * 10_000)
    a = await world.node()
    await a.rename("f", "g")
    assert a.volume.calls["rename"] == 1
    assert world.remote_files() == {"g": b"bytes" * 10_000}


async def test_a_disk_without_room_for_a_copy_hinders_no_move(
    world: Any, copyless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await world.node()
    await a.write("f", b"bytes" * 10_000)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(a.fs.core.staging, "reserve", Mock(side_effect=full))
    await a.rename("f", "g")
    assert a.volume.calls["rename"] == 1
    assert world.remote_files() == {"g": b"bytes" * 10_000}


async def test_a_file_that_changes_while_it_is_moved_from_here_stays_in_its_place(
    world: Any, copyless: None
) -> None:
    a = await world.node()
    await a.write("f", b"bytes" * 10_000)

    def change(operation: str, path: str) -> None:
        if (operation, path) == ("upload", "g"):
            (world.remote / "f").write_bytes(b"of another node")

    a.volume.after = change
    assert await world.errno_from(a.rename("f", "g")) == errno.ESTALE
    assert world.remote_files() == {"f": b"of another node", "g": b"bytes" * 10_000}
