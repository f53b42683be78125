"""What docs/SEMANTICS.md says of two nodes, and of a store that does not answer."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tests.mount.conftest import wait_until
from tests.mount.semantics.conftest import Nodes, Place, errno_of, local_files, trainmount

MIB = 1 << 20
APPEND = os.O_WRONLY | os.O_APPEND


@pytest.mark.quotes(
    "A closes, then B opens | B reads what A wrote, and `fstat` has its size",
    "A and B append and close in turn | nothing is lost",
)
def test_an_open_after_a_close_reads_what_was_closed(place: Place) -> None:
    place.stored("f", b"begun ")
    expected = b"begun "
    for number in range(20):
        writer, reader = (place.a, place.b) if number % 2 else (place.b, place.a)
        record = b"%d " % number * (number + 1)
        file = os.open(writer / "f", APPEND)
        os.write(file, record)
        os.close(file)
        expected += record
        file = os.open(reader / "f", os.O_RDONLY)
        assert os.fstat(file).st_size == len(expected)
        assert os.pread(file, 10_000, 0) == expected
        os.close(file)
    assert (place.store / "f").read_bytes() == expected


@pytest.mark.quotes(
    "B has the file open, A replaces or removes it | B's descriptor keeps size and time, reads the "
    "old bytes that are cached, and is ESTALE for others",
    "ESTALE | the version that the descriptor shows is gone from the store, and the bytes are not "
    "cached",
    "A file that another node has replaced has another number.",
)
def test_an_open_file_keeps_its_version_or_is_stale(place: Place) -> None:
    for name in ("replaced", "removed"):
        place.stored(name, b"o" * 40 * MIB)
        file = os.open(place.b / name, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(file, 4096, 0) == b"o" * 4096
        before = os.fstat(file)
        if name == "replaced":
            (place.a / name).write_bytes(b"new")
            assert (place.b / name).read_bytes() == b"new"
            assert (place.b / name).stat().st_ino != before.st_ino
        else:
            (place.a / name).unlink()
        assert os.pread(file, 100, 1000) == b"o" * 100
        assert errno_of(os.pread, file, 4096, 30 * MIB) == "ESTALE"
        after = os.fstat(file)
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        os.close(file)


@pytest.mark.quotes(
    "A makes, changes or removes a file, B looks | `stat` and listings show it after "
    "`--metadata-timeout` (1 s), or at once after `trainmount refresh`",
)
def test_what_others_change_shows_after_its_timeout(nodes: Nodes, place: Place) -> None:
    def shown(here: Path) -> tuple[list[str], int, bool]:
        names = sorted(one.name for one in here.iterdir())
        return names, (here / "changed").stat().st_size, (here / "made").exists()

    patient = nodes.mount("patient", "--metadata-timeout", "3600", "--negative-timeout", "3600")
    before = ["changed", "removed"], 1, False
    after = ["changed", "made"], 7, True
    for name in ("changed", "removed"):
        place.stored(name, b"x")
    there = patient.mountpoint / place.a.name
    for folder in (there, place.b):
        wait_until(lambda folder=folder: shown(folder) == before, "the old names")
    (place.a / "removed").unlink()
    (place.a / "changed").write_bytes(b"changed")
    (place.a / "made").write_bytes(b"made")
    closed_at = time.monotonic()
    while shown(place.b) != after:
        # Two seconds, and what a busy machine adds.
        assert time.monotonic() - closed_at < 30
    assert shown(there) == before
    trainmount("refresh", "--mount", patient.mountpoint)
    assert shown(there) == after
    assert patient.stop() == 0


@pytest.mark.quotes(
    "B looked for a missing name, A makes it | B sees it after `--negative-timeout` (1 s)"
)
def test_a_missing_name_that_others_make_shows_after_its_timeout(
    nodes: Nodes, place: Place
) -> None:
    patient = nodes.mount("patient-too", "--negative-timeout", "3600")
    there = patient.mountpoint / place.a.name / "made"
    assert not there.exists()
    assert not (place.b / "made").exists()
    (place.a / "made").write_bytes(b"made")
    closed_at = time.monotonic()
    # No listing, which would tell of it.
    while not (place.b / "made").exists():
        assert time.monotonic() - closed_at < 30
    assert not there.exists()
    assert patient.stop() == 0


@pytest.mark.quotes(
    "A removes a file that B has just seen, B opens it with `O_CREAT` | B makes it anew"
)
def test_a_file_that_was_removed_elsewhere_is_made_anew(place: Place) -> None:
    for number in range(5):
        (place.a / "lock").write_bytes(b"a")
        wait_until((place.b / "lock").exists, "the file")
        assert (place.b / "lock").read_bytes() == b"a"
        (place.a / "lock").unlink()
        with (place.b / "lock").open("ab") as file:
            file.write(b"%d" % number)
        assert (place.store / "lock").read_bytes() == b"%d" % number


@pytest.mark.quotes(
    "A and B write one file at once | one of the two is stored, whole: that of the last `close`",
    "A and B append at once | the records of one of the two are lost",
    "B opens, A closes another version and B's mount learns of it, B writes | B's `write` is "
    "ESTALE, and A's file stays",
)
def test_two_that_write_at_once(place: Place) -> None:
    path = place.stored("f", b"base")
    for first, last in ((place.a, place.b), (place.b, place.a)):
        files = {
            folder: os.open(folder / "f", os.O_WRONLY | os.O_TRUNC) for folder in (first, last)
        }
        for number in range(3):
            for folder, file in files.items():
                os.write(file, folder.parent.name.encode() * (number + 1))
        os.close(files[first])
        os.close(files[last])
        expected = last.parent.name.encode() * 6
        assert (place.store / "f").read_bytes() == expected
        assert [(folder / "f").read_bytes() for folder in (first, last)] == [expected] * 2
    place.stored("log", b"base ")
    one, other = os.open(place.a / "log", APPEND), os.open(place.b / "log", APPEND)
    os.write(one, b"by A")
    os.write(other, b"by B, longer")
    os.close(one)
    os.close(other)
    assert (place.store / "log").read_bytes() == b"base by B, longer"

    place.stored("g", b"base")
    late = os.open(place.b / "g", os.O_RDWR)
    (place.a / "g").write_bytes(b"by A")
    assert (place.b / "g").read_bytes() == b"by A"
    assert errno_of(os.pwrite, late, b"late", 0) == "ESTALE"
    os.close(late)
    assert (place.store / "g").read_bytes() == b"by A"
    assert path.exists()


@pytest.mark.quotes(
    "A dies with unsent bytes, B closes a file of that name, A comes back | B's file stays; A's "
    "bytes are beside it as `NAME.conflict-DATE`, and `trainmount status` names them"
)
def test_bytes_of_a_dead_node_go_beside_later_ones(nodes: Nodes, place: Place) -> None:
    mount = nodes.mount("dying")
    place.stored("f", b"base")
    file = os.open(mount.mountpoint / place.a.name / "f", os.O_WRONLY)
    os.write(file, b"left by a dead node")
    for pid in (mount.process.pid, mount.ready()["daemon_pid"]):
        os.kill(pid, signal.SIGKILL)
    mount.process.wait()
    (place.b / "f").write_bytes(b"later, by B")
    errno_of(os.close, file)
    mount.ready_file.unlink()
    mount.start()
    mount.wait_ready()
    wait_until(lambda: len(list(place.store.iterdir())) == 2, "the bytes beside")
    (beside,) = place.store.glob("f.conflict-*")
    assert beside.read_bytes() == b"left by a dead node"
    assert (place.store / "f").read_bytes() == b"later, by B"
    conflict = ("conflict", f"{place.a.name}/f")
    wait_until(lambda: conflict in local_files(mount), "the report")
    assert mount.stop() == 0


@pytest.mark.quotes(
    "EAGAIN | the store does not answer: `stat`, `open`, listings, changes of names; it is never "
    "ENOENT, and not remembered",
    "EIO | the store does not answer: `read`, `close`, `fsync`",
)
def test_a_store_that_does_not_answer(nodes: Nodes, place: Place) -> None:
    # It gives the store a second, and not two minutes.
    mount = nodes.mount("impatient", toy="impatient")
    here = mount.mountpoint / place.a.name
    place.stored("f", b"f")
    place.stored("g", b"g")
    reader, writer = os.open(here / "f", os.O_RDONLY), os.open(here / "new", os.O_CREAT | os.O_RDWR)
    os.write(writer, b"new")
    nodes.refuse("*", status=503)
    calls = [
        *((here / "g").stat, (here / "none").stat, (here / "g").open),
        *(partial(os.listdir, here), (here / "d").mkdir, (here / "f").unlink),
    ]
    with ThreadPoolExecutor(len(calls)) as threads:
        assert list(threads.map(errno_of, calls)) == ["EAGAIN"] * len(calls)
    assert errno_of(os.pread, reader, 1, 0) == "EIO"
    assert errno_of(os.fsync, writer) == "EIO"
    assert errno_of(os.close, writer) == "EIO"
    nodes.refuse()
    assert sorted(one.name for one in here.iterdir() if one.name != "new") == ["f", "g"]
    assert (here / "g").read_bytes() == b"g"
    assert not (here / "none").exists()
    assert os.pread(reader, 1, 0) == b"f"
    os.close(reader)
    assert mount.stop() == 0
    assert (place.store / "new").read_bytes() == b"new"
