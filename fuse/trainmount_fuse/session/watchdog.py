"""Tell a daemon that hangs from one that is busy. Pure; supervisor.py asks it.

The daemon's event loop gives a sign every HEARTBEAT_SECONDS, whatever its threads do. The limit is
counted in looks and not in time: a machine that slept, or a container that was frozen, stops both
sides, and afterwards a single look has passed.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["HEARTBEAT_SECONDS", "Watchdog"]

HEARTBEAT_SECONDS: Final = 1.0
"""How often a daemon gives a sign and its supervisor looks."""

HURRIED_SECONDS: Final = 15.0
"""How long a daemon may give no sign while somebody waits for the end of its mount. What it has not
uploaded when it is killed is kept."""


class Watchdog:
    """Counts how often in a row one daemon gave no sign."""

    def __init__(self, limit_seconds: float) -> None:
        """`limit_seconds` without a sign are a hang; a whole number of looks."""
        self._limit = self._usual_limit = _looks_in(limit_seconds)
        self._num_missed = 0

    def hurry(self) -> None:
        """The mount is to end: from now on HURRIED_SECONDS at most."""
        self._limit = min(self._limit, _looks_in(HURRIED_SECONDS))

    def calm(self) -> None:
        """It does not end after all."""
        self._limit = self._usual_limit

    def note_sign(self) -> None:
        """The daemon lives, or is a new one."""
        self._num_missed = 0

    def look(self) -> bool:
        """Called every HEARTBEAT_SECONDS, after all signs that have come were noted; true where the
        daemon hangs.
        """
        self._num_missed += 1
        return self._num_missed > self._limit


def _looks_in(seconds: float) -> int:
    return max(2, math.ceil(seconds / HEARTBEAT_SECONDS))
