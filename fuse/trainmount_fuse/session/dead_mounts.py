"""Mounts whose holder was killed: the name is there, and every program that looks gets an error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from trainmount_fuse.session.mounting import FILESYSTEM_TYPE, find_mount, normalized, unmount

__all__ = ["is_aborted", "remove_dead_mount"]

PROBE_TIMEOUT_SECONDS: Final = 3.0
"""A dead connection answers at once."""

_PROBE: Final = """
import os, sys
try:
    os.statvfs(sys.argv[1])
except OSError as error:
    sys.exit(error.errno)
"""


def remove_dead_mount(mountpoint: Path) -> bool:
    """Free the name of a mount of ours that is dead; tells whether there was one. Nobody may be
    serving it, which the lock of its state tells.

    Raises MountError.
    """
    mount = find_mount(mountpoint)
    if mount is None or mount.filesystem_type != FILESYSTEM_TYPE or not is_aborted(mountpoint):
        return False
    unmount(mountpoint, lazy=True)
    return True


def is_aborted(mountpoint: Path) -> bool:
    """Whether a mount answers ENOTCONN; asked by a child, since a mount that hangs does not answer
    at all."""
    command = [sys.executable, "-S", "-c", _PROBE, os.fspath(normalized(mountpoint))]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        return child.wait(timeout=PROBE_TIMEOUT_SECONDS) == errno.ENOTCONN
    except subprocess.TimeoutExpired:
        child.kill()
        return False
