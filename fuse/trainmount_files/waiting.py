"""Threads that may wait for a store as long as it takes. Read by `bucket.blocking`.

A call that no cancel event can end is made in a thread of its own, so that its caller can be told
to give up. A thread whose process may end around it at any time does not need that.
"""

from __future__ import annotations

import threading

__all__ = ["may_wait", "wait_here"]


class _Thread(threading.local):
    may_wait = False


_THREAD = _Thread()


def wait_here() -> None:
    """From now on, calls of this thread without a cancel event may be made in it."""
    _THREAD.may_wait = True


def may_wait() -> bool:
    """Whether this thread called `wait_here`."""
    return _THREAD.may_wait
