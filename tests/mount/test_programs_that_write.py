"""What programs do to files beyond write and close, where the kernel has a say in it, and large
files that are sent while they are written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20


@pytest.fixture(name="files_server")
def _files_server(files_server: Any) -> Any:
    """A Files API that counts for us."""
    files_server.stop()
    files_server.start("--admin")
    return files_server


@pytest.fixture
def mount(start_mount: Any, files_server: Any) -> Any:
    return start_mount(files_server.source, environment=files_server.environment())


def _run(mount: Any, program: str, *arguments: str) -> str:
    """A program of its own, in the mount's directory; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=mount.mountpoint,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _statistics(server: Any) -> dict[str, Any]:
    asked = urllib.request.Request(
        f"{server.url}/admin/statistics", headers={"Authorization": "Bearer right"}
    )
    with urllib.request.urlopen(asked) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.mark.quotes(
    "Each copy of a descriptor, by `dup` or `fork`, sends at its `close` what is new, and the "
    "others write on.",
)
def test_a_child_that_exits_closes_nothing_of_its_parents(mount: Any, files_server: Any) -> None:
    """Its copy of the descriptor is closed, which sends what is new, and the parent writes on."""
    _run(
        mount,
        """
import os
file = os.open("forked", os.O_WRONLY | os.O_CREAT)
for number in (1, 2):
    assert os.write(file, bytes([number]) * 1_000_000) == 1_000_000
    if number == 1:
        child = os.fork()
        if not child:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        os.close(os.dup(file))
os.close(file)
""",
    )
    whole = b"\1" * 1_000_000 + b"\2" * 1_000_000
    assert (files_server.volume / "forked").read_bytes() == whole
    assert _statistics(files_server)["requests"]["put_file"] == 2


def test_a_pid_file_that_is_removed_before_it_is_closed_leaves_nothing(
    mount: Any, files_server: Any
) -> None:
    _run(
        mount,
        """
import os
file = os.open("pid", os.O_RDWR | os.O_CREAT | os.O_EXCL)
os.write(file, b"4711")
os.unlink("pid")
assert not os.path.exists("pid")
os.ftruncate(file, 100)
os.pwrite(file, b"x", 50)
assert (os.fstat(file).st_size, os.fstat(file).st_nlink) == (100, 0)
assert os.pread(file, 200, 0) == b"4711" + bytes(46) + b"x" + bytes(49)
os.close(file)
""",
    )
    assert list(files_server.volume.iterdir()) == []
    assert "put_file" not in _statistics(files_server)["requests"]
    assert mount.stop() == 0
    assert list((mount.folder / "state" / "staging").iterdir()) == []


def test_what_is_written_through_a_mapping_is_in_the_store_after_msync_and_close(
    mount: Any, files_server: Any
) -> None:
    _run(
        mount,
        """
import mmap, os
file = os.open("mapped", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 3_000_000)
with mmap.mmap(file, 3_000_000) as pages:
    pages[1_000_000:1_000_004] = b"here"
    pages.flush()
    os.fsync(file)
    assert os.pread(file, 4, 1_000_000) == b"here"
    pages[2_999_999:] = b"!"
os.close(file)
""",
    )
    expected = bytearray(3_000_000)
    expected[1_000_000:1_000_004] = b"here"
    expected[2_999_999] = ord("!")
    found = mount.mountpoint / "mapped"
    assert found.read_bytes() == expected
    assert mount.stop() == 0
    assert (files_server.volume / "mapped").read_bytes() == expected


def test_the_ways_of_making_a_file_larger_and_of_copying_it_do_what_they_say(
    mount: Any, files_server: Any
) -> None:
    _run(
        mount,
        """
import errno, os, shutil
file = os.open("sparse", os.O_RDWR | os.O_CREAT)
os.pwrite(file, b"end", 10_000_000)
os.posix_fallocate(file, 0, 10_100_000)
assert os.fstat(file).st_size == 10_100_000
os.fdatasync(file)
os.close(file)
with open("sparse", "rb") as source, open("copied", "wb") as target:
    left = 10_100_000
    while left:
        left -= os.copy_file_range(source.fileno(), target.fileno(), left)
for _ in range(3):
    with open("log", "ab", buffering=0) as log:
        log.write(b"line")
first, second = (os.open("shared", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(2))
os.write(first, b"1")
os.write(second, b"2")
os.write(first, b"3")
os.close(first)
os.close(second)
try:
    os.open("log", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
except FileExistsError:
    pass
else:
    raise AssertionError("made although it was there")
script = os.open("script", os.O_WRONLY | os.O_CREAT, 0o755)
os.write(script, b"#!/bin/sh\\necho ran > ran\\n")
with open("script", "rb") as reader:
    assert reader.read().startswith(b"#!/bin/sh")
os.close(script)
assert os.system("./script") == 0
""",
    )
    expected = bytearray(10_100_000)
    expected[10_000_000:10_000_003] = b"end"
    stored = files_server.volume
    assert (stored / "sparse").read_bytes() == (stored / "copied").read_bytes() == expected
    assert (stored / "log").read_bytes() == b"line" * 3
    assert (stored / "shared").read_bytes() == b"123"
    assert (stored / "ran").read_bytes() == b"ran\n"


