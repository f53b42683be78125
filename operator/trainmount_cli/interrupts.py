"""Ctrl-C while something is only watched: what is watched goes on, and the way back is printed."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from trainmount_cli.errors import EXIT_INTERRUPTED

__all__ = ["detachable"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Detached(BaseException):
    """A signal came. Not an Exception, so that nothing on the way takes it for an error."""


@contextlib.contextmanager
def detachable(what: str, way_back: str) -> Iterator[None]:
    """On SIGINT or SIGTERM leave the block, print how to come back, and exit with 130."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the second and third Ctrl-C change nothing
        raise _Detached

    previous = {number: signal.signal(number, leave) for number in _SIGNALS}
    try:
        yield
    except _Detached:
        with contextlib.suppress(OSError):
            print(f"\n{what} goes on in the background; back to it: {way_back}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)  # with the signals still ignored
    for number, handler in previous.items():
        signal.signal(number, handler)
