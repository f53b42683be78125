"""Reads through a real kernel: of stores that are silent, of many readers, ahead of them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MIB = 1 << 20
ROUTES = ("presigned_get", "get_file")
"""Those of a file's bytes."""

READ_ALL = """
import errno, sys
file = open(sys.argv[1], "rb")
print("begun", flush=True)
try:
    file.read()
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


def test_a_silent_store_holds_up_nobody_else_and_leaves_nothing_behind(
    start_mount, files_server, tmp_path, wait_until
):
    """Half of its readers are killed, the others get an error at the deadline."""
    for name in ("here", "cold"):
        fill(files_server.volume / name, 2)
    for number in range(NUM_SILENT):
        fill(files_server.volume / f"silent-{number:02}", 4)
    faults = tmp_path / "faults.json"
    faults.write_text("[]")
    files_server.stop()
    files_server.start("--faults", str(faults))
    mount = start_mount(
        files_server.source, environment=files_server.environment(), toy="impatient"
    )
    here = mount.mountpoint / "here"
    here.read_bytes()
    daemon = Path(f"/proc/{mount.ready()['daemon_pid']}")
    before = (len(list((daemon / "task").iterdir())), resident_bytes(daemon))
    rules = [{"path": "*silent*", "route": route, "latency_ms": 600_000} for route in ROUTES]
    faults.write_text(json.dumps(rules))
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READ_ALL, str(mount.mountpoint / f"silent-{number:02}")],
            stdout=subprocess.PIPE,
        )
        for number in range(NUM_SILENT)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            reader.stdout.readline()
        began = time.monotonic()
        drop_pages(here)
        assert len(here.read_bytes()) == 2 * MIB
        assert len((mount.mountpoint / "cold").read_bytes()) == 2 * MIB
        assert len(list(mount.mountpoint.iterdir())) == NUM_SILENT + 2
        os.statvfs(mount.mountpoint)
        answered = time.monotonic() - began
    finally:
        for reader in readers[::2]:
            reader.send_signal(signal.SIGKILL)
    for reader in readers[::2]:
        reader.communicate(timeout=20)
        assert reader.returncode == -signal.SIGKILL
    gone = time.monotonic() - began - answered
    outputs = [reader.communicate(timeout=60)[0] for reader in readers[1::2]]
    ended = time.monotonic() - began
    assert outputs == [b"EIO\n"] * (NUM_SILENT // 2)
    # Others did not wait for the deadline.
    assert answered < ended
    print(f"answered {answered:.2f} s, killed gone {gone:.2f} s, ended {ended:.2f} s")
    limit = before[0] + READ_AHEAD_THREADS
    wait_until(lambda: len(list((daemon / "task").iterdir())) <= limit, "fewer threads")
    after = (len(list((daemon / "task").iterdir())), resident_bytes(daemon))
    print("threads and memory", before, after)
    assert after[1] <= before[1] + 16 * MIB
