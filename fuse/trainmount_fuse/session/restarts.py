"""How often a daemon may die before its mount is given up. Pure but for the clock; supervisor.py
asks it."""

from __future__ import annotations

import time
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

    max_short_lives: int = 200
    """Daemons in a row that die within `short_life_seconds` of their first answer: a request that
    kills whoever answers it is repeated to every successor, and its program shall get an error in
    the end. A start takes a tenth of a second, so that is half a minute of trying. Whoever kills
    daemons from outside stays below it."""

    short_life_seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.max_failed_starts < 1 or self.max_short_lives < 1:
            raise ValueError("max_failed_starts and max_short_lives must be at least 1")


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
        self._num_short_lives = 0
        self._ready_at: float | None = None
        self._num_deaths = 0

    @property
    def num_deaths(self) -> int:
        """Deaths of any kind since the mount began."""
        return self._num_deaths

    def note_ready(self) -> None:
        """A daemon answers."""
        self._num_failed_starts = 0
        self._ready_at = self._clock()

    def delay_after_death(self) -> float | None:
        """Seconds until the next start; None when it is enough."""
        self._num_deaths += 1
        ready_at, self._ready_at = self._ready_at, None
        if ready_at is None:
            return self._after_failed_start()
        if self._clock() - ready_at >= self._policy.short_life_seconds:
            # It served; whatever killed it, the next one will serve as well.
            self._num_short_lives = 0
            return 0.0
        self._num_short_lives += 1
        return None if self._num_short_lives >= self._policy.max_short_lives else 0.0

    def _after_failed_start(self) -> float | None:
        self._num_failed_starts += 1
        if self._num_failed_starts >= self._policy.max_failed_starts:
            return None
        delay_seconds = self._policy.first_delay_seconds * 2.0 ** (self._num_failed_starts - 1)
        return min(delay_seconds, self._policy.max_delay_seconds)
