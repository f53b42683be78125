"""What a killed daemon leaves, and what its successor or the next mount does with it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from trainmount_files.errors import Unavailable
from trainmount_fuse.attributes import ROOT_INO
from trainmount_fuse.names.handles import HandleTable
from trainmount_fuse.writes import journal
from trainmount_fuse.writes.journal import unsent_paths
from trainmount_fuse.writes.recovery import Recovery
from trainmount_fuse.writes.staging import FilesNotUploaded

WRONLY_NEW = os.O_CREAT | os.O_WRONLY


def _store_down(operation: str, path: str) -> None:
    raise Unavailable(operation, path, "connection refused")


async def test_open_handles_read_and_write_on_in_a_successor(world: Any) -> None:
    data = os.urandom(50_000)
    (world.remote / "r").write_bytes(data)
    a = await world.node()
    reader = await a.open("r")
    writer = await a.open("w", WRONLY_NEW)
    await a.fs.write(writer, 0, b"before ")
    assert bytes(await a.fs.read(reader, 0, 100)) == data[:100]
    await a.crash()
    assert await a.read_handle(reader) == data
    await a.fs.write(writer, 7, b"after")
    assert world.remote_files() == {"r": data}
    await a.close(writer)
    assert world.remote_files() == {"r": data, "w": b"before after"}
    await a.crash()
    await a.close(reader)
    assert await world.errno_from(a.fs.read(reader, 0, 1)) == errno.EBADF


async def test_a_successor_does_not_mix_versions_in_an_old_handle(world: Any) -> None:
    old, new = os.urandom(50_000), os.urandom(50_000)
    (world.remote / "f").write_bytes(old)
    a, b = await world.node("a", prefetch_max_bytes=0), await world.node("b")
    fh = await a.open("f")
    assert bytes(await a.fs.read(fh, 0, 4096)) == old[:4096]
    await a.crash()
    await b.write("f", new)
    assert await a.read("f") == new
    assert bytes(await a.fs.read(fh, 0, 4096)) == old[:4096]
    assert await world.errno_from(a.fs.read(fh, 40_000, 10), transfer=True) == errno.ESTALE


@pytest.mark.parametrize("is_written_here", [True, False])
async def test_an_open_that_a_takeover_parts_from_its_lookup_needs_no_second_try(
    world: Any, is_written_here: bool
) -> None:
    """The kernel tries once more, and needs that for a name that is renamed over meanwhile."""
    data = os.urandom(10_000)
    a = await world.node()
    if is_written_here:
        await a.write("new", data)
        await a.rename("new", "f")
    else:
        (world.remote / "f").write_bytes(data)
        assert await a.read("f") == data
    ino = (await a.stat("f")).ino
    await a.crash()
    opened = await a.fs.open(ino, os.O_RDONLY)
    assert await a.read_handle(opened.fh) == data


async def test_a_file_that_changed_during_a_takeover_has_another_number(world: Any) -> None:
    old, new = os.urandom(10_000), os.urandom(20_000)
    (world.remote / "f").write_bytes(old)
    a = await world.node()
    assert await a.read("f") == old
    ino = (await a.stat("f")).ino
    await a.crash()
    (world.remote / "f").write_bytes(new)
    assert await world.errno_from(a.fs.open(ino, os.O_RDONLY)) == errno.ESTALE
    assert await a.read("f") == new


async def test_files_left_dirty_are_uploaded_by_the_next_mount(world: Any) -> None:
    a = await world.node()
    await a.mkdir("d")
    contents = {f"d/f{number}": os.urandom(10_000) for number in range(5)}
    for name, data in contents.items():
        fh = await a.open(name, WRONLY_NEW)
        await a.fs.write(fh, 0, data)
    await a.remount()
    await a.settled(lambda: world.remote_files() == contents, "all left files are in the store")
    for name, data in contents.items():
        assert await a.read(name) == data
    await a.settled(lambda: a.staging_files() == [], "nothing is staged any more")


async def test_a_left_file_can_be_read_before_it_is_uploaded(world: Any) -> None:
    a = await world.node()
    fh = await a.open("f", WRONLY_NEW)
    await a.fs.write(fh, 0, b"left")
    a.volume.fault = _store_down
    await a.crash()
    assert await a.read("f") == b"left"
    a.volume.fault = None
    await a.close(fh)
    assert world.remote_files() == {"f": b"left"}


async def test_files_closed_with_an_error_are_uploaded_by_the_next_mount(world: Any) -> None:
    """The store is down at close; none is dropped, none is cut."""
    a = await world.node()
    contents = {f"f{number}": os.urandom(20_000) for number in range(5)}
    handles = {name: await a.open(name, WRONLY_NEW) for name in contents}
    a.volume.fault = _store_down
    for name, fh in handles.items():
        await a.fs.write(fh, 0, contents[name])
        assert await world.errno_from(a.close(fh), transfer=True) == errno.EIO
    assert sorted(one.path for one in a.fs.failed_files()) == sorted(contents)
    assert world.remote_files() == {}
    await a.remount()
    await a.settled(lambda: len(a.fs.failed_files()) == 5, "each failed again, still kept")
    a.volume.fault = None
    await a.remount()
    await a.settled(lambda: world.remote_files() == contents, "all are in the store, whole")
    await a.settled(lambda: a.staging_files() == [], "nothing is staged any more")


async def test_left_bytes_never_overwrite_what_came_later(world: Any) -> None:
    a, b = await world.node("a"), await world.node("b")
    await a.write("f", b"base")
    fh = await a.open("f", os.O_WRONLY)
    await a.fs.write(fh, 0, b"left by a")
    await b.write("f", b"later by b")
    await a.remount()
    await a.settled(lambda: len(world.remote_files()) == 2, "the left bytes are beside it")
    (beside,) = set(world.remote_files()) - {"f"}
    assert re.fullmatch(r"f\.conflict-\d{8}T\d{6}\.\d{6}Z", beside)
    assert world.remote_files() == {"f": b"later by b", beside: b"left by a"}
    assert (await a.read("f"), await a.read(beside)) == (b"later by b", b"left by a")
    await a.settled(lambda: a.staging_files() == [], "nothing is kept here")
    staging = a.fs.core.staging
    assert [(one.path, one.kept_path) for one in staging.conflicts()] == [("f", beside)]
    assert staging.statistics().num_conflicts == 1
    await a.remount()
    assert [one.kept_path for one in a.fs.core.staging.conflicts()] == [beside]


async def test_left_bytes_that_somebody_opens_before_they_are_sent_overwrite_nothing_either(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await world.node("a"), await world.node("b")
    await a.write("f", b"base")
    fh = await a.open("f", os.O_WRONLY)
    await a.fs.write(fh, 0, b"left by a")
    await b.write("f", b"later by b")

    async def not_yet(*_: object) -> None:
        return

    with monkeypatch.context() as patch:
        patch.setattr(Recovery, "upload", not_yet)
        await a.remount()
        fh = await a.open("f", os.O_RDWR)
        assert await a.read_handle(fh) == b"left by a"
        await a.fs.write(fh, 9, b" and more")
        assert await world.errno_from(a.close(fh), transfer=True) == errno.ESTALE
    assert world.remote_files() == {"f": b"later by b"}
    assert [(one.path, one.size_bytes) for one in a.fs.failed_files()] == [("f", 18)]
    await a.remount()
    await a.settled(lambda: len(world.remote_files()) == 2, "the left bytes are beside it")
    assert sorted(world.remote_files().values()) == [b"later by b", b"left by a and more"]


async def test_left_bytes_that_cannot_be_put_beside_are_kept_here_until_they_can(
    world: Any,
) -> None:
    a, b = await world.node("a"), await world.node("b")
    await a.write("f", b"base")
    fh = await a.open("f", os.O_WRONLY)
    await a.fs.write(fh, 0, b"left by a")
    await b.write("f", b"later by b")

    def refuse(operation: str, path: str) -> None:
        if operation == "upload":
            raise Unavailable(operation, path, "connection refused")

    a.volume.fault = refuse
    await a.remount()
    await a.settled(lambda: len(a.fs.failed_files()) == 1, "the left bytes are kept")
    failed = a.fs.failed_files()[0]
    assert (failed.path, failed.size_bytes) == ("f", 9)
    assert "another version" in failed.reason
    assert await a.read("f") == b"later by b"
    a.volume.fault = None
    await a.remount()
    await a.settled(lambda: b"left by a" in world.remote_files().values(), "they are beside it")
    assert world.remote_files()["f"] == b"later by b"
    await a.settled(lambda: a.fs.failed_files() == [], "nothing is kept here")


@pytest.mark.quotes(
    "After a power cut, the next mount sends a new file that was never closed as far as the disk "
    "has it.",
    "Unsynced bytes of a file that was stored before go beside it.",
)
async def test_after_a_reboot_unsynced_bytes_do_not_take_the_place_of_synced_ones(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine lost power: what was never synced may be cut in the staging file."""
    a = await world.node()
    await a.write("old", b"synced")
    old = await a.open("old", os.O_WRONLY)
    await a.fs.write(old, 6, b", and more")
    new = await a.open("new", WRONLY_NEW)
    await a.fs.write(new, 0, b"never closed")
    boot = tmp_path / "boot_id"
    boot.write_text("another")
    monkeypatch.setattr(journal, "_BOOT_ID", boot)
    await a.remount()
    await a.settled(lambda: a.staging_files() == [], "nothing is staged any more")
    remote = world.remote_files()
    (beside,) = set(remote) - {"new", "old"}
    assert beside.startswith("old.conflict-")
    assert remote == {"old": b"synced", "new": b"never closed", beside: b"synced, and more"}


