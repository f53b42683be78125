"""The mount table and the three things done to it. Called by the node, the daemons and recovery.

Nothing here looks at a mount point with `stat`: one whose daemon is dead answers ENOTCONN, and one
whose daemon hangs never answers. What is mounted where is read from /proc/self/mountinfo alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from trainmount_csi.errors import Busy, CsiError

__all__ = ["LinuxMounter", "MountEntry", "Mounter", "mounts_at", "parse_mountinfo"]

# Of <sys/mount.h>.
_MS_RDONLY: Final = 1
_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4
_MS_REMOUNT: Final = 32
_MS_BIND: Final = 4096
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8

_OCTAL: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of the mount table."""

    device: str
    """`major:minor` of the file system; the same for a mount and every bind of it."""

    mount_point: Path

    read_only: bool
    """Of this mount; the file system under it may be writable elsewhere."""

    filesystem_type: str

    source: str
    """What was given to mount(2) as the device's name."""


class Mounter(Protocol):
    """What the node does to the mount table."""

    def entries(self) -> Sequence[MountEntry]:
        """The table, in the order of mounting; the last one at a place is visible."""
        ...

    def bind(self, source_path: Path, target_path: Path, *, read_only: bool) -> None:
        """Show `source_path` at the existing directory `target_path`, or raise and leave nothing
        behind.

        Raises:
            CsiError: the kernel refused.
        """
        ...

    def unmount(self, target_path: Path, *, lazy: bool = False) -> None:
        """Take away the visible mount at `target_path`; nothing mounted there is fine.

        Raises:
            Busy: files in it are open (never with `lazy`).
            CsiError: the kernel refused for another reason.
        """
        ...


def mounts_at(entries: Sequence[MountEntry], path: Path) -> list[MountEntry]:
    """What is mounted exactly at `path`, lowest first."""
    return [entry for entry in entries if entry.mount_point == path]


def parse_mountinfo(text: str) -> list[MountEntry]:
    """The lines of /proc/<pid>/mountinfo (see proc_pid_mountinfo(5))."""
    entries = []
    for line in text.splitlines():
        fields = line.split(" ")
        # A variable number of optional fields ends with a single hyphen.
        separator = fields.index("-", 6)
        options = fields[5].split(",")
        entries.append(
            MountEntry(
                device=fields[2],
                mount_point=Path(_unescape(fields[4])),
                read_only="ro" in options,
                filesystem_type=_unescape(fields[separator + 1]),
                source=_unescape(fields[separator + 2]),
            )
        )
    return entries


def _unescape(field: str) -> str:
    # The kernel writes space, tab, newline and backslash as octal; bytes beyond ASCII stand for
    # themselves.
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


class LinuxMounter:
    """The mount table of this process's mount namespace. Any thread may call it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def entries(self) -> Sequence[MountEntry]:
        text = Path("/proc/self/mountinfo").read_bytes()
        return parse_mountinfo(os.fsdecode(text))

    def bind(self, source_path: Path, target_path: Path, *, read_only: bool) -> None:
        self._mount(source_path, target_path, _MS_BIND)
        if not read_only:
            return
        try:
            # A bind takes the flags of its source; read-only needs a second call.
            flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV
            self._mount(None, target_path, flags)
        except CsiError:
            self.unmount(target_path, lazy=True)
            raise

    def unmount(self, target_path: Path, *, lazy: bool = False) -> None:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        if self._libc.umount2(os.fsencode(target_path), flags) == 0:
            return
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOENT):  # not a mount point, or no such directory
            return
        if code == errno.EBUSY:
            raise Busy(f"cannot unmount {target_path}: files in it are in use")
        raise CsiError(f"cannot unmount {target_path}: {os.strerror(code)}")

    def _mount(self, source_path: Path | None, target_path: Path, flags: int) -> None:
        source = None if source_path is None else os.fsencode(source_path)
        if self._libc.mount(source, os.fsencode(target_path), None, flags, None) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise CsiError(f"cannot bind the volume to {target_path}: {reason}")