@pytest.mark.quotes(
    "A file of 48 MiB or more that is written from start to end is sent while it is written.",
    "It shows at `close` all the same.",
)
def test_kills_while_a_large_file_is_written_leave_a_whole_file_and_no_unfinished_upload(
    mount: Any, files_server: Any, wait_until: Any
) -> None:
    blocks = [os.urandom(MIB) for _ in range(8)]
    path = mount.mountpoint / "large"
    with path.open("wb", buffering=0) as file:
        for number in range(120):
            assert file.write(blocks[number % 8]) == MIB
            if number == 46:
                assert _statistics(files_server)["open_uploads"] == 0
            if number in (60, 90):
                # Parts are on their way now.
                wait_until(lambda: _statistics(files_server)["open_uploads"] >= 1, "an upload")
                assert not (files_server.volume / "large").exists()
                mount.kill_daemon()
    stored = (files_server.volume / "large").read_bytes()
    assert stored == b"".join(blocks) * 15
    wait_until(lambda: _statistics(files_server)["open_uploads"] == 0, "their end")


@pytest.mark.quotes(
    "A disk that is full refuses `write` before anything is acknowledged.",
    "ENOSPC, EDQUOT | the disk of the state directory is full, at its reserve or at a quota; a "
    "`write` that fits in part is short",
)
def test_a_full_staging_disk_is_an_error_of_the_write_and_what_was_taken_is_kept(
    start_mount: Any, files_server: Any, tmp_path: Path
) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
    try:
        mount = start_mount(
            files_server.source,
            *("--state-dir", str(disk / "state"), "--free-disk", "0"),
            environment=files_server.environment(),
        )
        _run(
            mount,
            """
import errno, os
file = os.open("big", os.O_WRONLY | os.O_CREAT)
written = 0
try:
    while True:
        written += os.write(file, b"x" * 1_000_000)
except OSError as error:
    assert error.errno == errno.ENOSPC
assert 5_000_000 < written < 24_000_000
assert os.fstat(file).st_size == written
os.close(file)
assert os.stat("big").st_size == written
with open("small", "wb") as small:
    small.write(b"there is room again")
""",
        )
        stored = (files_server.volume / "big").read_bytes()
        assert stored == b"x" * len(stored)
        assert (files_server.volume / "small").read_bytes() == b"there is room again"
        assert mount.stop() == 0
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.quotes(
    "Unsent bytes are in the state directory, and the cache never takes their room.",
)
def test_a_cache_that_fills_the_disk_takes_nothing_from_files_that_wait_for_the_store(
    start_mount: Any, files_server: Any, tmp_path: Path, wait_until: Any
) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    for number in range(8):
        (files_server.volume / f"other{number}").write_bytes(os.urandom(16 * MIB))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(disk)], check=True)
    places = ("--state-dir", str(disk / "state"), "--cache-dir", str(disk / "cache"))
    files = ("f0", "f1", "f2")
    try:
        mount = start_mount(
            files_server.source,
            *(*places, "--free-disk", "32Mi"),
            environment=files_server.environment(),
        )
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER],
            cwd=mount.mountpoint,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.read(1) == b"o"
        _put_faults(files_server, [{"route": route, "status": 503} for route in _WRITES])
        writer.stdin.write(b"w")
        writer.stdin.flush()
        assert writer.stdout.read(1) == b"w"
        done = _control("warm", "other*", "--mount", str(mount.mountpoint))
        assert (done.returncode, "is at its reserve" in done.stderr) == (1, True)
        status = os.statvfs(disk)
        assert 32 * MIB <= status.f_bavail * status.f_frsize < 64 * MIB
        _put_faults(files_server, [])
        writer.communicate(b"c", timeout=60)
        assert writer.returncode == 0
        stored = {name: (files_server.volume / name).read_bytes() for name in files}
        assert stored == {name: name.encode() * (25 * MIB) for name in files}
        wait_until(lambda: not list((disk / "state").rglob("staging/*")), "the last release")
        before = _changes(files_server)
        done = _control("evict", "**", "--mount", str(mount.mountpoint))
        assert done.returncode == 0, done.stderr
        assert _changes(files_server) == before
        assert mount.stop() == 0
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


_WRITER = """
import os, sys
names = ("f0", "f1", "f2")
files = [os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) for name in names]
os.write(1, b"o")
os.read(0, 1)
for name, file in zip(names, files):
    for _ in range(50):
        os.write(file, name.encode() * (1 << 19))
os.write(1, b"w")
os.read(0, 1)
for file in files:
    os.close(file)
"""

_WRITES = ("initiate_upload", "put_file", "presigned_put", "complete_upload")


def _put_faults(server: Any, rules: list[dict[str, Any]]) -> None:
    asked = urllib.request.Request(
        f"{server.url}/admin/faults",
        json.dumps({"faults": rules}).encode(),
        {"Authorization": "Bearer right", "Content-Type": "application/json"},
        method="PUT",
    )
    with urllib.request.urlopen(asked) as answer:
        assert answer.status == 200


def _changes(server: Any) -> dict[str, int]:
    """Requests that change something, by what they do."""
    counted = _statistics(server)["requests"]
    return {name: counted.get(name, 0) for name in (*_WRITES, "delete_file", "remove_directory")}


def _control(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainmount_cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
