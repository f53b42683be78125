"""When a request that failed is sent again. The one policy for every call of the Files API and of
the object store.

`api.py`, `download.py` and `upload.py` make one `Attempts` for each request (for each part of an
upload) and ask it after each failure; they ask only for requests that may safely be repeated.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final, Protocol

from trainmount_files.errors import Cancelled, VolumeError

__all__ = ["RETRYABLE_STATUSES", "Attempts", "Cancellation", "Clock", "RetryPolicy", "SystemClock"]

RETRYABLE_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""500 is among them: object stores answer it for passing trouble. 501 and 505 will not change."""

# The system's generator: processes that were forked from one parent must not wait in step.
_RANDOM: Final = random.SystemRandom()


class Cancellation(Protocol):
    """A caller's way to give up; `threading.Event` is one."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Return True as soon as it is set, False after `timeout` seconds."""
        ...


class Clock(Protocol):
    """Time as the policy sees it; tests give one that does not wait."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, cancel: Cancellation | None) -> None:
        """Return after `seconds`, or as soon as `cancel` is set."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, cancel: Cancellation | None) -> None:
        if cancel is None:
            time.sleep(seconds)
        else:
            cancel.wait(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long and how often to try again."""

    deadline_seconds: float = 120.0
    """Time after the first try (or after the last progress) when a failure becomes final.

    Two minutes ride out a rolling restart of a gateway; a training step that waits longer had
    better fail loudly.
    """

    first_delay_seconds: float = 0.25
    """Upper bound of the first wait; doubles with each try. The wait itself is drawn from 0 to the
    bound.
    """

    max_delay_seconds: float = 10.0
    """Where the doubling ends."""

    retry_after_jitter_seconds: float = 1.0
    """Spread added to a `Retry-After`, so that clients that were told the same do not come back
    together.
    """

    def __post_init__(self) -> None:
        for name in ("deadline_seconds", "first_delay_seconds", "max_delay_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


class Attempts:
    """The tries of one request. Used by one thread."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        cancel: Cancellation | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._policy = policy
        self._cancel = cancel
        self._clock: Clock = clock or SystemClock()
        self._failures = 0
        self._deadline = self._clock.monotonic() + policy.deadline_seconds

    def progressed(self) -> None:
        """Bytes arrived: the deadline and the delays begin anew."""
        self._failures = 0
        self._deadline = self._clock.monotonic() + self._policy.deadline_seconds

    @property
    def is_cancelled(self) -> bool:
        """Whether the caller has given up."""
        return self._cancel is not None and self._cancel.is_set()

    def check_cancelled(self, operation: str, path: str) -> None:
        """Raises Cancelled where the caller has given up."""
        if self.is_cancelled:
            raise Cancelled(operation, path, "cancelled")

    def wait_or_raise(self, failure: VolumeError, retry_after: str | None = None) -> None:
        """Return when the request should be sent again.

        `retry_after` is the header's value as it came: seconds or a date; anything else counts as
        absent.

        Raises:
            VolumeError: `failure`, at once, where the next try would come after the deadline.
            Cancelled: the caller gave up while waiting.
        """
        self.check_cancelled(failure.operation, failure.path)
        policy = self._policy
        asked = _parse_retry_after(retry_after, self._clock.now())
        if asked is not None:
            delay = asked + _RANDOM.uniform(0, policy.retry_after_jitter_seconds)
        else:
            # 2**30 is far beyond any bound and still a small float.
            bound = policy.first_delay_seconds * 2.0 ** min(self._failures, 30)
            delay = _RANDOM.uniform(0, min(bound, policy.max_delay_seconds))
        self._failures += 1
        if self._clock.monotonic() + delay >= self._deadline:
            raise failure
        self._clock.sleep(delay, self._cancel)
        self.check_cancelled(failure.operation, failure.path)


def _parse_retry_after(value: str | None, now: float) -> float | None:
    """Seconds from now, None where the header is absent, malformed or of the past."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        # More digits than any wait has would overflow a float's meaning, not Python.
        return float(text[:12])
    try:
        seconds = parsedate_to_datetime(text).timestamp() - now
    except (ValueError, TypeError, OverflowError):
        return None
    return seconds if seconds > 0 else None
