"""The signals that end a mount in order, as bytes in a socket. supervisor.py reads them there."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

__all__ = ["STOP_SIGNALS", "signals_in"]

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Each means an ordered end: from a service manager, from Ctrl-C, from a terminal that closes."""


@contextmanager
def signals_in(waker: socket.socket) -> Iterator[None]:
    """Inside, the number of each stop signal is written into the socket, a non-blocking one. Only
    in the main thread.

    Whoever mounted may hold the signals back outside; inside they come through.
    """
    previous_wakeup = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, _noted) for number in STOP_SIGNALS}
    previous_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        signal.set_wakeup_fd(previous_wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _noted(_number: int, _frame: FrameType | None) -> None:
    """Python writes the number; it only needs a handler to be there."""