async def test_inode_numbers_that_were_lost_do_not_lose_left_files(world: Any) -> None:
    a = await world.node()
    await a.mkdir("d")
    fh = await a.open("d/f", WRONLY_NEW)
    await a.fs.write(fh, 0, b"precious")
    for path in a.settings.state_dir.glob("state.db*"):
        path.write_bytes(b"this is no database" * 1000)
    await a.remount()
    await a.settled(lambda: world.remote_files() == {"d/f": b"precious"}, "it is uploaded")
    assert await a.read("d/f") == b"precious"


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("num_deaths", [1, 3])
async def test_each_request_may_be_repeated_after_daemons_died_in_it(
    world: Any, moment: str, num_deaths: int
) -> None:
    """The kernel repeats what was never answered, whether or not it had been carried out."""
    a = await world.node()
    await a.write("gone", b"1")
    await a.write("old", b"2")
    await a.write("target", b"3")
    await a.mkdir("empty")
    source_ino = (await a.stat("old")).ino

    async def repeat(request: Any) -> Any:
        """Die before or after the request took effect, then get it again, and die in that."""
        if moment == "after":
            await request()
        for _ in range(num_deaths):
            await a.crash()
            answer = await request()
        return answer

    await repeat(lambda: a.fs.unlink(ROOT_INO, b"gone"))
    assert not await a.exists("gone")
    await repeat(lambda: a.fs.rename(ROOT_INO, b"old", ROOT_INO, b"target", 0))
    assert world.remote_files() == {"target": b"2"}
    assert (await a.stat("target")).ino == source_ino
    await repeat(lambda: a.fs.mkdir(ROOT_INO, b"d", 0o755))
    assert (await a.stat("d")).is_directory
    await repeat(lambda: a.fs.rmdir(ROOT_INO, b"empty"))
    assert not await a.exists("empty")
    await repeat(lambda: a.fs.rename(ROOT_INO, b"d", ROOT_INO, b"e", 0))
    assert (await a.stat("e")).is_directory
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    opened, attributes = await repeat(lambda: a.fs.create(ROOT_INO, b"new", 0o644, flags))
    assert (await a.stat("new")).ino == attributes.ino
    assert await repeat(lambda: a.fs.write(opened.fh, 0, b"data")) == 4
    await repeat(lambda: a.fs.flush(opened.fh))
    await repeat(lambda: a.fs.release(opened.fh))
    assert world.remote_files() == {"target": b"2", "new": b"data"}
    assert a.staging_files() == []
    # A second request of a new program is no repetition.
    assert await world.errno_from(a.fs.create(ROOT_INO, b"new", 0o644, flags)) == errno.EEXIST
    await a.crash()
    await a.unlink("new")
    assert await world.errno_from(a.fs.unlink(ROOT_INO, b"new")) == errno.ENOENT


