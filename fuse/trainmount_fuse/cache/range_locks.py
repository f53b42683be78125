"""Locks between processes on ranges of an open file. They end with their holder, however it dies.

They belong to the open file, not to a thread: two threads of one process that use the same
descriptor do not exclude each other.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from typing import Final

__all__ = ["RangeLocks"]

_FLOCK: Final = struct.Struct("hhqqi0q")
"""struct flock: type, whence, start, length, pid (0)."""

_HELD_ELSEWHERE: Final = (errno.EAGAIN, errno.EACCES)

# Keeps the interpreter's lock, as `fcntl.fcntl` does not: the call takes a microsecond, getting the
# lock back from busy threads up to some thousands.
_fcntl: Final = ctypes.PyDLL(None, use_errno=True).fcntl
_fcntl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p]


class RangeLocks:
    """Exclusive locks of one open file; the ranges need not have bytes in it. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def try_lock(self, start: int, length: int = 1) -> bool:
        """Whether nobody else holds any part of the range; it is ours then. Never waits."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        if _fcntl(self._fd, fcntl.F_OFD_SETLK, request) == 0:
            return True
        code = ctypes.get_errno()
        if code in _HELD_ELSEWHERE:
            return False
        raise OSError(code, os.strerror(code))

    def unlock(self, start: int, length: int = 1) -> None:
        """Give the range back, as far as it is ours."""
        request = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0)
        if _fcntl(self._fd, fcntl.F_OFD_SETLK, request) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
