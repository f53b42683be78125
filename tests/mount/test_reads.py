"""Reads through a real kernel: of stores that are silent, of many readers, ahead of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.mount.conftest import DEADLINE_SECONDS

MIB = 1 << 20
ROUTES = ("presigned_get", "get_file")
"""Those of a file's bytes."""

READ_ALL = """
import errno, hashlib, sys
file = open(sys.argv[1], "rb")
print("begun", flush=True)
try:
    print(hashlib.sha256(file.read()).hexdigest())
except OSError as error:
    print(errno.errorcode[error.errno])
"""

NUM_FILES = int(os.environ.get("TRAINMOUNT_TEST_FILES", "24"))
FILE_MIB = int(os.environ.get("TRAINMOUNT_TEST_FILE_MIB", "2"))
NUM_ROUNDS = int(os.environ.get("TRAINMOUNT_TEST_ROUNDS", "2"))
SHARED_MIB = int(os.environ.get("TRAINMOUNT_TEST_SHARED_MIB", "32"))
"""In CI a share; a long run reads 64 files of 16 MiB in 10 rounds, and 1,024 MiB by four."""

READ_AHEAD_THREADS = 8 + 32
"""Those for ranges and for next files, which stay once they were needed."""

NUM_SILENT = 32


def fill(path: Path, num_mib: int) -> bytes:
    """Each MiB begins with its own number."""
    data = b"".join(n.to_bytes(8, "little") + os.urandom(MIB - 8) for n in range(num_mib))
    path.write_bytes(data)
    return data


