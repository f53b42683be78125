"""When a checkpoint is due, and which ones stay for good. Pure but for the clock; called by
`checkpointer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

__all__ = ["Kept", "Schedule"]

_NUMBER: Final = "number"
_KEPT: Final = "kept"
_IS_COUNTED: Final = "is_counted"


class Schedule:
    """Due every N steps, or so many minutes after the save before, whichever comes first."""

    def __init__(
        self,
        every_steps: int | None,
        every_minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The minutes count from now. Raises ValueError."""
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, got {every_steps}")
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"every_minutes must be greater than 0, got {every_minutes}")
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else every_minutes * 60
        self._clock = clock
        self._since = clock()

    @property
    def needs_clock(self) -> bool:
        return self._every_seconds is not None

    def is_step_due(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    def is_time_due(self) -> bool:
        """By this process's clock: one rank decides for all."""
        return (
            self._every_seconds is not None and self._clock() - self._since >= self._every_seconds
        )

    def start_over(self) -> None:
        """The minutes count from now: a save has begun, or a job was resumed."""
        self._since = self._clock()


@dataclass(frozen=True, slots=True)
class Kept:
    """Which checkpoints stay besides the newest few. Goes from each commit record to the next."""

    number: int = 0
    """Place of the newest checkpoint among all of the job, over its restarts. One that was saved
    because of SIGTERM has no place of its own, so that restarts do not shift the others.
    """

    names: tuple[str, ...] = ()
    """Generations that stay, oldest first."""

    @classmethod
    def from_record(cls, generation: str, extra: Mapping[str, Any], every: int | None) -> Kept:
        """What a save after this checkpoint has to know."""
        kept = cls(int(extra.get(_NUMBER, 0)), tuple(extra.get(_KEPT, ())))
        is_counted = bool(extra.get(_IS_COUNTED, True))
        if every is not None and is_counted and kept.number and kept.number % every == 0:
            return replace(kept, names=(*kept.names, generation))
        return kept

    def next(self, *, is_counted: bool) -> dict[str, Any]:
        """For the commit record of the next checkpoint; JSON-able."""
        return {
            _NUMBER: self.number + is_counted,
            _KEPT: list(self.names),
            _IS_COUNTED: is_counted,
        }
