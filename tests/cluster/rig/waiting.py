"""Waiting for a condition with a deadline; the rig and its tests never sleep for correctness."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rig.errors import NotReadyError

__all__ = ["wait_for"]

T = TypeVar("T")


def wait_for(
    what: str | Callable[[], str],
    condition: Callable[[], T | None],
    *,
    timeout_seconds: float = 120,
    period_seconds: float = 0.3,
) -> T:
    """Call `condition` until it gives something true, and return that.

    `what` completes the sentence "... did not come true"; as a function it is asked at the end, so
    that it can say what was seen last.

    Raises:
        NotReadyError: not before `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            sentence = what if isinstance(what, str) else what()
            raise NotReadyError(f"after {timeout_seconds:.0f} s still waiting for {sentence}")
        time.sleep(period_seconds)
