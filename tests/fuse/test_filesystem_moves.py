"""Renaming directories, which a store can only do file by file."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from trainmount_files.errors import Unavailable
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
