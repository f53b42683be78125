"""How many requests of each kind the kernel sent, how long they took and how they failed.

Counted by `adapter`, read by `control`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["BOUNDS_SECONDS", "OperationCounts", "RequestCounter", "RequestStatistics"]

BOUNDS_SECONDS: Final = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper ends of the classes of the histogram; one more class has what took longer.

From a request that memory answers to one that a silent store holds.
"""

_BOUNDS_NS: Final = tuple(int(bound * 1e9) for bound in BOUNDS_SECONDS)


@dataclass(slots=True)
class _Operation:
    total_ns: int = 0
    by_duration: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_NS) + 1))


@dataclass(frozen=True, slots=True)
class OperationCounts:
    """The requests of one kind since the start."""

    num_requests: int

    total_seconds: float
    """All of their durations together."""

    num_by_duration: tuple[int, ...]
    """Requests in each class of `BOUNDS_SECONDS` and above the last; not cumulative."""


@dataclass(frozen=True, slots=True)
class RequestStatistics:
    """A snapshot."""

    operations: Mapping[str, OperationCounts]

    num_errors: Mapping[tuple[str, int], int]
    """Requests answered with an error, by operation and errno."""

    num_in_progress: int


class RequestCounter:
    """Counters of one daemon; the event loop's thread only."""

    def __init__(self) -> None:
        self._operations: dict[str, _Operation] = {}
        self._errors: dict[tuple[str, int], int] = {}
        self.num_in_progress = 0

    def note(self, operation: str, duration_ns: int) -> None:
        """A request was answered."""
        counts = self._operations.get(operation)
        if counts is None:
            counts = self._operations[operation] = _Operation()
        counts.total_ns += duration_ns
        counts.by_duration[bisect_left(_BOUNDS_NS, duration_ns)] += 1

    def note_error(self, operation: str, code: int) -> None:
        """The answer was this errno."""
        self._errors[operation, code] = self._errors.get((operation, code), 0) + 1

    def statistics(self) -> RequestStatistics:
        """A snapshot."""
        operations = {
            name: OperationCounts(
                sum(counts.by_duration), counts.total_ns / 1e9, tuple(counts.by_duration)
            )
            for name, counts in sorted(self._operations.items())
        }
        return RequestStatistics(operations, dict(self._errors), self.num_in_progress)
