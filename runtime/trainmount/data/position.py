"""Where a job stands in its data, and which samples of the next batches are whose. Pure; called by
`loader`.

The whole job has one position: an epoch and how many of its samples, in the epoch's order, have
been delivered. From it the *global batches* follow: the next `global_batch_size` samples, again
and again. The ranks take the samples of a global batch in turn, so in an epoch that is not shuffled
rank r of R reads the files r, r + R, r + 2 R, ... of the listing. Since neither the number of ranks
nor that of loader workers is part of the position, it can be taken on one grid and continued on any
other; where the global batch size stays the same, so do the global batches.

The last global batch of an epoch may be short. With `drop_last` it is left out. Without, it is
shared as evenly as possible, the first ranks getting one sample more, so every rank takes the same
number of steps as long as the short batch has at least one sample a rank. If it has fewer, the last
ranks have no batch in that step (see `Plan.share`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Grid", "Plan", "Position"]


@dataclass(frozen=True, slots=True)
class Grid:
    """The place of a rank among those that share the samples."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, got {self.rank}")


@dataclass(frozen=True, slots=True)
class Position:
    """What has been delivered: every epoch before `epoch`, and the first `delivered` samples of its
    order.
    """

    epoch: int = 0
    delivered: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How the samples of an epoch are cut into global batches."""

    count: int
    """Number of samples in an epoch."""

    global_batch_size: int
    """Samples of one step over all ranks, at least 1."""

    drop_last: bool = False

    def batch_size_at(self, delivered: int) -> int:
        """Samples of the global batch that begins there; 0 at the end of the epoch."""
        left = self.count - delivered
        if left < (self.global_batch_size if self.drop_last else 1):
            return 0
        return min(left, self.global_batch_size)

    def after_batch(self, position: Position) -> Position:
        """The position once the global batch at `position` is delivered; after the last one, the
        next epoch's start.
        """
        delivered = position.delivered + self.batch_size_at(position.delivered)
        if self.batch_size_at(delivered) == 0:
            return Position(position.epoch + 1, 0)
        return Position(position.epoch, delivered)

    def settle(self, position: Position) -> Position:
        """The same position, or the next epoch's start where nothing of this epoch is left (for a
        non-empty plan).
        """
        if position.delivered > 0 and self.batch_size_at(position.delivered) == 0:
            return Position(position.epoch + 1, 0)
        return position

    def share(self, delivered: int, grid: Grid) -> range:
        """The places, in the epoch's order, of the rank's samples of the global batch that begins
        at `delivered`.

        Empty where the batch has fewer samples than ranks before this one need.
        """
        end = delivered + self.batch_size_at(delivered)
        return range(delivered + grid.rank, end, grid.world_size)

    def shares(self, delivered: int, grid: Grid) -> Iterator[range]:
        """The rank's shares of all global batches from `delivered` to the end of the epoch; empty
        ones are left out.
        """
        while size := self.batch_size_at(delivered):
            if share := self.share(delivered, grid):
                yield share
            delivered += size

    def num_batches(self, delivered: int = 0) -> int:
        """Number of global batches from `delivered` to the end of the epoch: the job's steps."""
        left = max(0, self.count - delivered)
        if self.drop_last:
            return left // self.global_batch_size
        return -(-left // self.global_batch_size)

    def num_shares(self, grid: Grid, delivered: int = 0) -> int:
        """Number of batches of this rank; one less than `num_batches` where its last share is
        empty.
        """
        num_batches = self.num_batches(delivered)
        if num_batches == 0:
            return 0
        last = delivered + (num_batches - 1) * self.global_batch_size
        return num_batches if self.share(last, grid) else num_batches - 1
