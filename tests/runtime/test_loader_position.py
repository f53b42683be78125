"""The position of a job in its data: each sample once, the same global batches, on any grid."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmount.data.position import Grid, Plan, Position
from trainmount.data.shuffle import sequential, shuffled

COUNTS = st.integers(1, 120)
GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 9))
"""World size and batch size a rank."""


def _deliver(
    plan: Plan, world_size: int, position: Position, num_steps: int
) -> tuple[list[list[int]], Position]:
    """The global batches, as places, of the next steps, each put together from the shares of all
    ranks.
    """
    batches = []
    for _ in range(num_steps):
        if plan.batch_size_at(position.delivered) == 0:
            break
        shares = [
            plan.share(position.delivered, Grid(rank, world_size)) for rank in range(world_size)
        ]
        batches.append(sorted(place for share in shares for place in share))
        epoch = position.epoch
        position = plan.after_batch(position)
        if position.epoch != epoch:
            break
    return batches, position


@settings(max_examples=500, deadline=None)
@given(count=COUNTS, first=GRIDS, second=GRIDS, drop_last=st.booleans(), stop=st.integers(0, 200))
def test_a_position_continued_on_another_grid_delivers_every_sample_once(
    count: int, first: tuple[int, int], second: tuple[int, int], drop_last: bool, stop: int
) -> None:
    before = Plan(count, first[0] * first[1], drop_last)
    after = Plan(count, second[0] * second[1], drop_last)
    delivered, position = _deliver(before, first[0], Position(), stop)
    if position.epoch == 0:
        position = after.settle(position)
    rest: list[list[int]] = []
    if position.epoch == 0:
        rest, position = _deliver(after, second[0], position, count)
    places = [place for batch in delivered + rest for place in batch]
    # In the order of the epoch, none twice; without drop_last all of them.
    assert places == list(range(len(places)))
    if not drop_last:
        assert len(places) == count
    else:
        assert count - len(places) < max(first[0] * first[1], second[0] * second[1])


@settings(max_examples=500, deadline=None)
@given(
    count=COUNTS,
    grid=GRIDS,
    divisor=st.integers(1, 9),
    drop_last=st.booleans(),
    stop=st.integers(0, 40),
)
def test_with_the_same_global_batch_size_the_global_batches_are_the_same(
    count: int, grid: tuple[int, int], divisor: int, drop_last: bool, stop: int
) -> None:
    size = grid[0] * grid[1]
    world_size = max(number for number in range(1, divisor + 1) if size % number == 0)
    plan = Plan(count, size, drop_last)
    undisturbed, _ = _deliver(plan, grid[0], Position(), count)
    before, position = _deliver(plan, grid[0], Position(), stop)
    after, _ = (
        _deliver(plan, world_size, position, count) if position.epoch == 0 else ([], position)
    )
    assert before + after == undisturbed


@given(count=COUNTS, grid=GRIDS, drop_last=st.booleans(), delivered=st.integers(0, 120))
def test_numbers_of_batches_are_those_of_the_shares(
    count: int, grid: tuple[int, int], drop_last: bool, delivered: int
) -> None:
    world_size, batch_size = grid
    plan = Plan(count, world_size * batch_size, drop_last)
    delivered = min(delivered, count)
    for rank in range(world_size):
        shares = list(plan.shares(delivered, Grid(rank, world_size)))
        assert len(shares) == plan.num_shares(Grid(rank, world_size), delivered)
        assert all(0 < len(share) <= batch_size for share in shares)
    assert len(list(plan.shares(delivered, Grid(0, world_size)))) == plan.num_batches(delivered)


def test_a_short_last_batch_is_spread_so_that_all_ranks_take_the_same_steps() -> None:
    plan = Plan(1438, 64)
    shares = [list(plan.shares(0, Grid(rank, 4))) for rank in range(4)]
    assert [len(of_rank) for of_rank in shares] == [23] * 4
    assert [len(of_rank[-1]) for of_rank in shares] == [8, 8, 7, 7]
    assert plan.num_batches() == 23


def test_a_last_batch_with_fewer_samples_than_ranks_leaves_the_last_ranks_without_one() -> None:
    plan = Plan(10, 8)
    assert [plan.num_shares(Grid(rank, 4)) for rank in range(4)] == [2, 2, 1, 1]
    assert plan.num_batches() == 2


def test_the_position_after_the_last_batch_is_the_next_epochs_first() -> None:
    assert Plan(10, 4).after_batch(Position(0, 8)) == Position(1, 0)
    assert Plan(10, 4, drop_last=True).after_batch(Position(0, 4)) == Position(1, 0)
    assert Plan(10, 4).settle(Position(3, 10)) == Position(4, 0)


@given(count=st.integers(0, 3000), seed=st.integers(), epoch=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_a_shuffled_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = shuffled(count, seed=seed, epoch=epoch)
    assert sorted(order[place] for place in range(count)) == list(range(count))


def test_the_order_depends_on_seed_and_epoch_alone_and_never_changes_between_versions() -> None:
    assert [shuffled(10, seed=1, epoch=0)[place] for place in range(10)] == PINNED
    orders = {
        tuple(shuffled(50, seed=seed, epoch=epoch)[place] for place in range(50))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_each_sample_comes_to_each_place_about_equally_often() -> None:
    count, num_orders = 10, 2000
    seen = Counter(
        (place, shuffled(count, seed=seed, epoch=0)[place])
        for seed in range(num_orders)
        for place in range(count)
    )
    expected = num_orders / count
    statistic = sum(
        (seen[place, sample] - expected) ** 2 / expected
        for place in range(count)
        for sample in range(count)
    )
    # Chi-squared with 81 degrees of freedom: 99.99 % are below 139.
    assert statistic < 139


def test_places_outside_of_the_order_are_refused() -> None:
    with pytest.raises(IndexError, match="place 5 is not in an order of 5"):
        sequential(5)[5]
    with pytest.raises(ValueError, match="rank must be from 0 to 1"):
        Grid(2, 2)


PINNED = [5, 2, 7, 0, 1, 9, 4, 3, 6, 8]
