"""The set-uid helper of fuse3, for an ordinary user outside a namespace of their own; mounting.py
calls this.

The helper opens /dev/fuse, mounts, and sends the descriptor back over a Unix socket named by
`_FUSE_COMMFD`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

__all__ = ["fusermount_mount", "fusermount_unmount"]


def fusermount_mount(target: Path, name: str, options: list[str]) -> int | str:
    """Mount at `target`: the descriptor, or in words why not."""
    program = shutil.which("fusermount3")
    if program is None:
        return "fusermount3 is not installed"
    # A comma or backslash separates options unless it is escaped.
    source = name.replace("\\", "\\\\").replace(",", "\\,")
    joined = ",".join([*options, f"fsname={source}", "subtype=trainmount"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        done = subprocess.run(
            [program, "-o", joined, "--", os.fspath(target)],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return _last_line(done.stderr) or f"fusermount3 failed with {done.returncode}"
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        if not descriptors:
            return "fusermount3 sent no descriptor"
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]


def fusermount_unmount(target: Path, *, lazy: bool) -> str | None:
    """Unmount a mount of this user; None, or in words why not."""
    program = shutil.which("fusermount3")
    if program is None:
        return "not permitted"
    command = [program, "-u", *(["-z"] if lazy else []), "--", os.fspath(target)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else _last_line(done.stderr) or "not permitted"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
