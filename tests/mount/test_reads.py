"""Reads through a real kernel: of stores that are silent, of many readers, ahead of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20
ROUTES = ("presigned_get", "get_file")
"""Those of a file's bytes."""

READ_ALL = "import sys; file = open(sys.argv[1], 'rb'); print('begun', flush=True); file.read()"


def fill(path: Path, num_mib: int) -> bytes:
    """Each MiB begins with its own number."""
    data = b"".join(n.to_bytes(8, "little") + os.urandom(MIB - 8) for n in range(num_mib))
    path.write_bytes(data)
    return data


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


def test_many_files_read_at_once_through_a_small_cache_are_right(start_mount, files_server):
    contents = {f"{n}": fill(files_server.volume / f"{n}", 4) for n in range(12)}
    options = ("--cache-size=16777216",)
    mount = start_mount(files_server.source, *options, environment=files_server.environment())

    def check(name: str) -> bool:
        path = mount.mountpoint / name
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return file.read() == contents[name]

    for _round in range(3):
        with ThreadPoolExecutor(12) as threads:
            assert all(threads.map(check, contents))


def test_a_silent_store_holds_up_nobody_else_and_its_readers_can_be_killed(
    start_mount, files_server, tmp_path
):
    fill(files_server.volume / "here", 2)
    for number in range(16):
        fill(files_server.volume / f"silent-{number}", 4)
    faults = tmp_path / "faults.json"
    faults.write_text("[]")
    files_server.stop()
    files_server.start("--faults", str(faults))
    mount = start_mount(files_server.source, environment=files_server.environment())
    here = mount.mountpoint / "here"
    here.read_bytes()
    rules = [{"path": "*silent*", "route": route, "latency_ms": 600_000} for route in ROUTES]
    faults.write_text(json.dumps(rules))
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READ_ALL, str(mount.mountpoint / f"silent-{number}")],
            stdout=subprocess.PIPE,
        )
        for number in range(16)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            reader.stdout.readline()
        began = time.monotonic()
        with here.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert len(file.read()) == 2 * MIB
        assert len(list(mount.mountpoint.iterdir())) == 17
        os.statvfs(mount.mountpoint)
        # Far below the deadline of the silent reads.
        assert time.monotonic() - began < 20
    finally:
        for reader in readers:
            reader.send_signal(signal.SIGKILL)
    for reader in readers:
        reader.communicate(timeout=20)
        assert reader.returncode == -signal.SIGKILL
