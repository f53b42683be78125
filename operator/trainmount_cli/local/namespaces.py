"""The system calls that give a run its own users, mounts and processes; called by `supervisor` and
`root`.

Python has no `mount(2)`, and `unshare` only from 3.12 on, so both go through the C library.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Final

__all__ = [
    "MS_BIND",
    "MS_NODEV",
    "MS_NOEXEC",
    "MS_NOSUID",
    "MS_REC",
    "MS_SLAVE",
    "MS_UNBINDABLE",
    "die_with_parent",
    "enter_namespaces",
    "mount",
    "pivot_root",
    "probe",
]

MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_UNBINDABLE: Final = 1 << 17
MS_SLAVE: Final = 1 << 19

_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWPID: Final = 0x20000000
_MNT_DETACH: Final = 2
_PR_SET_PDEATHSIG: Final = 1

_libc: Final = ctypes.CDLL(None, use_errno=True)


def enter_namespaces() -> None:
    """Leave the machine's mounts and processes; as an ordinary user also its users.

    The caller keeps its own process id; its next child is the first process of the new PID
    namespace. An ordinary user becomes root inside, with no right outside it did not have before.
    The process must have one thread.

    Raises:
        OSError: this machine does not allow it.
    """
    uid, gid = os.geteuid(), os.getegid()
    own = _CLONE_NEWNS | _CLONE_NEWPID
    if uid == 0 and _libc.unshare(own) == 0:
        return
    # An ordinary user, or root in a container without the right to mount.
    _check(_libc.unshare(own | _CLONE_NEWUSER), "unshare")
    # Without "deny" an ordinary user may not write gid_map.
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1", encoding="ascii")


def die_with_parent() -> None:
    """From now on the kernel kills this process when the thread that forked it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def mount(
    source: str, target: Path, *, filesystem_type: str = "", flags: int = 0, data: str = ""
) -> None:
    """mount(2). Raises OSError with `target`."""
    done = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        filesystem_type.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _check(done, str(target))


def pivot_root(new_root: Path) -> None:
    """Make a mount point the root of this mount namespace and let go of the old one.

    Where the machine's root cannot be moved (an initial RAM disk), only this process and its
    children get the new one.
    """
    os.chdir(new_root)
    # The old root is put over the new one, so that no folder for it is needed.
    if _libc.pivot_root(b".", b".") == 0:
        _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    else:
        os.chroot(".")
    os.chdir("/")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def probe() -> None:
    """Do what a run does first, in a process that is thrown away. Raises OSError."""
    enter_namespaces()
    # Some machines make the namespace and then allow nothing in it.
    mount("none", Path("/"), flags=MS_REC | MS_SLAVE)
