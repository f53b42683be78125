"""How often a daemon may die before its mount is given up. Pure but for the clock; supervisor.py
asks it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["RestartBudget", "RestartPolicy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """Limits on restarts."""

    max_failed_starts: int = 10
    """Daemons in a row that die before they answer. With the delays below about half a minute."""

    first_delay_seconds: float = 0.1
    """Pause after the first failed start; doubled after each further one. A daemon that answered
    is replaced at once."""

    max_delay_seconds: float = 10.0

    max_deaths: int = 60
    """Deaths of any kind within `window_seconds`: a request that kills whoever answers it is
    repeated to every successor, and its program shall get an error in the end."""

    window_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.max_failed_starts < 1 or self.max_deaths < 1:
            raise ValueError("max_failed_starts and max_deaths must be at least 1")


class RestartBudget:
    """Counts deaths of one mount's daemons. Not thread-safe."""

    def __init__(
        self,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy or RestartPolicy()
        self._clock = clock
        self._num_failed_starts = 0
        self._deaths: deque[float] = deque()

    @property
    def num_deaths(self) -> int:
        """Deaths that still count."""
        return len(self._deaths)

    def note_ready(self) -> None:
        """A daemon answers."""
        self._num_failed_starts = 0

    def delay_after_death(self, *, was_ready: bool) -> float | None:
        """Seconds until the next start; None when it is enough."""
        now = self._clock()
        self._deaths.append(now)
        while self._deaths[0] <= now - self._policy.window_seconds:
            self._deaths.popleft()
        if len(self._deaths) >= self._policy.max_deaths:
            return None
        if was_ready:
            return 0.0
        self._num_failed_starts += 1
        if self._num_failed_starts >= self._policy.max_failed_starts:
            return None
        delay_seconds = self._policy.first_delay_seconds * 2.0 ** (self._num_failed_starts - 1)
        return min(delay_seconds, self._policy.max_delay_seconds)