def drop_pages(*paths: Path) -> None:
    """Have the next reads of the files ask the daemon."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes(process: Path) -> int:
    pages = int((process / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_threads(process: Path) -> int:
    return len(list((process / "task").iterdir()))


def test_a_reader_gets_the_bytes_that_were_pushed_to_the_kernel(start_mount, files_server):
    data = fill(files_server.volume / "file", 48)
    mount = start_mount(files_server.source, environment=files_server.environment())
    path = mount.mountpoint / "file"
    assert path.read_bytes() == data
    # From the kernel's pages, then from the cache on disk.
    assert path.read_bytes() == data
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert path.read_bytes() == data


def test_a_file_that_is_written_after_it_was_read_ahead_shows_what_was_written(
    start_mount, files_server
):
    data = bytearray(fill(files_server.volume / "file", 24))
    mount = start_mount(files_server.source, environment=files_server.environment())
    path = mount.mountpoint / "file"
    with path.open("rb") as reader:
        assert reader.read(MIB) == data[:MIB]
        with path.open("r+b", buffering=0) as writer:
            for number in range(2, 24):
                writer.seek(number * MIB + 100)
                writer.write(b"written")
                data[number * MIB + 100 : number * MIB + 107] = b"written"
        with path.open("rb") as again:
            assert again.read() == data
    assert (files_server.volume / "file").read_bytes() == data


@pytest.mark.timeout(300 * NUM_ROUNDS)
def test_many_files_read_at_once_through_a_small_cache_are_right(start_mount, files_server):
    """Blocks are thrown out while others are read."""
    expected = []
    for number in range(NUM_FILES):
        data = fill(files_server.volume / f"{number:03}", FILE_MIB)
        expected.append(f"{hashlib.md5(data).hexdigest()}  {number:03}")
    cache_bytes = NUM_FILES * FILE_MIB * MIB // 4
    options = (f"--cache-size={cache_bytes}",)
    mount = start_mount(files_server.source, *options, environment=files_server.environment())
    command = f"ls | xargs -P {NUM_FILES} -n 1 md5sum | sort -k 2"
    for _round in range(NUM_ROUNDS):
        drop_pages(*mount.mountpoint.iterdir())
        done = subprocess.run(
            ["sh", "-ec", command], cwd=mount.mountpoint, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines() == expected
    cache = mount.status()["cache"]
    assert cache["evicted_bytes"] > 0
    assert cache["cached_bytes"] <= cache_bytes


QUARTERS = """
import hashlib, mmap, os, sys
path, how, num_readers = sys.argv[1], sys.argv[2], int(sys.argv[3])
step = 1 << 20
size = os.stat(path).st_size
file = os.open(path, os.O_RDONLY)
mapped = mmap.mmap(file, size, prot=mmap.PROT_READ) if how == "mapped" else None
turns = [os.pipe() for _ in range(num_readers)]
part = size // num_readers
for number in range(num_readers):
    if os.fork():
        continue
    digest = hashlib.sha256()
    for offset in range(number * part, (number + 1) * part, step):
        # One after another, a step each.
        os.read(turns[number][0], 1)
        for at in range(offset, offset + step, step // 8):
            end = at + step // 8
            digest.update(os.pread(file, end - at, at) if mapped is None else mapped[at:end])
        os.write(turns[(number + 1) % num_readers][1], b"x")
    os.write(1, f"{number} {digest.hexdigest()}\\n".encode())
    os._exit(0)
os.write(turns[0][1], b"x")
for _ in range(num_readers):
    assert os.wait()[1] == 0
"""


def test_forked_readers_of_one_descriptor_or_mapping_fetch_each_byte_once(
    start_mount, files_server
):
    size = SHARED_MIB * MIB
    data = {how: fill(files_server.volume / how, SHARED_MIB) for how in ("alone", "fd", "mapped")}
    mount = start_mount(files_server.source, environment=files_server.environment())
    seconds = {}
    for how, content in data.items():
        num_readers = 1 if how == "alone" else 4
        before = mount.status()["cache"]["fetched_bytes"]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", QUARTERS, mount.mountpoint / how, how, str(num_readers)],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds[how] = round(time.monotonic() - began, 2)
        part = size // num_readers
        assert sorted(done.stdout.splitlines()) == [
            f"{n} {hashlib.sha256(content[n * part : (n + 1) * part]).hexdigest()}"
            for n in range(num_readers)
        ]
        fetched = mount.status()["cache"]["fetched_bytes"] - before
        assert size <= fetched <= 1.1 * size, how
    print(seconds)


class SilentStore:
    """A store that takes the requests for some files' bytes, and sends nothing."""

    def __init__(self, files_server, faults: Path) -> None:
        self.server = files_server
        self._faults = faults
        self.contents = {
            f"silent-{number:02}": fill(files_server.volume / f"silent-{number:02}", 4)
            for number in range(NUM_SILENT)
        }
        self.speak()
        self.restart()

    def be_silent(self) -> None:
        rules = [{"path": "*silent*", "route": route, "latency_ms": 600_000} for route in ROUTES]
        self._faults.write_text(json.dumps(rules))

    def speak(self) -> None:
        self._faults.write_text("[]")

    def restart(self) -> None:
        """The requests that wait break off."""
        self.server.stop()
        self.server.start("--faults", str(self._faults))

    @contextlib.contextmanager
    def readers(self, mountpoint: Path) -> Iterator[list[subprocess.Popen[str]]]:
        """One program for each of the files; all have it open."""
        programs = [
            subprocess.Popen(
                [sys.executable, "-c", READ_ALL, str(mountpoint / name)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in self.contents
        ]
        try:
            for program in programs:
                assert program.stdout is not None
                assert program.stdout.readline() == "begun\n"
            yield programs
        finally:
            for program in programs:
                program.kill()
                program.communicate()


@pytest.fixture
def silent_store(files_server, tmp_path) -> SilentStore:
    return SilentStore(files_server, tmp_path / "faults.json")


def test_a_silent_store_holds_up_nobody_else_and_no_end_of_a_reader(
    start_mount, files_server, silent_store
):
    """The daemon has the patience that it always has; nothing here waits for that."""
    expected = {name: fill(files_server.volume / name, 2) for name in ("here", "cold")}
    mount = start_mount(files_server.source, environment=files_server.environment())
    here = mount.mountpoint
    assert (here / "here").read_bytes() == expected["here"]
    silent_store.be_silent()
    seconds = {}
    with silent_store.readers(here) as readers:
        drop_pages(here / "here")
        for what, look in {
            "cached": lambda: (here / "here").read_bytes() == expected["here"],
            "cold": lambda: (here / "cold").read_bytes() == expected["cold"],
            "ls": lambda: len(list(here.iterdir())) == NUM_SILENT + 2,
            "df": lambda: os.statvfs(here).f_bsize > 0,
        }.items():
            began = time.monotonic()
            assert look()
            seconds[what] = round(time.monotonic() - began, 2)
        assert [reader.poll() for reader in readers] == [None] * NUM_SILENT
        began = time.monotonic()
        for reader in readers[::2]:
            reader.kill()
        assert {reader.wait(DEADLINE_SECONDS) for reader in readers[::2]} == {-signal.SIGKILL}
        seconds["killed"] = round(time.monotonic() - began, 2)
        assert [reader.poll() for reader in readers[1::2]] == [None] * (NUM_SILENT // 2)
        silent_store.speak()
        silent_store.restart()
        outputs = [reader.communicate(timeout=DEADLINE_SECONDS)[0] for reader in readers[1::2]]
    print(seconds)
    digests = [hashlib.sha256(data).hexdigest() for data in silent_store.contents.values()]
    assert outputs == [f"{digest}\n" for digest in digests[1::2]]
    assert mount.stop() == 0


def test_reads_of_a_silent_store_end_at_the_deadline_and_leave_nothing_behind(
    start_mount, files_server, silent_store, wait_until
):
    fill(files_server.volume / "here", 2)
    mount = start_mount(
        files_server.source, environment=files_server.environment(), toy="impatient"
    )
    (mount.mountpoint / "here").read_bytes()
    daemon = Path(f"/proc/{mount.ready()['daemon_pid']}")
    before = (num_threads(daemon), resident_bytes(daemon))
    silent_store.be_silent()
    with silent_store.readers(mount.mountpoint) as readers:
        outputs = [reader.communicate(timeout=DEADLINE_SECONDS)[0] for reader in readers]
    assert outputs == ["EIO\n"] * NUM_SILENT
    limit = before[0] + READ_AHEAD_THREADS
    wait_until(lambda: num_threads(daemon) <= limit, "fewer threads")
    after = (num_threads(daemon), resident_bytes(daemon))
    print("threads and memory", before, after)
    assert after[1] <= before[1] + 16 * MIB
    silent_store.speak()
    for name, content in silent_store.contents.items():
        assert (mount.mountpoint / name).read_bytes() == content
    assert mount.stop() == 0
