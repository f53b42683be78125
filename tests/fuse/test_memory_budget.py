"""How the memory of one mount is shared by those who need it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainmount_files.errors import Cancelled
from trainmount_fuse.memory import MemoryBudget


def wait_for_waiters(budget: MemoryBudget, num_waits: int) -> None:
    done = threading.Event()
    while budget.statistics().num_waits < num_waits:
        done.wait(0.001)


def test_what_does_not_fit_is_refused_to_who_only_tries() -> None:
    budget = MemoryBudget(100)
    assert budget.try_take(60)
    assert not budget.try_take(41)
    assert budget.try_take(40)
    budget.give_back(100)
    assert (budget.used_bytes, budget.peak_bytes) == (0, 100)


def test_more_than_the_limit_is_given_to_who_is_alone_with_it() -> None:
    budget = MemoryBudget(100)
    assert budget.try_take(500)
    assert not budget.try_take(1)
    budget.give_back(500)
    budget.take(300)
    assert budget.used_bytes == 300


def test_who_waits_gets_the_memory_in_order_of_arrival_and_before_who_only_tries() -> None:
    budget = MemoryBudget(100)
    budget.take(90)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(budget.take, 80)
        wait_for_waiters(budget, 1)
        second = threads.submit(budget.take, 30)
        wait_for_waiters(budget, 2)
        # The second and this one would fit.
        assert not budget.try_take(5)
        budget.give_back(90)
        first.result()
        assert not budget.try_take(5)
        budget.give_back(80)
        second.result()
    assert (budget.used_bytes, budget.peak_bytes) == (30, 90)


def test_a_waiter_that_is_cancelled_takes_nothing_and_lets_the_next_one_through() -> None:
    budget = MemoryBudget(100)
    budget.take(90)
    cancelled = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(budget.take, 50, cancelled)
        wait_for_waiters(budget, 1)
        second = threads.submit(budget.take, 10)
        wait_for_waiters(budget, 2)
        cancelled.set()
        with pytest.raises(Cancelled):
            first.result()
        second.result()
    assert budget.used_bytes == 100


def test_many_threads_never_hold_more_than_the_limit() -> None:
    budget = MemoryBudget(1000)

    def work(number: int) -> None:
        for step in range(50):
            num_bytes = 1 + (number * 97 + step * 31) % 400
            budget.take(num_bytes)
            budget.give_back(num_bytes)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert budget.used_bytes == 0
    assert 400 <= budget.peak_bytes <= 1000


def test_what_is_split_off_is_nobody_elses_and_counts_as_used() -> None:
    budget = MemoryBudget(100)
    part = budget.split_off(30)
    assert budget.try_take(70)
    assert not budget.try_take(1)
    assert part.try_take(30)
    assert not part.try_take(1)
    assert (budget.used_bytes, part.used_bytes) == (100, 30)
    assert budget.statistics().limit_bytes == 100
    budget.give_back(70)
    assert not part.try_take(1)
    assert budget.used_bytes == 30
