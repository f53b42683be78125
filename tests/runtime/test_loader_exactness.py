"""Any job, stopped and killed anywhere and gone on with on any grid: every sample exactly once, in
the order that the seed and the epoch give.

In one process: each rank has a loader of its own, told its place. The order is compared with one
that is computed from the seed alone, so it says at once that no sample is lost, none comes twice,
and that the global batches of the same size are the same.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainmount.data import DataLoader, UCVolumeDataset
from trainmount.data.position import Grid
from trainmount.data.shuffle import sequential, shuffled

NUM_CASES = int(os.environ.get("TRAINMOUNT_TEST_CASES", "2000"))
MAX_FILES = 24
NUM_EPOCHS = 2


class OnGrid(UCVolumeDataset):
    """A dataset that believes to be on this rank of a job."""

    place = Grid(0, 1)

    def grid(self) -> Grid:
        return self.place


@dataclass(frozen=True)
class Attempt:
    """A stretch of the job until it is killed."""

    world_size: int
    batch_size: int | None
    num_steps: int
    save_every: int
    """Steps from one checkpoint to the next; what came after the last is lost with the kill."""

    @property
    def global_batch_size(self) -> int:
        return self.world_size * (self.batch_size or 1)


ATTEMPTS = st.builds(
    Attempt,
    world_size=st.integers(1, 4),
    batch_size=st.sampled_from([None, 1, 2, 3, 5]),
    num_steps=st.integers(0, 12),
    save_every=st.integers(1, 4),
)


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> list[OnGrid]:
    """Datasets; the n-th has n + 1 files, one of them in a directory below the others'."""
    root = tmp_path_factory.mktemp("exact")
    found = []
    for count in range(1, MAX_FILES + 1):
        directory = root / str(count)
        (directory / "sub").mkdir(parents=True)
        for number in range(count):
            name = f"f{number:02d}" if number else "sub/first"
            (directory / name).write_bytes(b"." * number)
        found.append(OnGrid(str(directory), distributed=False))
    return found


class Job:
    """The ranks of a job one attempt after the other, and what its checkpoints count."""

    def __init__(self, dataset: OnGrid, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.dataset = copy.copy(dataset)
        self.dataset.shuffle, self.dataset.seed = shuffle, seed
        self.drop_last = drop_last
        self.state: str | None = None
        self.delivered: list[list[str]] = [[] for _ in range(NUM_EPOCHS)]

    def loader(self, rank: int, attempt: Attempt) -> DataLoader:
        dataset = copy.copy(self.dataset)
        dataset.place = Grid(rank, attempt.world_size)
        loader = DataLoader(
            dataset, attempt.batch_size, num_workers=0, drop_last=self.drop_last, collate_fn=_names
        )
        if self.state is not None:
            loader.load_state_dict(json.loads(self.state))
        return loader

    def run(self, attempt: Attempt) -> None:
        """Until the attempt is killed, or the last epoch is over."""
        loaders = [self.loader(rank, attempt) for rank in range(attempt.world_size)]
        unsaved: list[tuple[int, str]] = []
        for step, (epoch, names) in enumerate(self.steps(loaders, attempt), 1):
            unsaved += [(epoch, name) for name in names]
            assert len({loader.position for loader in loaders}) == 1
            if step % attempt.save_every == 0 or loaders[0].epoch == NUM_EPOCHS:
                # One state for the job: what any rank has saved serves all.
                self.state = json.dumps(loaders[step % len(loaders)].state_dict())
                for of_epoch, name in unsaved:
                    self.delivered[of_epoch].append(name)
                unsaved.clear()
            if step == attempt.num_steps:
                return

    def steps(self, loaders: list[DataLoader], attempt: Attempt) -> Iterator[tuple[int, list[str]]]:
        """The epoch and the files of each global batch, put together from the ranks' batches."""
        while (epoch := loaders[0].epoch) < NUM_EPOCHS:
            batches = [iter(loader) for loader in loaders]
            while loaders[0].epoch == epoch:
                of_ranks = [next(batch, []) for batch in batches]
                yield epoch, [names[n] for n in range(10) for names in of_ranks if n < len(names)]


def _names(items: Any) -> list[str]:
    return [Path(path).name for path in ([items] if isinstance(items, str) else items)]


@settings(
    max_examples=NUM_CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    count=st.integers(1, MAX_FILES),
    attempts=st.lists(ATTEMPTS, min_size=1, max_size=4),
    shuffle=st.booleans(),
    seed=st.integers(0, 1 << 40),
    drop_last=st.booleans(),
)
def test_every_sample_is_delivered_once_and_in_the_seeded_order(
    listed: list[OnGrid],
    count: int,
    attempts: list[Attempt],
    shuffle: bool,
    seed: int,
    drop_last: bool,
) -> None:
    largest = max(attempt.global_batch_size for attempt in attempts)
    # torch refuses to drop a last batch where there are no batches, and the loader if it is all.
    can_drop = largest <= count and all(attempt.batch_size for attempt in attempts)
    job = Job(listed[count - 1], shuffle=shuffle, seed=seed, drop_last=drop_last and can_drop)
    for attempt in attempts:
        job.run(attempt)
    last = Attempt(attempts[-1].world_size, attempts[-1].batch_size, 10**6, 1)
    job.run(last)
    listing = [f"f{number:02d}" for number in range(1, count)] + ["first"]
    for epoch, delivered in enumerate(job.delivered):
        order = shuffled(count, seed=seed, epoch=epoch) if shuffle else sequential(count)
        expected = [listing[order[place]] for place in range(count)]
        assert delivered == expected[: len(delivered)]
        missing = count - len(delivered)
        assert missing < largest if job.drop_last else missing == 0


def test_jobs_with_workers_that_are_killed_deliver_every_sample_once(
    tmp_path: Path, run_ranks: Any
) -> None:
    count, seed = 46, 5
    for name in ("data", "saves"):
        (tmp_path / name).mkdir()
    for number in range(count):
        (tmp_path / "data" / f"f{number:02d}").write_bytes(b"." * number)

    def run(world_size: int, **arguments: Any) -> list[int]:
        options = {"root": str(tmp_path), "seed": seed, "num_epochs": NUM_EPOCHS, **arguments}
        codes: list[int] = run_ranks("consume", world_size, **options)
        return codes

    assert run(2, batch_size=3, num_workers=2, die_at=5)[1] == -9
    assert run(1, batch_size=6, num_workers=1, die_at=8) == [-9]
    assert run(3, batch_size=2, num_workers=0, die_at=11)[2] == -9
    assert run(2, batch_size=3, num_workers=1) == [0, 0]
    consumed: dict[int, dict[int, set[str]]] = {epoch: {} for epoch in range(NUM_EPOCHS)}
    for of_rank in (tmp_path / "saves").glob("*-*"):
        for line in of_rank.read_text().splitlines():
            epoch, step, name = line.split()
            names = consumed[int(epoch)].setdefault(int(step), set())
            assert name not in names
            names.add(name)
    for epoch, steps in consumed.items():
        order = shuffled(count, seed=seed, epoch=epoch)
        names = [f"f{order[place]:02d}" for place in range(count)]
        expected = [set(names[start : start + 6]) for start in range(0, count, 6)]
        assert [steps[step] for step in sorted(steps)] == expected
