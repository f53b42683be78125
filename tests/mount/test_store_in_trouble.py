"""A store that is slow, throttles, is down for a while, or signs for a short time only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
NUM_READERS = 20
OUTAGE_SECONDS = float(os.environ.get("TRAINMOUNT_TEST_OUTAGE_SECONDS", "3"))
STREAM_MIB = int(os.environ.get("TRAINMOUNT_TEST_STREAM_MIB", "6"))
"""In CI a share; a long run has 20 s, and streams of 64 MiB."""

NAMES = ("head_file", "head_directory", "list_directory")
BYTES = ("presigned_get", "get_file")


class Faults:
    """What the server does to requests from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set()

    def set(self, *rules: dict[str, Any]) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(rules))
        part.rename(self.path)

    def set_each(self, routes: tuple[str, ...], **rule: Any) -> None:
        self.set(*({"route": route, **rule} for route in routes))


@pytest.fixture
def faults(files_server: Any, tmp_path: Path) -> Faults:
    """Of the server, which runs anew with it."""
    made = Faults(tmp_path / "faults.json")
    files_server.stop()
    files_server.start("--faults", str(made.path))
    return made


def _errno(function: Callable[[], object]) -> int:
    try:
        function()
    except OSError as error:
        return error.errno or 0
    return 0


def test_names_are_waited_for_while_the_store_throttles_and_nothing_absent_is_remembered(
    start_mount: Callable[..., Any], files_server: Any, faults: Faults, wait_until: Any
) -> None:
    (files_server.volume / "d").mkdir()
    for name in ("f", "g", "d/inside"):
        (files_server.volume / name).write_bytes(b"here")
    here = start_mount(files_server.source, environment=files_server.environment()).mountpoint
    assert not (here / "marker").exists()
    faults.set_each(NAMES, status=503)
    ended = threading.Event()
    looks = {
        "stat": lambda: (here / "f").stat(),
        "list": lambda: list((here / "d").iterdir()),
        "open": lambda: (here / "g").read_bytes(),
    }
    outcomes: dict[str, set[int]] = {name: set() for name in looks}

    def look(name: str) -> None:
        while not ended.is_set():
            outcomes[name].add(_errno(looks[name]))

    threads = [threading.Thread(target=look, args=(name,)) for name in looks]
    for thread in threads:
        thread.start()
    time.sleep(OUTAGE_SECONDS / 2)
    faults.set_each(NAMES, status=429, retry_after="1")
    (files_server.volume / "marker").write_bytes(b"put meanwhile")
    time.sleep(OUTAGE_SECONDS / 2)
    faults.set()
    began = time.monotonic()
    wait_until(lambda: (here / "marker").exists(), "the marker")
    print(f"marker seen after {time.monotonic() - began:.2f} s")
    ended.set()
    for thread in threads:
        thread.join()
    assert outcomes == {name: {0} for name in looks}
    assert sorted(path.name for path in here.iterdir()) == ["d", "f", "g", "marker"]


def test_names_of_a_store_that_is_away_too_long_are_eagain_and_there_again_at_once(
    start_mount: Callable[..., Any], files_server: Any, faults: Faults
) -> None:
    (files_server.volume / "d").mkdir()
    for name in ("f", "g", "d/inside"):
        (files_server.volume / name).write_bytes(b"here")
    mount = start_mount(
        files_server.source,
        # Much longer than this test: whatever was believed by mistake would stay.
        *("--negative-timeout", "600", "--metadata-timeout", "0"),
        environment=files_server.environment(),
        toy="impatient",
    )
    here = mount.mountpoint
    for status in (503, 429):
        marker = here / f"marker-{status}"
        faults.set_each(NAMES, status=status)
        looks: list[Callable[[], object]] = [
            (here / "f").stat,
            partial(os.listdir, here / "d"),
            (here / "g").read_bytes,
            marker.stat,
        ]
        with ThreadPoolExecutor(len(looks)) as threads:
            assert list(threads.map(_errno, looks)) == [errno.EAGAIN] * len(looks)
        (files_server.volume / marker.name).write_bytes(b"put meanwhile")
        faults.set()
        assert marker.read_bytes() == b"put meanwhile"
        assert (here / "f").stat().st_size == len((here / "g").read_bytes()) == 4
        assert [path.name for path in (here / "d").iterdir()] == ["inside"]


READ_ON = """
import errno, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
print("begun", flush=True)
size = 0
try:
    while data := os.read(file, 1 << 20):
        assert set(data) == {1}
        size += len(data)
except OSError as error:
    print(errno.errorcode[error.errno])
else:
    print(size)
"""


def _in_kernel(pids: list[int]) -> list[int]:
    """Those that wait where no signal reaches them."""
    found = []
    for pid in pids:
        tasks = Path(f"/proc/{pid}/task")
        try:
            states = [(one / "stat").read_text().rpartition(")")[2][1] for one in tasks.iterdir()]
        except OSError:
            continue
        if "D" in states:
            found.append(pid)
    return found


