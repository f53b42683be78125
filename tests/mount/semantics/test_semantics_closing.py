"""What docs/SEMANTICS.md says of close, fsync and what happens where they fail."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable

import pytest
from tests.mount.conftest import FilesServer, MountProcess, wait_until
from tests.mount.semantics.conftest import Nodes, Place, errno_of, local_files, trainmount, tree

MIB = 1 << 20


@pytest.mark.quotes(
    "**Closed is stored.** What `close` or `fsync` has acknowledged is in the store, and no later "
    "`open` gives an older version.",
    "`close`, `fsync`, `fdatasync` and `msync` return when the store has the whole file, or with "
    "its error.",
    "Before that, the store and other nodes see nothing of what was written, not even the name of "
    "a new file.",
    "A has written and not closed, B opens | B reads the file of before",
)
def test_what_is_acknowledged_is_stored_and_nothing_before(nodes: Nodes, place: Place) -> None:
    path = place.stored("old", b"0000")
    new, old = os.open(place.a / "new", os.O_RDWR | os.O_CREAT), os.open(path, os.O_RDWR)
    for file in (new, old):
        os.pwrite(file, b"1111", 0)
    assert [one.name for one in place.store.iterdir()] == ["old"]
    assert errno_of((place.b / "new").read_bytes) == "ENOENT"
    assert (place.b / "old").read_bytes() == (place.store / "old").read_bytes() == b"0000"
    os.fsync(new)
    assert (place.store / "new").read_bytes() == b"1111"
    os.fdatasync(old)
    assert (place.b / "old").read_bytes() == (place.store / "old").read_bytes() == b"1111"
    with mmap.mmap(old, 4) as mapped:
        mapped[:] = b"2222"
        assert (place.store / "old").read_bytes() == b"1111"
        mapped.flush()
        assert (place.b / "old").read_bytes() == (place.store / "old").read_bytes() == b"2222"
        os.pwrite(new, b"3", 4)
        nodes.refuse("put_file", status=403)
        mapped[:] = b"3333"
        assert errno_of(mapped.flush) == "EACCES"
        refused = [errno_of(call, new) for call in (os.fsync, os.fdatasync)]
        assert refused == ["EACCES", "EACCES"]
        nodes.refuse()
    os.close(new)
    os.close(old)
    # B has just been told that there is no such file.
    wait_until((place.b / "new").exists, "the new file")
    assert (place.b / "new").read_bytes() == (place.store / "new").read_bytes() == b"11113"
    assert (place.b / "old").read_bytes() == (place.store / "old").read_bytes() == b"3333"


@pytest.mark.quotes("A `close` without anything new to send sends nothing.")
def test_a_close_with_nothing_new_sends_nothing(nodes: Nodes, place: Place) -> None:
    path = place.stored("f", b"content")
    before = nodes.requests()["put_file"]
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY):
        os.close(os.open(path, flags))
    file = os.open(path, os.O_RDWR)
    os.pwrite(file, b"C", 0)
    os.fsync(file)
    os.close(os.dup(file))
    os.close(file)
    assert nodes.requests()["put_file"] == before + 1
    assert (place.store / "f").read_bytes() == b"Content"


@pytest.mark.quotes(
    "After a `close` that failed, the store and every `open` have the file that was there before.",
    "The new bytes stay on this node and are named by `trainmount status`.",
    "They are sent by `trainmount flush`, at the end of the mount or by the next one.",
    "Unsent bytes are in the state directory, and the cache never takes their room.",
)
def test_what_a_close_could_not_send_is_kept_named_and_sent_later(
    nodes: Nodes, place: Place
) -> None:
    mount = nodes.mount("failing")
    store = place.stored("f", b"before") and place.store / "f"
    path = mount.mountpoint / place.a.name / "f"
    relative = f"{place.a.name}/f"

    def fail(data: bytes) -> None:
        nodes.refuse("put_file", status=403)
        assert errno_of(path.write_bytes, data) == "EACCES"
        wait_until(lambda: local_files(mount) == [("failed", relative)], "the release")

    fail(b"by flush")
    for one in (path, place.b / "f", store):
        assert one.read_bytes() == b"before"
    staging = mount.folder / "state/staging"
    assert b"by flush" in [one.read_bytes() for one in staging.iterdir()]
    nodes.refuse()
    assert trainmount("flush", mount.mountpoint) == "1 file uploaded\n"
    assert store.read_bytes() == path.read_bytes() == b"by flush"
    fail(b"at the end")
    nodes.refuse()
    assert mount.stop() == 0
    assert store.read_bytes() == b"at the end"
    mount.start()
    mount.wait_ready()
    fail(b"by the next")
    assert mount.stop() == 74
    assert f"not uploaded and kept: {relative}" in mount.log
    nodes.refuse()
    mount.start()
    mount.wait_ready()
    wait_until(lambda: store.read_bytes() == b"by the next", "the upload")
    assert mount.stop() == 0


@pytest.mark.quotes(
    "ENOSPC, EDQUOT | the store is full, or the bucket at its quota: `close`, `fsync`, `mkdir`, "
    "`rename`; written bytes stay on this node as after any failure"
)
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"status": 507, "error_code": "RESOURCE_EXHAUSTED"}, "ENOSPC"),
        ({"status": 403, "error_code": "QuotaExceeded"}, "EDQUOT"),
    ],
)
@pytest.mark.parametrize("size", [100, 60 * MIB])
def test_a_store_without_room_says_so_and_the_bytes_wait_for_room(
    nodes: Nodes, place: Place, size: int, answer: dict[str, object], expected: str
) -> None:
    path, new = place.stored("f", b"before"), os.urandom(size)
    (place.a / "moved").write_bytes(b"moved")
    nodes.refuse("put_file", "presigned_put", "make_directory", **answer)
    assert errno_of((place.a / "d").mkdir) == expected
    assert errno_of((place.a / "moved").rename, place.a / "elsewhere") == expected
    file = os.open(path, os.O_WRONLY | os.O_TRUNC)
    for start in range(0, size, MIB):
        os.write(file, new[start : start + MIB])
    assert [errno_of(os.fsync, file), errno_of(os.close, file)] == [expected, expected]
    kept = ("failed", f"{place.a.name}/f")
    wait_until(lambda: kept in local_files(nodes.a), "the release")
    assert path.read_bytes() == (place.store / "f").read_bytes() == b"before"
    nodes.refuse()
    assert trainmount("flush", nodes.a.mountpoint) == "1 file uploaded\n"
    assert path.read_bytes() == (place.store / "f").read_bytes() == new
    assert tree(place.store).keys() == {"f", "moved"}


@pytest.mark.quotes(
    "What a mapping writes after the last `close` is sent when the mapping ends, and nobody is "
    "told of an error."
)
def test_a_mapping_outlives_the_last_close(nodes: Nodes, place: Place) -> None:
    def mapped(name: str) -> mmap.mmap:
        with place.stored(name, bytes(8192)).open("r+b") as file:
            return mmap.mmap(file.fileno(), 0)

    pages = mapped("sent")
    pages[4096:4100] = b"late"
    assert (place.store / "sent").read_bytes() == bytes(8192)
    pages.close()
    expected = bytes(4096) + b"late" + bytes(4092)
    wait_until(lambda: (place.store / "sent").read_bytes() == expected, "the upload")
    pages = mapped("refused")
    nodes.refuse("put_file", status=403)
    pages[:4] = b"late"
    assert errno_of(pages.close) == ""
    failed = ("failed", f"{place.a.name}/refused")
    wait_until(lambda: failed in local_files(nodes.a), "the release")
    assert (place.store / "refused").read_bytes() == bytes(8192)
    nodes.refuse()
    trainmount("flush", nodes.a.mountpoint)


@pytest.mark.quotes(
    "`write` | the death of the daemon and of its holder: the next one has the bytes",
    "`close`, `fsync` | whatever happens to this node",
    "When the holder dies, every call is ENOTCONN until the next mount, which sends what was "
    "written.",
)
def test_what_is_written_outlives_daemon_and_holder_and_what_is_closed_the_node(
    start_mount: Callable[..., MountProcess], files_server: FilesServer
) -> None:
    mount = start_mount(files_server.source, environment=files_server.environment())
    here, store = mount.mountpoint, files_server.volume
    synced, written = (os.open(here / n, os.O_RDWR | os.O_CREAT) for n in ("synced", "written"))
    (here / "closed").write_bytes(b"closed")
    os.write(synced, b"synced")
    os.fsync(synced)
    os.write(written, b"written")
    mount.kill_daemon()
    assert os.pread(written, 100, 0) == b"written"
    for pid in (mount.process.pid, mount.ready()["daemon_pid"]):
        os.kill(pid, 9)
    mount.process.wait()
    stored = {one.name: one.read_bytes() for one in store.iterdir()}
    assert stored == {"closed": b"closed", "synced": b"synced"}
    calls = (
        lambda: os.pread(written, 1, 0),
        here.stat,
        (here / "closed").read_bytes,
    )
    wait_until(lambda: errno_of(calls[1]) == "ENOTCONN", "the end of the connection")
    assert [errno_of(call) for call in calls] == ["ENOTCONN"] * 3
    for file in (synced, written):
        assert errno_of(os.close, file) in ("", errno.errorcode[errno.ENOTCONN])
    mount.ready_file.unlink()
    mount.start()
    mount.wait_ready()
    assert (here / "written").read_bytes() == b"written"
    wait_until(lambda: (store / "written").exists(), "the upload")
    assert (store / "written").read_bytes() == b"written"
    assert mount.stop() == 0
