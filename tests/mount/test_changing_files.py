"""Files that another client changes, read through a mount: a follower, an open handle, a reader
with read-ahead in front of it, and an editor that saves.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

MIB = 1 << 20
NUM_APPENDS = int(os.environ.get("TRAINMOUNT_TEST_APPENDS", "30"))
"""In CI a share; a long run has 1,000."""

READ_AHEAD_MIB = int(os.environ.get("TRAINMOUNT_TEST_READ_AHEAD_MIB", "32"))
"""In CI a share; a long run has 64."""

NUM_REPLACEMENTS = int(os.environ.get("TRAINMOUNT_TEST_REPLACEMENTS", "300"))
"""In CI a share; a long run has 10,000."""

EARLY = 1_700_000_000
NUM_VERSIONS = 20


@pytest.fixture(params=["files-api", "directory"])
def volume(request: Any, files_server: Any) -> tuple[Path, str, dict[str, str]]:
    """What the store has, and source and environment of its mounts."""
    if request.param == "files-api":
        return files_server.volume, files_server.source, files_server.environment()
    return files_server.volume, files_server.volume.as_uri(), {}


@pytest.fixture
def two(start_mount: Callable[..., Any], volume: Any) -> list[Path]:
    """Two mounts of one volume."""
    _, source, environment = volume
    return [start_mount(source, name=n, environment=environment).mountpoint for n in "ab"]


def unless_stale(read: Callable[[], T]) -> T | None:
    """None where the version of an open file is gone."""
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return None


def put(path: Path, data: bytes, mtime: int) -> None:
    """What another client's upload leaves in the store, in one step and with its time."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.utime(part, (mtime, mtime))
    part.rename(path)


def test_an_open_after_the_other_mounts_close_shows_its_bytes_at_their_length(
    two: list[Path],
) -> None:
    a, b = (folder / "f" for folder in two)
    a.write_bytes(b"twelve bytes")
    assert (b.stat().st_size, b.read_bytes()) == (12, b"twelve bytes")
    for new in (b"fourteen bytes", b"14 other bytes", b"!", bytes(range(256)) * 4000):
        a.write_bytes(new)
        with b.open("rb", buffering=0) as file:
            assert os.fstat(file.fileno()).st_size == len(new)
            assert file.readall() == new
            assert b.stat().st_size == len(new)


