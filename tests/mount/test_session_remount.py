"""A mount that is renewed while programs use it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmount_fuse.session.registry import find_record

NUM_WORDS = 1 << 17

BROKEN_AT_THE_END = """
import sys
if "candidate" in sys.argv:
    from trainmount_fuse.session import candidate
    candidate.run_daemon = lambda control_fd: 0
"""
"""A sitecustomize.py: the new daemon finds everything right and ends when it is to serve."""

BROKEN_AT_THE_START = """
import os, sys
if "candidate" in sys.argv:
    os._exit(7)
"""

LOCKER = """
import fcntl, sys
lock = getattr(fcntl, sys.argv[2])
file = open(sys.argv[1], "r+b")
lock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
"""


def _remount(mountpoint: Path, *options: str, environment=None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainmount_fuse", "remount", str(mountpoint), *options],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def served(files_server, start_mount, read_at_random) -> Iterator[tuple]:
    """A mount of the Files API and a program that reads from it all the time; nothing that it reads
    may fail or be wrong."""
    words = struct.pack(f"<{NUM_WORDS}Q", *range(0, 8 * NUM_WORDS, 8))
    (files_server.volume / "f").write_bytes(words)
    mount = start_mount(files_server.source, environment=files_server.environment())
    reader = read_at_random(mount.mountpoint / "f")
    reader.wait_for_more()
    yield mount, reader
    reader.wait_for_more()
    reader.finish()
    assert mount.stop() == 0
    assert not mount.is_mounted()


def _daemons_of(holder_pid: int) -> list[int]:
    text = Path(f"/proc/{holder_pid}/task/{holder_pid}/children").read_text()
    return [int(pid) for pid in text.split()]


@pytest.mark.quotes(
    "When the daemon dies, hangs or is replaced by `trainmount remount`, no system call fails; "
    "they wait.",
)
def test_a_remount_changes_options_and_programs_under_running_readers(served, files_server):
    mount, reader = served
    before = mount.ready()
    cache = mount.folder / "cache-2"
    done = _remount(
        mount.mountpoint,
        *("--cache-dir", str(cache), "--memory", "64Mi"),
        environment=files_server.environment(),
    )
    assert (done.returncode, done.stderr) == (0, "")
    reader.wait_for_more()
    after = mount.ready()
    assert after["holder_pid"] == before["holder_pid"]
    assert after["daemon_pid"] != before["daemon_pid"]
    assert _daemons_of(after["holder_pid"]) == [after["daemon_pid"]]
    # The process that keeps the mount is the same one and runs the new program.
    assert b"holder" in Path(f"/proc/{after['holder_pid']}/cmdline").read_bytes().split(b"\0")
    record = find_record(mount.mountpoint / "f")
    assert record is not None
    assert (record.holder_pid, record.cache_dir) == (after["holder_pid"], cache)
    # It keeps a daemon there like the one before, and can be renewed like it.
    mount.kill_daemon()
    reader.wait_for_more()
    done = _remount(mount.mountpoint, environment=files_server.environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert _daemons_of(after["holder_pid"]) == [mount.ready()["daemon_pid"]]


@pytest.mark.parametrize(
    ("token", "options", "broken", "said"),
    [
        ("wrong", (), "", "look at DATABRICKS_TOKEN"),
        ("right", ("--cache-dir", "/proc/cache"), "", "cannot use /proc/cache"),
        ("right", ("--cache-dir", "/dev/null/cache"), "", "cannot use /dev/null/cache"),
        ("right", (), BROKEN_AT_THE_START, "does not start"),
        ("right", (), BROKEN_AT_THE_END, "ended before it answered"),
    ],
)
def test_a_remount_that_cannot_be_is_one_line_and_leaves_the_mount_as_it_was(
    served, files_server, tmp_path, token, options, broken, said
):
    mount, reader = served
    before = mount.ready()
    environment = files_server.environment(token)
    if broken:
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken/sitecustomize.py").write_text(broken)
        environment["PYTHONPATH"] = str(tmp_path / "broken")
    done = _remount(mount.mountpoint, *options, environment=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("trainmount: not remounted, all is as before: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    reader.wait_for_more()
    after = mount.ready()
    assert after["holder_pid"] == before["holder_pid"]
    assert _daemons_of(before["holder_pid"]) == [after["daemon_pid"]]
    if broken != BROKEN_AT_THE_END:
        assert after == before


def test_a_remount_while_the_store_is_away_leaves_the_mount_as_it_was(files_server, start_mount):
    mount = start_mount(files_server.source, environment=files_server.environment())
    before = mount.ready()
    files_server.stop()
    done = _remount(mount.mountpoint, environment=files_server.environment())
    files_server.start()
    assert done.returncode == 1
    assert "the store cannot be reached" in done.stderr
    assert mount.ready() == before
    assert (mount.mountpoint / "nothing").exists() is False


def test_a_remount_brings_new_credentials(files_server, start_mount):
    (files_server.volume / "file").write_text("content")
    mount = start_mount(files_server.source, environment=files_server.environment())
    files_server.stop()
    files_server.start(token="changed")
    with pytest.raises(PermissionError):
        (mount.mountpoint / "file").read_text()
    done = _remount(mount.mountpoint, environment=files_server.environment("changed"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (mount.mountpoint / "file").read_text() == "content"
    # Also those that the renewed holder starts have them.
    mount.kill_daemon()
    assert (mount.mountpoint / "file").read_text() == "content"


@pytest.mark.quotes(
    "`flock` and `fcntl` locks | in the kernel of one node, over the death of the daemon and "
    "`trainmount remount`; other nodes do not see them",
)
def test_locks_and_waiters_outlive_a_remount_and_a_kill(served, files_server):
    mount, reader = served
    waiting: list[tuple[subprocess.Popen[str], subprocess.Popen[str]]] = []
    for kind in ("flock", "lockf"):
        (mount.mountpoint / kind).write_text("x")
        holding = _locker(mount.mountpoint / kind, kind)
        assert holding.stdout is not None
        assert holding.stdout.readline() == "locked\n"
        waiting.append((holding, _locker(mount.mountpoint / kind, kind)))
    try:
        for _, second in waiting:
            _wait_blocked(second.pid)
        done = _remount(mount.mountpoint, environment=files_server.environment())
        assert (done.returncode, done.stderr) == (0, "")
        reader.wait_for_more()
        mount.kill_daemon()
        reader.wait_for_more()
        for holding, second in waiting:
            assert second.poll() is None
            # It gives the lock back by leaving, and only then the other has it.
            assert holding.communicate("\n", timeout=60)[1] == ""
            assert second.communicate("\n", timeout=60) == ("locked\n", "")
            assert (holding.returncode, second.returncode) == (0, 0)
    finally:
        for pair in waiting:
            for one in pair:
                one.kill()
                one.wait()


def _locker(path: Path, kind: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(path), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_blocked(pid: int) -> None:
    """Until the process waits for a lock, by the kernel's table: `->` marks a waiter there."""
    deadline = time.monotonic() + 60
    while not any(
        fields[1] == "->" and fields[5] == str(pid)
        for fields in map(str.split, Path("/proc/locks").read_text().splitlines())
    ):
        assert time.monotonic() < deadline, "nobody waits for the lock"
        time.sleep(0.02)


def test_where_no_successor_can_take_over_a_remount_says_what_to_do(start_mount, tmp_path):
    (tmp_path / "volume").mkdir()
    mount = start_mount(f"file://{tmp_path}/volume", toy="no-takeover")
    done = _remount(mount.mountpoint)
    assert done.returncode == 1
    assert "unmount it and mount it again" in done.stderr
    assert (mount.mountpoint / "nothing").exists() is False


def test_what_is_no_mount_cannot_be_remounted(tmp_path):
    done = _remount(tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"trainmount: no mount of yours is at {tmp_path}; use `trainmount mount`\n"
    )


def test_two_remounts_at_once_renew_the_mount_and_say_who_was_late(served, files_server):
    mount, _reader = served
    command = [sys.executable, "-m", "trainmount_fuse", "remount", str(mount.mountpoint)]
    environment = {**os.environ, **files_server.environment()}
    both = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [(one.communicate(timeout=60)[1], one.returncode) for one in both]
    assert ("", 0) in ends
    for said, code in ends:
        assert code == 0 or said.count("\n") == 1
    holder = mount.ready()["holder_pid"]
    assert _daemons_of(holder) == [mount.ready()["daemon_pid"]]
