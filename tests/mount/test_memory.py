"""What a mount holds in memory while very many files are read at once, and afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MIB = 1 << 20
BUDGET_BYTES = 64 * MIB
NUM_FILES = 200
FILE_BYTES = 2 * MIB
IDLE_BUFFER_BYTES = 8 * MIB
"""A buffer of the largest range stays for the next one."""

READER = Path(__file__).with_name("memory_reader.py")


def status_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} of {pid}")


def test_memory_stays_in_its_budget_under_two_hundred_readers_and_is_given_back(
    start_mount, files_server, wait_until
):
    for number in range(NUM_FILES):
        name = f"{number % 10}-{number}"
        (files_server.volume / name).write_bytes(name[:1].encode() * FILE_BYTES)
    # The cache is smaller than what is read, so that blocks are thrown out meanwhile.
    mount = start_mount(
        files_server.source,
        f"--memory={BUDGET_BYTES}",
        f"--cache-size={NUM_FILES * FILE_BYTES // 2}",
        environment=files_server.environment(),
    )
    daemon = mount.ready()["daemon_pid"]
    # What is loaded for the first file belongs to the state before.
    assert len((mount.mountpoint / "0-0").read_bytes()) == FILE_BYTES
    before = status_bytes(daemon, "VmRSS")
    reader = subprocess.Popen(
        [sys.executable, str(READER), str(mount.mountpoint), str(FILE_BYTES)],
        stderr=subprocess.PIPE,
        text=True,
    )
    # Where it hangs, only the end of the mount frees it.
    _output, errors = reader.communicate(timeout=60)
    assert reader.returncode == 0, errors
    assert status_bytes(daemon, "VmHWM") <= BUDGET_BYTES + 64 * MIB
    limit = 1.1 * before + IDLE_BUFFER_BYTES
    wait_until(lambda: status_bytes(daemon, "VmRSS") <= limit, "memory given back")
    assert mount.ready()["daemon_pid"] == daemon