@contextlib.contextmanager
def _readers(here: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Programs that have begun to read a file each."""
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READ_ON, here / f"f{number}"], stdout=subprocess.PIPE, text=True
        )
        for number in range(NUM_READERS)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "begun\n"
        yield readers
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


def _write_files(volume: Path, size: int) -> None:
    """One for each reader, and another. They are old: a store that tells versions by the second
    could not tell them from others of their size that come within the same one.
    """
    before = time.time() - 10
    for number in range(NUM_READERS):
        (volume / f"f{number}").write_bytes(b"\1" * size)
        os.utime(volume / f"f{number}", (before, before))
    (volume / "other").write_bytes(b"other")


def _replace_or_remove(volume: Path, size: int) -> None:
    """What they read: each second file is gone, and the others are other ones."""
    for number in range(NUM_READERS):
        path = volume / f"f{number}"
        if number % 2:
            path.unlink()
        else:
            part = path.with_name(".part")
            part.write_bytes(b"\2" * size)
            part.rename(path)


def _refresh(mountpoint: Path) -> None:
    command = [sys.executable, "-m", "trainmount_fuse", "refresh", "--mount", mountpoint]
    subprocess.run(command, timeout=60, check=True)


def test_reads_of_files_that_go_end_as_the_slow_store_answers(
    start_mount: Callable[..., Any], files_server: Any, faults: Faults
) -> None:
    size = 4 * MIB
    _write_files(files_server.volume, size)
    mount = start_mount(files_server.source, environment=files_server.environment())
    here = mount.mountpoint
    faults.set_each(BYTES, path="*/data/f*", latency_ms=1000)
    with _readers(here) as readers:
        _replace_or_remove(files_server.volume, size)
        _refresh(here)
        began = time.monotonic()
        assert (here / "other").read_bytes() == b"other"
        outputs = [reader.communicate(timeout=60)[0].strip() for reader in readers]
    print(f"ended after {time.monotonic() - began:.2f} s", Counter(outputs))
    assert set(outputs) <= {str(size), "ESTALE"}
    assert [set((here / f"f{number}").read_bytes()) for number in (0, 2)] == [{2}, {2}]
    assert not (here / "f1").exists()
    assert mount.stop() == 0


def test_files_that_go_while_they_are_read_hold_up_neither_notices_nor_the_end(
    start_mount: Callable[..., Any], files_server: Any, faults: Faults
) -> None:
    size = 4 * MIB
    _write_files(files_server.volume, size)
    mount = start_mount(files_server.source, environment=files_server.environment())
    here = mount.mountpoint
    faults.set_each(BYTES, path="*/data/f*", latency_ms=600_000)
    with _readers(here) as readers:
        _replace_or_remove(files_server.volume, size)
        began = time.monotonic()
        for _ in range(2):
            _refresh(here)
            assert (here / "other").read_bytes() == b"other"
            # Names are new at once, and need none of the bytes.
            assert not (here / "f1").exists()
            assert (here / "f0").stat().st_size == size
        told = time.monotonic() - began
        assert [reader.poll() for reader in readers] == [None] * NUM_READERS
        # The requests that hang break off, and are made again.
        files_server.stop()
        faults.set()
        files_server.start("--faults", str(faults.path))
        began = time.monotonic()
        outputs = [reader.communicate(timeout=60)[0].strip() for reader in readers]
        ended = time.monotonic() - began
    assert set(outputs) <= {str(size), "ESTALE"}
    print(f"refreshed after {told:.2f} s, ended after {ended:.2f} s", set(outputs))
    assert _in_kernel([mount.ready()["daemon_pid"]]) == []
    assert set((here / "f0").read_bytes()) == {2}
    assert mount.stop() == 0


def test_a_stop_while_readers_wait_for_a_slow_store_leaves_no_task_in_the_kernel(
    start_mount: Callable[..., Any], files_server: Any, faults: Faults, wait_until: Any
) -> None:
    for number in range(NUM_READERS):
        (files_server.volume / f"f{number}").write_bytes(b"\1" * 4 * MIB)
    mount = start_mount(files_server.source, environment=files_server.environment())
    faults.set_each(BYTES, latency_ms=600_000)
    with _readers(mount.mountpoint) as readers:
        for number in range(NUM_READERS):
            (files_server.volume / f"f{number}").unlink()
        _refresh(mount.mountpoint)
        pids = [reader.pid for reader in readers]
        began = time.monotonic()
        mount.stop()
        print(f"ended after {time.monotonic() - began:.2f} s")
        assert not mount.is_mounted()
        wait_until(lambda: not _in_kernel(pids), "an end of their reads")
        outputs = [reader.communicate(timeout=60)[0].strip() for reader in readers]
    assert set(outputs) <= {"EIO", "ENOTCONN", "ECONNABORTED", "ESTALE"}