def test_size_and_time_are_of_one_version_while_a_handle_is_open(
    start_mount: Callable[..., Any], volume: Any, wait_until: Any
) -> None:
    """Version n has 10 + n bytes and a time of n seconds after the first."""
    store, source, environment = volume
    put(store / "f", b"0" * 10, EARLY)
    options = ("--metadata-timeout", "0.05")
    path = start_mount(source, *options, environment=environment).mountpoint / "f"
    ended = threading.Event()
    seen: set[tuple[int, float]] = set()

    def look(fd: int) -> None:
        while not ended.is_set():
            for one in (os.fstat(fd), path.stat()):
                seen.add((one.st_size, one.st_mtime))

    held = os.open(path, os.O_RDONLY)
    threads = [threading.Thread(target=look, args=(held,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, NUM_VERSIONS + 1):
            put(store / "f", b"0" * (10 + number), EARLY + number)
            newest = (10 + number, EARLY + number)
            if number % 2:
                wait_until(lambda now=newest: now in seen, "the new size and time")
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                assert (status.st_size, status.st_mtime) == newest
                assert len(file.read()) == 10 + number
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    versions = {(10 + n, EARLY + n) for n in range(NUM_VERSIONS + 1)}
    assert seen <= versions
    status = os.fstat(held)
    assert (status.st_size, status.st_mtime) in versions
    os.close(held)


def record_of(number: int) -> bytes:
    return b"record %06d\n" % number


RECORD_BYTES = len(record_of(0))


def append(folder: Path, numbers: Iterable[int]) -> None:
    for number in numbers:
        with (folder / "events").open("ab") as file:
            file.write(record_of(number))


def listed_size(folder: Path) -> int:
    """Of the file, as it comes with the listing."""
    with os.scandir(folder) as entries:
        return sum(one.stat().st_size for one in entries if one.name == "events")


def read_records(folder: Path, first: int) -> int:
    """Check the file's records from that one on; how many there were."""
    with (folder / "events").open("rb", buffering=0) as file:
        file.seek(first * RECORD_BYTES)
        tail = file.readall()
    assert tail is not None
    count = len(tail) // RECORD_BYTES
    assert tail == b"".join(map(record_of, range(first, first + count)))
    return count


@pytest.mark.timeout(300 + NUM_APPENDS)
def test_a_follower_on_the_other_mount_reads_each_record_that_was_appended(
    start_mount: Callable[..., Any], volume: Any, wait_until: Any
) -> None:
    _, source, environment = volume
    a = start_mount(source, name="a", environment=environment).mountpoint
    options = ("--metadata-timeout", "0.05")
    b = start_mount(source, *options, name="b", environment=environment).mountpoint
    held: list[tuple[int, int]] = []
    for number in range(NUM_APPENDS):
        append(a, [number])
        size = (number + 1) * RECORD_BYTES
        wait_until(lambda longer=size: listed_size(b) >= longer, "a longer file in the listing")
        assert listed_size(b) == size
        assert read_records(b, number) == 1
        if number % (NUM_APPENDS // 5) == 0:
            held.append((os.open(b / "events", os.O_RDONLY), number + 1))

    # Now the other one does not wait: a handle may be of a version that is gone.
    appending = threading.Thread(target=append, args=(a, range(NUM_APPENDS, 2 * NUM_APPENDS)))
    appending.start()
    num_stale, done = 0, NUM_APPENDS
    try:
        while done < 2 * NUM_APPENDS:
            size = done * RECORD_BYTES
            wait_until(lambda shorter=size: listed_size(b) > shorter, "a longer file")
            count = unless_stale(partial(read_records, b, done))
            num_stale += count is None
            done += count or 0
    finally:
        appending.join()
    print(f"{num_stale} handles whose version was gone")
    for fd, count in held:
        data = unless_stale(partial(os.pread, fd, MIB, 0))
        assert data in (None, b"".join(map(record_of, range(count))))
        os.close(fd)
    assert read_records(b, 0) == read_records(a, 0) == 2 * NUM_APPENDS


def test_bytes_of_two_versions_never_mix_although_the_first_was_read_ahead(
    start_mount: Callable[..., Any], volume: Any
) -> None:
    store, source, environment = volume
    # Every 8 bytes tell version and place.
    old, new = (
        b"".join((tag << 56 | at).to_bytes(8, "big") for at in range(0, MIB, 8)) for tag in (1, 2)
    )
    put(store / "f", old * READ_AHEAD_MIB, EARLY)
    mount = start_mount(source, environment=environment)
    path = mount.mountpoint / "f"
    with path.open("rb", buffering=0) as file:
        assert file.read(MIB) == old
        put(store / "f", new * READ_AHEAD_MIB, EARLY + 100)
        done = MIB
        # Where a page is not there, a read ends before it, and the next one says why.
        while data := unless_stale(partial(file.read, MIB)):
            assert data == (old * 2)[done % MIB : done % MIB + len(data)]
            done += len(data)
        print(done // MIB, "MiB of the old version")
        # While the old handle is open, and from the cache.
        expected = hashlib.sha256(new * READ_AHEAD_MIB).hexdigest()
        for _ in range(2):
            with path.open("rb") as again:
                assert hashlib.file_digest(again, "sha256").hexdigest() == expected
                os.posix_fadvise(again.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == expected


class Replaced:
    """A file whose content is its version's number, again and again, and who reads it."""

    def __init__(self, store: Path, path: Path) -> None:
        self._store = store
        self._path = path
        self.stored = 0
        """The version that the store surely has."""

        self.counts: Counter[str] = Counter()
        """What came of the reads of all readers."""

        self.problems: list[str] = []
        self.ended = threading.Event()

    def replace(self) -> None:
        number = self.stored + 1
        put(self._store, number.to_bytes(8, "big") * 100 * (1 + number % 3), EARLY + number)
        self.stored = number

    def read_until_ended(self) -> None:
        newest = 0
        while not self.ended.is_set():
            at_least = max(newest, self.stored)
            try:
                file = self._path.open("rb", buffering=0)
            except OSError as error:
                self.problems.append(f"open: {error}")
                continue
            with file:
                data = unless_stale(file.readall)
            self.counts["stale" if data is None else "read"] += 1
            if data is not None:
                newest = int.from_bytes(data[:8], "big")
                if data != data[:8] * 100 * (1 + newest % 3):
                    self.problems.append(f"version {newest} in {len(data)} bytes of several")
                if newest < at_least:
                    self.problems.append(f"version {newest} after {at_least}")

    def list_until_ended(self) -> None:
        while not self.ended.is_set():
            with os.scandir(self._path.parent) as entries:
                sizes = [one.stat().st_size for one in entries if one.name == self._path.name]
            if sizes not in ([800], [1600], [2400]):
                self.problems.append(f"a listing with the sizes {sizes}")


@pytest.mark.timeout(300 + NUM_REPLACEMENTS)
def test_many_programs_open_a_path_while_another_client_replaces_it_again_and_again(
    start_mount: Callable[..., Any], volume: Any, wait_until: Any
) -> None:
    """The kernel hides one ESTALE of an open, not two. A version that has gone cannot be read."""
    store, source, environment = volume
    path = start_mount(source, environment=environment).mountpoint / "f"
    file = Replaced(store / "f", path)
    file.replace()
    work = [file.read_until_ended] * 6 + [file.list_until_ended]
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    try:
        for _ in range(NUM_REPLACEMENTS):
            num_before = file.counts.total()
            wait_until(lambda so_many=num_before: file.counts.total() > so_many, "another read")
            file.replace()
    finally:
        file.ended.set()
        for thread in threads:
            thread.join()
    print(dict(file.counts))
    assert file.problems == []
    assert file.counts["read"] > 0
    assert int.from_bytes(path.read_bytes()[:8], "big") == file.stored
