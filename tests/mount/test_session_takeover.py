"""A daemon that dies is replaced, and no program notices."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainmount_fuse.session.commands import ask_holder
from trainmount_fuse.session.mounting import find_mount
from trainmount_fuse.session.registry import find_record

NUM_KILLS = 6


@pytest.mark.quotes(
    "When the daemon dies, hangs or is replaced by `trainmount remount`, no system call fails; "
    "they wait.",
)
def test_six_kills_of_the_daemon_fail_no_read_and_make_none_wrong(
    start_mount, read_at_random, tmp_path
):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    reader = read_at_random(mount.mountpoint / "f")
    for _ in range(NUM_KILLS):
        reader.wait_for_more()
        mount.kill_daemon()
    reader.wait_for_more()
    reader.finish()
    assert mount.stop() == 0
    assert not mount.is_mounted()


def test_a_read_that_the_dead_daemon_had_begun_is_answered_by_its_successor(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    assert _names(mount.mountpoint) == ["f", "slow"]
    file = os.open(mount.mountpoint / "slow", os.O_RDONLY)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(os.pread(file, 8, 4096)))
    reader.start()
    mount.kill_daemon()
    reader.join()
    os.close(file)
    assert got == [(4096).to_bytes(8, "little")]
    # Names go on as well.
    assert _names(mount.mountpoint) == ["f", "slow"]
    assert not (mount.mountpoint / "nothing").exists()


def test_a_daemon_that_never_starts_gives_up_and_leaves_no_hanging_mount(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="start", wait=False)
    assert mount.process.wait(60) == 1
    assert "keeps dying" in mount.log
    _assert_dead_not_hanging(mount.mountpoint)


def test_a_request_that_kills_every_daemon_ends_in_an_error_for_its_program(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="read")
    program = f"import os; os.pread(os.open({str(mount.mountpoint / 'f')!r}, os.O_RDONLY), 8, 0)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "OSError" in done.stderr or "ConnectionAbortedError" in done.stderr
    assert mount.process.wait(60) == 1
    assert "keeps dying" in mount.log
    _assert_dead_not_hanging(mount.mountpoint)


def test_a_killed_holder_takes_its_daemon_along_and_the_next_one_replaces_the_mount(
    start_mount, tmp_path
):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    daemon = mount.ready()["daemon_pid"]
    assert os.getsid(daemon) == daemon
    mount.process.kill()
    mount.process.wait()
    mount.ready_file.unlink()
    _wait_gone(daemon)
    _assert_dead_not_hanging(mount.mountpoint)
    mount.start()
    mount.wait_ready()
    assert (mount.mountpoint / "f").exists()
    assert mount.stop() == 0
    assert not mount.is_mounted()


def test_an_idle_mount_takes_less_than_80_mib(start_mount, tmp_path):
    (tmp_path / "volume").mkdir()
    mount = start_mount(f"file://{tmp_path}/volume")
    status = ask_holder(find_record(mount.mountpoint), {"want": "status"})
    assert status["survives_daemon"] is True
    assert status["kernel"]["parallel_directory_operations"] is True
    resident = [_resident_bytes(status[name]) for name in ("holder_pid", "daemon_pid")]
    assert sum(resident) < 80 << 20, resident


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _wait_gone(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 60)[0]
    finally:
        os.close(descriptor)


def _assert_dead_not_hanging(mountpoint: Path) -> None:
    """The mount is there and answers with an error. Asked by another process, which a hang would
    not take along."""
    assert find_mount(mountpoint) is not None
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.listdir({str(mountpoint)!r})"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "not connected" in done.stderr
