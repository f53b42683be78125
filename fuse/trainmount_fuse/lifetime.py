"""Processes that end with the one that started them. Used by `session.daemon` and
`reads.fetch_process`.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG: Final = 1


def end_with_parent(parent_pid: int) -> bool:
    """Let the kernel kill this process when its parent's main thread ends, whatever it dies of;
    false where that has happened before the call.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # In a PID namespace of its own the parent's number is 0 and tells nothing.
    return os.getppid() in (parent_pid, 0)
