"""Files that are sent while they are written: what shows at the path, and what falls back."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from trainmount_files.errors import (
    InvalidRequest,
    PermissionDenied,
    TooLarge,
    Unavailable,
    VolumeError,
)
from trainmount_fuse.attributes import AttributeChanges
from trainmount_fuse.writes.staging import WritingStatistics

KIB = 1 << 10
PART = 64 * KIB
NEW = os.O_CREAT | os.O_WRONLY


async def _node(world: Any, name: str = "a") -> Any:
    return await world.node(name, part_bytes=PART, stream_from_bytes=2 * PART)


async def _written(node: Any, fh: int, data: bytes, start: int = 0) -> None:
    for offset in range(start, len(data), 16 * KIB):
        await node.fs.write(fh, offset, data[offset : offset + 16 * KIB])


async def _sent(node: Any, num_parts: int) -> None:
    await node.settled(lambda: node.volume.calls["part"] >= num_parts, f"{num_parts} parts sent")


def _statistics(node: Any) -> WritingStatistics:
    return node.fs.core.staging.statistics()  # type: ignore[no-any-return]


async def test_parts_are_sent_while_the_file_is_written_and_show_at_close_only(world: Any) -> None:
    a = await _node(world)
    data = os.urandom(5 * PART + 1000)
    fh = await a.open("f", NEW)
    await _written(a, fh, data)
    await _sent(a, 5)
    assert world.remote_files() == {}
    await a.close(fh)
    assert world.remote_files() == {"f": data}
    calls = a.volume.calls
    assert (calls["start"], calls["part"], calls["complete"], calls["upload"]) == (1, 6, 1, 0)
    assert a.volume.begun == set()
    seen = _statistics(a)
    assert (seen.num_uploads, seen.uploaded_bytes, seen.streamed_bytes) == (1, len(data), 5 * PART)
    assert (seen.num_dirty_files, seen.num_streams_given_up) == (0, 0)


async def test_a_file_below_the_size_goes_in_one_request(world: Any) -> None:
    a = await _node(world)
    await a.write("f", os.urandom(2 * PART - 1))
    assert (a.volume.calls["start"], a.volume.calls["upload"]) == (0, 1)


async def test_a_file_whose_last_part_is_whole_has_no_empty_one(world: Any) -> None:
    a = await _node(world)
    data = os.urandom(3 * PART)
    await a.write("f", data)
    assert world.remote_files() == {"f": data}
    assert (a.volume.calls["part"], a.volume.calls["upload"]) == (3, 0)


async def _overwrite(a: Any, fh: int, data: bytearray) -> None:
    data[10:15] = b"other"
    await a.fs.write(fh, 10, b"other")


async def _cut(a: Any, fh: int, data: bytearray) -> None:
    del data[PART:]
    ino = (await a.stat("f")).ino
    await a.fs.setattr(ino, AttributeChanges(size=PART), fh)


async def _cut_to_nothing(a: Any, fh: int, data: bytearray) -> None:
    data.clear()
    ino = (await a.stat("f")).ino
    await a.fs.setattr(ino, AttributeChanges(size=0), fh)


@pytest.mark.parametrize("change", [_overwrite, _cut, _cut_to_nothing])
async def test_a_change_of_sent_bytes_gives_the_parts_up_and_the_file_goes_whole(
    world: Any, change: Callable[[Any, int, bytearray], Awaitable[None]]
) -> None:
    a = await _node(world)
    data = bytearray(os.urandom(4 * PART))
    fh = await a.open("f", NEW)
    await _written(a, fh, bytes(data))
    await _sent(a, 3)
    await change(a, fh, data)
    await a.settled(lambda: not a.volume.begun, "what was begun is aborted")
    await a.close(fh)
    assert world.remote_files() == {"f": bytes(data)}
    assert a.volume.begun == set()
    assert _statistics(a).num_streams_given_up == 1


async def test_a_change_of_bytes_that_are_not_sent_goes_on(world: Any) -> None:
    a = await _node(world)
    data = bytearray(os.urandom(3 * PART + 1000))
    fh = await a.open("f", NEW)
    await _written(a, fh, bytes(data))
    data[3 * PART + 10 : 3 * PART + 15] = b"other"
    await a.fs.write(fh, 3 * PART + 10, b"other")
    await a.fs.setattr((await a.stat("f")).ino, AttributeChanges(size=5 * PART), fh)
    await a.close(fh)
    assert world.remote_files() == {"f": bytes(data).ljust(5 * PART, b"\0")}
    assert (a.volume.calls["start"], a.volume.calls["upload"]) == (1, 0)


async def test_a_file_written_from_its_end_is_not_sent_ahead(world: Any) -> None:
    a = await _node(world)
    data = os.urandom(4 * PART)
    fh = await a.open("f", NEW)
    for offset in reversed(range(0, len(data), 16 * KIB)):
        await a.fs.write(fh, offset, data[offset : offset + 16 * KIB])
    assert a.volume.calls["start"] == 0
    await a.close(fh)
    assert world.remote_files() == {"f": data}


async def test_a_rename_of_the_open_file_leads_to_the_new_name_only(world: Any) -> None:
    a = await _node(world)
    data = os.urandom(4 * PART)
    fh = await a.open("f", NEW)
    await _written(a, fh, data[: 3 * PART])
    await _sent(a, 3)
    await a.rename("f", "g")
    await _written(a, fh, data, start=3 * PART)
    await a.close(fh)
    await a.fs.stop()
    assert world.remote_files() == {"g": data}
    assert a.volume.begun == set()


async def test_an_unlink_of_the_open_file_leaves_nothing(world: Any) -> None:
    a = await _node(world)
    data = os.urandom(4 * PART)
    fh = await a.open("f", os.O_CREAT | os.O_RDWR)
    await _written(a, fh, data)
    await _sent(a, 3)
    await a.unlink("f")
    await _written(a, fh, data * 2, start=4 * PART)
    assert await a.read_handle(fh) == data * 2
    await a.close(fh)
    await a.fs.stop()
    assert (world.remote_files(), a.staging_files(), a.volume.begun) == ({}, [], set())
    assert a.volume.calls["complete"] == a.volume.calls["upload"] == 0


async def test_what_a_dead_daemon_had_begun_is_aborted_and_the_file_goes_on(world: Any) -> None:
    a = await _node(world)
    data = os.urandom(6 * PART)
    fh = await a.open("f", NEW)
    await _written(a, fh, data[: 3 * PART])
    await _sent(a, 3)
    begun = set(a.volume.begun)
    assert len(begun) == 1
    await a.crash()
    await a.settled(lambda: not a.volume.begun & begun, "the dead daemon's upload is aborted")
    assert a.volume.calls["abandon"] == 1
    await _written(a, fh, data, start=3 * PART)
    await a.close(fh)
    assert world.remote_files() == {"f": data}
    assert a.volume.begun == set()
    await a.crash()
    assert a.volume.calls["abandon"] == 1


@pytest.mark.parametrize("operation", ["start", "part"])
async def test_a_store_that_takes_no_parts_gets_the_file_whole(world: Any, operation: str) -> None:
    a = await _node(world)

    def refuse(asked: str, path: str) -> None:
        if asked == operation:
            raise InvalidRequest(asked, path, "no parts here")

    a.volume.fault = refuse
    data = os.urandom(5 * PART)
    await a.write("f", data)
    assert world.remote_files() == {"f": data}
    assert a.volume.calls["upload"] == 1
    await a.fs.stop()
    assert a.volume.begun == set()


async def test_parts_that_were_lost_while_the_store_was_down_are_no_error_at_close(
    world: Any,
) -> None:
    a = await _node(world)

    def fail(operation: str, path: str) -> None:
        raise Unavailable(operation, path, "connection refused")

    data = os.urandom(5 * PART)
    fh = await a.open("f", NEW)
    await _written(a, fh, data[: 3 * PART])
    await _sent(a, 3)
    a.volume.fault = fail
    await _written(a, fh, data, start=3 * PART)
    ahead = a.fs.core.staging.find((await a.stat("f")).ino).ahead
    await a.settled(lambda: ahead.has_failed, "a part is lost")
    a.volume.fault = None
    await a.close(fh)
    assert world.remote_files() == {"f": data}


@pytest.mark.parametrize(
    ("operation", "fault", "number"),
    [
        ("part", PermissionDenied("upload", "f", "refused"), errno.EACCES),
        ("complete", Unavailable("upload", "f", "answered 500"), errno.EIO),
    ],
)
async def test_a_refused_overwrite_in_parts_is_an_error_and_the_old_file_stays(
    world: Any, operation: str, fault: VolumeError, number: int
) -> None:
    """The program is told; store, this node and another go on to give the old content."""
    old = os.urandom(3 * PART)
    (world.remote / "f").write_bytes(old)
    a, b = await _node(world), await _node(world, "b")

    def refuse(asked: str, path: str) -> None:
        if asked == operation or (asked == "upload" and number == errno.EACCES):
            raise fault

    a.volume.fault = refuse
    fh = await a.open("f", os.O_WRONLY | os.O_TRUNC)
    await _written(a, fh, os.urandom(4 * PART))
    assert await world.errno_from(a.close(fh), transfer=True) == number
    a.volume.fault = None
    assert (world.remote_files(), await a.read("f"), await b.read("f")) == ({"f": old}, old, old)
    assert [(one.path, one.size_bytes) for one in a.fs.failed_files()] == [("f", 4 * PART)]
    seen = _statistics(a)
    assert (seen.num_upload_errors, seen.num_failed_files, seen.failed_bytes) == (1, 1, 4 * PART)
    await a.settled(lambda: not a.volume.begun, "no upload is left at the store")


@pytest.mark.quotes(
    "No store appends, so each `fsync` of a growing file sends the whole file.",
)
async def test_a_growing_file_that_is_synced_costs_its_size_each_time_and_no_more(
    world: Any,
) -> None:
    a = await _node(world)
    data = os.urandom(8 * PART)
    fh = await a.open("f", NEW)
    for end in range(2 * PART, 9 * PART, 2 * PART):
        await _written(a, fh, data[:end], start=end - 2 * PART)
        await a.fs.fsync(fh, False)
        assert world.remote_files() == {"f": data[:end]}
    await a.close(fh)
    assert a.volume.calls["part"] == 2 + 4 + 6 + 8
    assert (a.volume.calls["complete"], a.volume.calls["upload"]) == (4, 0)


async def test_an_exclusive_file_sent_ahead_loses_to_what_another_node_made(world: Any) -> None:
    a, b = await _node(world), await _node(world, "b")
    fh = await a.open("f", NEW | os.O_EXCL)
    await _written(a, fh, os.urandom(4 * PART))
    await b.write("f", b"first")
    assert await world.errno_from(a.close(fh), transfer=True) == errno.EEXIST
    assert world.remote_files() == {"f": b"first"}


@pytest.mark.quotes(
    "Above 5 GiB S3 is asked for the name just before the upload, which then overwrites.",
)
@pytest.mark.parametrize("is_taken", [False, True])
async def test_an_exclusive_file_too_large_for_the_store_to_refuse_is_looked_up(
    world: Any, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    a, b = await _node(world), await _node(world, "b")
    inner = a.volume.inner
    refused = []

    def only_over_others(call: Callable[..., Any]) -> Callable[..., Any]:
        def check(path: str, *args: Any, overwrite: bool, **kwargs: Any) -> Any:
            if not overwrite:
                refused.append(path)
                raise TooLarge("upload", path, "no more than 5368709120 bytes exclusively")
            return call(path, *args, overwrite=overwrite, **kwargs)

        return check

    for name in ("start_upload", "put", "upload"):
        monkeypatch.setattr(inner, name, only_over_others(getattr(inner, name)))
    data = os.urandom(4 * PART)
    fh = await a.open("f", NEW | os.O_EXCL)
    await _written(a, fh, data)
    if is_taken:
        await b.write("f", b"first")
        assert await world.errno_from(a.close(fh), transfer=True) == errno.EEXIST
    else:
        await a.close(fh)
    assert world.remote_files() == {"f": b"first" if is_taken else data}
    assert "f" in refused


async def test_the_allocator_keeps_memory_only_while_files_are_sent_ahead(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[str] = []
    for name in ("keep_freed_memory", "bound_allocator"):
        note = partial(changes.append, name)
        monkeypatch.setattr(f"trainmount_fuse.writes.streaming.{name}", note)
    a = await _node(world)
    handles = [await a.open(name, NEW) for name in ("f", "g")]
    for fh in handles:
        await _written(a, fh, os.urandom(3 * PART))
    assert changes == ["keep_freed_memory"]
    await a.close(handles[0])
    assert changes == ["keep_freed_memory"]
    await a.close(handles[1])
    assert changes == ["keep_freed_memory", "bound_allocator"]


async def test_files_beyond_those_that_may_stream_at_once_go_at_their_close(world: Any) -> None:
    a = await _node(world)
    data = {f"f{number}": os.urandom(3 * PART) for number in range(10)}
    handles = {name: await a.open(name, NEW) for name in data}
    for name, fh in handles.items():
        await _written(a, fh, data[name])
    await _sent(a, 8 * 3)
    assert a.volume.calls["start"] == 8
    for fh in handles.values():
        await a.close(fh)
    assert world.remote_files() == data
