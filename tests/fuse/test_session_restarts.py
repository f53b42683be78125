"""How often a daemon may die, and when it counts as hung."""

from __future__ import annotations

import pytest

from trainmount_fuse.session.restarts import RestartBudget, RestartPolicy
from trainmount_fuse.session.watchdog import HEARTBEAT_SECONDS, HURRIED_SECONDS, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_daemon_that_served_is_replaced_at_once_time_and_again():
    clock = Clock()
    budget = RestartBudget(clock=clock)
    for _ in range(1000):
        budget.note_ready()
        clock.now += 2
        assert budget.delay_after_death() == 0
    assert budget.num_deaths == 1000


def test_a_hundred_daemons_killed_at_their_first_answer_are_replaced_at_once():
    budget = RestartBudget(clock=Clock())
    for _ in range(100):
        budget.note_ready()
        assert budget.delay_after_death() == 0


def test_failed_starts_are_spaced_out_and_then_enough():
    policy = RestartPolicy(max_failed_starts=6, first_delay_seconds=1, max_delay_seconds=5)
    budget = RestartBudget(policy, Clock())
    delays = [budget.delay_after_death() for _ in range(6)]
    assert delays == [1, 2, 4, 5, 5, None]


def test_an_answer_forgives_failed_starts():
    clock = Clock()
    budget = RestartBudget(RestartPolicy(max_failed_starts=2, first_delay_seconds=1), clock)
    for _ in range(5):
        assert budget.delay_after_death() == 1
        budget.note_ready()
        clock.now += 10
        assert budget.delay_after_death() == 0


def test_a_request_that_kills_every_daemon_comes_to_an_end():
    clock = Clock()
    budget = RestartBudget(RestartPolicy(max_short_lives=10, short_life_seconds=5), clock)
    delays = []
    for _ in range(10):
        budget.note_ready()
        clock.now += 4
        delays.append(budget.delay_after_death())
    assert delays == [0.0] * 9 + [None]


def test_impossible_limits_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        RestartPolicy(max_short_lives=0)


def test_a_daemon_hangs_after_the_whole_limit_without_a_sign():
    watchdog = Watchdog(3 * HEARTBEAT_SECONDS)
    for _ in range(3):
        assert not watchdog.look()
    assert watchdog.look()
    watchdog.note_sign()
    assert not watchdog.look()


def test_a_daemon_that_is_to_end_gets_less_patience_and_never_more():
    for limit, expected in ((60.0, HURRIED_SECONDS), (3.0, 3.0)):
        watchdog = Watchdog(limit)
        watchdog.hurry()
        assert [watchdog.look() for _ in range(int(expected))] == [False] * int(expected)
        assert watchdog.look()


def test_a_daemon_whose_mount_does_not_end_after_all_gets_all_its_patience_back():
    watchdog = Watchdog(60.0)
    watchdog.hurry()
    watchdog.calm()
    assert [watchdog.look() for _ in range(60)] == [False] * 60
    assert watchdog.look()


def test_one_late_look_is_no_hang_however_long_it_took():
    # Both sides slept; the daemon's next sign comes within a period again.
    watchdog = Watchdog(0.1)
    assert not watchdog.look()
