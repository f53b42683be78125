"""A mount in bad times: a full disk, a store that is away, credentials that end."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
FLOOR_BYTES = 512 * MIB
"""What a mount leaves free on the disk of its state, by default."""


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk with 32 MiB above what a mount leaves free; nothing is written into most of it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={FLOOR_BYTES + 32 * MIB}", "disk", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, check=False).returncode:
        pytest.skip("needs root to make a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(folder: Path) -> None:
    """Leave not one page free."""
    step, size = 64 * MIB, 0
    with (folder / "filler").open("wb") as filler:
        while step >= 4096:
            if _errno_of(os.posix_fallocate, filler.fileno(), size, step):
                step //= 2
            else:
                size += step


def _errno_of(function, *arguments) -> int:
    """What a call fails with; 0 where it does not."""
    try:
        function(*arguments)
    except OSError as error:
        return error.errno or 0
    return 0


def test_a_full_disk_refuses_a_write_before_it_is_acknowledged_and_the_mount_goes_on(
    start_mount, small_disk, tmp_path, wait_until
):
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "old").write_bytes(b"old" * 1000)
    mount = start_mount(f"file://{volume}", "--state-dir", str(small_disk / "state"))
    piece, taken, error = os.urandom(MIB), 0, 0
    file = os.open(mount.mountpoint / "big", os.O_WRONLY | os.O_CREAT)
    while taken < 64 * MIB and not error:
        error = _errno_of(os.write, file, piece)
        taken += 0 if error else len(piece)
    assert error == errno.ENOSPC
    assert 16 * MIB < taken <= 32 * MIB
    assert _errno_of((mount.mountpoint / "more").write_bytes, piece) == errno.ENOSPC
    assert (mount.mountpoint / "old").read_bytes() == b"old" * 1000
    mount.kill_daemon()
    # What was acknowledged is uploaded, whole, and its place is free again.
    os.close(file)
    assert (volume / "big").read_bytes() == piece * (taken // MIB)
    wait_until(lambda: not list((small_disk / "state/staging").iterdir()), "room")
    (mount.mountpoint / "next").write_bytes(piece)
    assert (volume / "next").read_bytes() == piece
    assert mount.stop() == 0


def test_a_disk_that_others_fill_to_the_last_byte_does_not_end_the_mount(
    start_mount, small_disk, tmp_path
):
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "old").write_bytes(b"old" * 1000)
    mount = start_mount(f"file://{volume}", "--state-dir", str(small_disk / "state"))
    (mount.mountpoint / "new").write_bytes(b"new")
    _fill(small_disk)
    assert _errno_of((mount.mountpoint / "more").write_bytes, b"more") == errno.ENOSPC
    assert (mount.mountpoint / "old").read_bytes() == b"old" * 1000
    (small_disk / "filler").unlink()
    (mount.mountpoint / "more").write_bytes(b"more")
    assert (volume / "more").read_bytes() == b"more"
    assert mount.stop() == 0


WRITER = """
import errno, os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(file, sys.argv[2].encode())
print("written", flush=True)
sys.stdin.readline()
try:
    os.close(file)
except OSError as error:
    print(errno.errorcode[error.errno])
else:
    print("closed")
"""


@contextlib.contextmanager
def _written(path: Path, text: str) -> Iterator[Callable[[], str]]:
    """A file that a program has written and keeps open; the value closes it and tells the outcome.

    In a program of its own: one that starts others has its files flushed by each of them.
    """
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writing:
        assert writing.stdout is not None
        assert writing.stdout.readline() == "written\n"
        yield lambda: writing.communicate("\n")[0].strip()


def test_a_store_that_is_away_costs_errors_in_time_and_no_bytes(files_server, start_mount):
    (files_server.volume / "old").write_bytes(b"old")
    environment = files_server.environment()
    mount = start_mount(files_server.source, environment=environment, toy="impatient")
    late, failing = (mount.mountpoint / name for name in ("late", "failing"))
    with _written(late, "open meanwhile") as close, _written(failing, "closed") as close_early:
        files_server.stop()
        began = time.monotonic()
        assert _errno_of((mount.mountpoint / "old").read_bytes) in (errno.EIO, errno.EAGAIN)
        assert close_early() == "EIO"
        # Far above the retries' second, far below their usual two minutes.
        assert time.monotonic() - began < 60
        files_server.start()
        assert close() == "closed"
    assert (files_server.volume / "late").read_text() == "open meanwhile"
    assert (mount.mountpoint / "old").read_bytes() == b"old"
    assert not (files_server.volume / "failing").exists()
    assert mount.stop() == 0
    assert (files_server.volume / "failing").read_text() == "closed"


def test_credentials_that_end_are_eacces_until_a_mount_with_new_ones(files_server, start_mount):
    (files_server.volume / "old").write_bytes(b"old")
    mount = start_mount(files_server.source, environment=files_server.environment())
    with _written(mount.mountpoint / "new", "new") as close:
        files_server.stop()
        files_server.start(token="changed")
        assert _errno_of((mount.mountpoint / "old").read_bytes) == errno.EACCES
        assert close() == "EACCES"
    assert mount.stop() == 74
    assert "not uploaded and kept: new" in mount.log
    mount.environment = files_server.environment("changed")
    mount.start()
    mount.wait_ready()
    assert (mount.mountpoint / "old").read_bytes() == b"old"
    assert mount.stop() == 0
    assert (files_server.volume / "new").read_bytes() == b"new"