async def test_a_create_whose_daemon_died_before_it_wrote_the_handle_down_is_completed(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await world.node()
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY

    def kill(*_: object, **__: object) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(HandleTable, "open", kill)
        with pytest.raises(_Killed):
            await a.fs.create(ROOT_INO, b"new", 0o644, flags)
    await a.crash()
    opened, _ = await a.fs.create(ROOT_INO, b"new", 0o644, flags)
    await a.fs.write(opened.fh, 0, b"data")
    await a.close(opened.fh)
    assert world.remote_files() == {"new": b"data"}


class _Killed(BaseException):
    """The process ends between what the store did and what we wrote down."""


async def test_what_is_made_anew_after_its_rename_and_renamed_again_is_no_repetition(
    world: Any,
) -> None:
    a = await world.node()
    await a.mkdir("d")
    await a.write("d/one", b"1")
    await a.write("f", b"2")
    await a.rename("d", "e")
    await a.rename("f", "g")
    await a.mkdir("d")
    await a.write("f", b"3")
    await a.crash()
    again = a.fs.rename(ROOT_INO, b"d", ROOT_INO, b"e", 0)
    assert await world.errno_from(again) == errno.ENOTEMPTY
    no_replace = a.fs.rename(ROOT_INO, b"f", ROOT_INO, b"g", 1)
    assert await world.errno_from(no_replace) == errno.EEXIST
    assert world.remote_files() == {"e/one": b"1", "f": b"3", "g": b"2"}
    assert await a.exists("d")


@pytest.mark.parametrize("operation", ["upload", "delete", "rename", "make_directory"])
async def test_a_request_cut_off_behind_the_stores_answer_is_completed_when_repeated(
    world: Any, operation: str
) -> None:
    a = await world.node()
    await a.write("one", b"1")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    opened, _ = await a.fs.create(ROOT_INO, b"two", 0o644, flags)
    await a.fs.write(opened.fh, 0, b"2")
    requests = {
        "upload": lambda: a.fs.flush(opened.fh),
        "delete": lambda: a.fs.unlink(ROOT_INO, b"one"),
        "rename": lambda: a.fs.rename(ROOT_INO, b"one", ROOT_INO, b"moved", 0),
        "make_directory": lambda: a.fs.mkdir(ROOT_INO, b"d", 0o755),
    }

    def kill(done: str, path: str) -> None:
        if done == operation:
            a.volume.after = None
            raise _Killed

    a.volume.after = kill
    with pytest.raises(_Killed):
        await requests[operation]()
    await a.crash()
    await requests[operation]()
    await a.close(opened.fh)
    expected = {
        "upload": {"one": b"1", "two": b"2"},
        "delete": {"two": b"2"},
        "rename": {"moved": b"1", "two": b"2"},
        "make_directory": {"one": b"1", "two": b"2"},
    }
    assert world.remote_files() == expected[operation]
    names = {*expected[operation], *(["d"] if operation == "make_directory" else [])}
    assert set(await a.entries()) == names
    assert a.staging_files() == []


async def test_stop_uploads_what_programs_still_have_open(world: Any) -> None:
    a = await world.node()
    fh = await a.open("f", WRONLY_NEW)
    await a.fs.write(fh, 0, b"data")
    await a.fs.stop()
    assert world.remote_files() == {"f": b"data"}
    assert await world.errno_from(a.fs.getattr(ROOT_INO)) == errno.ENOTCONN


async def test_stop_names_what_it_could_not_upload_and_keeps_it(world: Any) -> None:
    a = await world.node()
    failed = await a.open("failed", WRONLY_NEW)
    await a.fs.write(failed, 0, b"1")
    open_still = await a.open("open", WRONLY_NEW)
    await a.fs.write(open_still, 0, b"2")
    a.volume.fault = _store_down
    assert await world.errno_from(a.close(failed), transfer=True) == errno.EIO
    with pytest.raises(FilesNotUploaded, match=r"not uploaded and kept: failed, open$") as told:
        await a.fs.stop()
    assert told.value.paths == ["failed", "open"] == unsent_paths(a.settings.state_dir)
    a.volume.fault = None
    await a.remount()
    await a.fs.stop()
    assert world.remote_files() == {"failed": b"1", "open": b"2"}
    assert unsent_paths(a.settings.state_dir) == []


async def test_stop_tries_once_more_what_programs_were_told_has_failed(world: Any) -> None:
    a = await world.node()
    fh = await a.open("f", WRONLY_NEW)
    await a.fs.write(fh, 0, b"data")
    a.volume.fault = _store_down
    assert await world.errno_from(a.close(fh), transfer=True) == errno.EIO
    a.volume.fault = None
    await a.fs.stop()
    assert world.remote_files() == {"f": b"data"}


async def test_a_handle_from_a_dead_daemon_reads_on_after_its_directory_was_renamed(
    world: Any,
) -> None:
    data = os.urandom(20_000)
    a = await world.node(cache_size_bytes=4096)
    await a.mkdir("d")
    await a.write("d/f", data)
    fh = await a.open("d/f")
    await a.crash()
    await a.rename("d", "e")
    assert await a.read_handle(fh) == data
    await a.close(fh)


async def test_stop_waits_for_the_files_that_were_left(world: Any) -> None:
    a = await world.node()
    fh = await a.open("f", WRONLY_NEW)
    await a.fs.write(fh, 0, b"left")
    await a.remount()
    await a.fs.stop()
    assert world.remote_files() == {"f": b"left"}
    assert a.staging_files() == []


@pytest.mark.parametrize("operation", ["unlink", "rename", "mkdir"])
async def test_what_a_live_daemon_has_answered_is_no_repetition(world: Any, operation: str) -> None:
    a = await world.node()
    await a.write("f", b"1")
    await a.mkdir("d")
    requests = {
        "unlink": lambda: a.fs.unlink(ROOT_INO, b"f"),
        "rename": lambda: a.fs.rename(ROOT_INO, b"f", ROOT_INO, b"g", 0),
        "mkdir": lambda: a.fs.mkdir(ROOT_INO, b"d", 0o755),
    }
    number = errno.EEXIST if operation == "mkdir" else errno.ENOENT
    if operation != "mkdir":
        await requests[operation]()
    assert await world.errno_from(requests[operation]()) == number
