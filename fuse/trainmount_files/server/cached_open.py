"""`open` that does not wait for a disk, so that the event loop may call it itself.

A thread and back costs several times what a small request does; most of them ask for what the
kernel has in memory. Called by `resolution`.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

__all__ = ["open_cached"]

# openat2(2), since Linux 5.6 and under one number on all architectures that Python's wheels are
# made for; RESOLVE_CACHED since 5.12. Python has no call of its own for it.
_SYS_OPENAT2: Final = 437
_RESOLVE_CACHED: Final = 0x20


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


# The interpreter's lock is kept: the call does not wait, and another thread would take the turn.
_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(_OpenHow),
    ctypes.c_size_t,
)


def open_cached(name: str, flags: int, *, dir_fd: int) -> int:
    """`os.open(name, flags, dir_fd=dir_fd)` for what exists and the kernel has looked up before.

    Raises:
        OSError: anything else, an old kernel or one that forbids the call included; `os.open` in a
            thread then knows more.
    """
    how = _OpenHow(flags, 0, _RESOLVE_CACHED)
    fd: int = _syscall(_SYS_OPENAT2, dir_fd, os.fsencode(name), how, ctypes.sizeof(how))
    if fd < 0:
        code = ctypes.get_errno() or errno.EAGAIN
        raise OSError(code, os.strerror(code), name)
    return fd
