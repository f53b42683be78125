"""How often a daemon may die."""

from __future__ import annotations

import pytest

from trainmount_fuse.session.restarts import RestartBudget, RestartPolicy


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_daemon_that_answered_is_replaced_at_once_time_and_again():
    clock = Clock()
    budget = RestartBudget(clock=clock)
    for _ in range(200):
        budget.note_ready()
        assert budget.delay_after_death(was_ready=True) == 0
        clock.now += 11


def test_failed_starts_are_spaced_out_and_then_enough():
    policy = RestartPolicy(max_failed_starts=6, first_delay_seconds=1, max_delay_seconds=5)
    budget = RestartBudget(policy, Clock())
    delays = [budget.delay_after_death(was_ready=False) for _ in range(6)]
    assert delays == [1, 2, 4, 5, 5, None]


def test_an_answer_forgives_failed_starts():
    budget = RestartBudget(RestartPolicy(max_failed_starts=2, first_delay_seconds=1), Clock())
    for _ in range(5):
        assert budget.delay_after_death(was_ready=False) == 1
        budget.note_ready()


def test_a_request_that_kills_every_daemon_comes_to_an_end():
    clock = Clock()
    budget = RestartBudget(RestartPolicy(max_deaths=10, window_seconds=100), clock)
    delays = []
    for _ in range(10):
        budget.note_ready()
        delays.append(budget.delay_after_death(was_ready=True))
        clock.now += 5
    assert delays == [0.0] * 9 + [None]
    assert budget.num_deaths == 10


def test_impossible_limits_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        RestartPolicy(max_deaths=0)
