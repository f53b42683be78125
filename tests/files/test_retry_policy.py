"""When the policy waits, how long, and when it gives up; on a clock that does not wait."""

from __future__ import annotations

from email.utils import formatdate

import pytest

from trainmount_files import Cancelled, Unavailable
from trainmount_files.retry import Attempts, Cancellation, RetryPolicy

NOW = 1_800_000_000.0


class FakeClock:
    def __init__(self) -> None:
        self.elapsed = 0.0
        self.waits: list[float] = []

    def now(self) -> float:
        return NOW + self.elapsed

    def monotonic(self) -> float:
        return self.elapsed

    def sleep(self, seconds: float, cancel: Cancellation | None) -> None:
        self.waits.append(seconds)
        self.elapsed += seconds


class GivenUp:
    def is_set(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:
        return True


FAILURE = Unavailable("read", "file", "HTTP 503")


def wait_once(retry_after: str | None, policy: RetryPolicy | None = None) -> float:
    clock = FakeClock()
    Attempts(policy or RetryPolicy(), clock=clock).wait_or_raise(FAILURE, retry_after)
    return clock.waits[0]


def wait_until_raised(attempts: Attempts, retry_after: str | None) -> int:
    """How often the policy waited before it gave up."""
    for number in range(10_000):
        try:
            attempts.wait_or_raise(FAILURE, retry_after)
        except Unavailable:
            return number
    raise AssertionError("the policy never gives up")


@pytest.mark.parametrize(
    ("retry_after", "least", "most"),
    [
        ("2", 2.0, 3.0),
        (" 2 ", 2.0, 3.0),
        ("0", 0.0, 1.0),
        (formatdate(NOW + 3, usegmt=True), 3.0, 4.0),
        (formatdate(NOW - 3, usegmt=True), 0.0, 0.25),
        ("-1", 0.0, 0.25),
        ("abc", 0.0, 0.25),
        ("", 0.0, 0.25),
        ("1.5", 0.0, 0.25),
        ("Wed, 99 Oct 2026 07:28:00 GMT", 0.0, 0.25),
        ("²", 0.0, 0.25),
        (None, 0.0, 0.25),
    ],
)
def test_the_servers_wish_is_kept_where_it_makes_sense(
    retry_after: str | None, least: float, most: float
) -> None:
    for _ in range(20):
        assert least <= wait_once(retry_after) <= most


@pytest.mark.parametrize("retry_after", ["86400", "9" * 400, formatdate(NOW + 86_400)])
def test_a_wish_beyond_the_deadline_raises_the_servers_error_at_once(retry_after: str) -> None:
    clock = FakeClock()
    with pytest.raises(Unavailable) as caught:
        Attempts(RetryPolicy(), clock=clock).wait_or_raise(FAILURE, retry_after)
    assert caught.value is FAILURE
    assert clock.waits == []


def test_waits_double_up_to_their_bound_and_end_before_the_deadline() -> None:
    clock = FakeClock()
    attempts = Attempts(RetryPolicy(deadline_seconds=60), clock=clock)
    wait_until_raised(attempts, None)
    assert sum(clock.waits) < 60
    bounds = [min(0.25 * 2**number, 10.0) for number in range(len(clock.waits))]
    assert all(0 <= wait <= bound for wait, bound in zip(clock.waits, bounds, strict=True))
    assert max(clock.waits) > 1


def test_progress_begins_the_deadline_anew() -> None:
    clock = FakeClock()
    attempts = Attempts(RetryPolicy(deadline_seconds=5), clock=clock)
    for _ in range(10):
        attempts.wait_or_raise(FAILURE, "3")
        attempts.progressed()
    assert wait_until_raised(attempts, "3") == 1


def test_two_clients_told_the_same_do_not_come_back_together() -> None:
    assert len({wait_once("2") for _ in range(5)}) > 1


def test_a_caller_who_has_given_up_is_not_kept_waiting() -> None:
    clock = FakeClock()
    with pytest.raises(Cancelled):
        Attempts(RetryPolicy(), cancel=GivenUp(), clock=clock).wait_or_raise(FAILURE)
    assert clock.waits == []


@pytest.mark.parametrize("field", ["deadline_seconds", "first_delay_seconds", "max_delay_seconds"])
def test_a_negative_time_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RetryPolicy(**{field: -1.0})
