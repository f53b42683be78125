"""A seeded order of n samples that is computed one sample at a time.

Called by `loader`, `dataset`. An order that had to be built as a list would cost memory and time in
proportion to the number of files on each resume; this one costs the same at sample 0 and at sample
10^6, and needs no memory.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

__all__ = ["Order", "sequential", "shuffled"]

_NUM_ROUNDS: Final = 8
# Below this side the rounds have too few values to mix; the walk back into range stays short (at
# most 64 cells).
_SMALLEST_SIDE: Final = 8
_MASK: Final = (1 << 64) - 1


class Order:
    """A permutation of the numbers from 0 to `count` - 1; `order[i]` is the sample at place `i`."""

    __slots__ = ("_columns", "_keys", "_rows", "count")

    def __init__(self, count: int, keys: tuple[int, ...]) -> None:
        self.count = count
        self._keys = keys
        self._rows = max(_SMALLEST_SIDE, math.isqrt(max(0, count - 1)) + 1)
        self._columns = max(_SMALLEST_SIDE, -(-count // self._rows))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.count:
            raise IndexError(f"place {place} is not in an order of {self.count}")
        if not self._keys:
            return place
        # A Feistel network over a grid of rows x columns >= count is a permutation of the grid.
        # Following it until it comes back into range is a permutation of the range (and ends: the
        # cycle goes through `place` itself).
        sample = self._step(place)
        while sample >= self.count:
            sample = self._step(sample)
        return sample

    def _step(self, value: int) -> int:
        rows, columns = self._rows, self._columns
        row, column = divmod(value, columns)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                row = (row + _mix(column ^ key)) % rows
            else:
                column = (column + _mix(row ^ key)) % columns
        return row * columns + column


def sequential(count: int) -> Order:
    """The order of the listing."""
    return Order(count, ())


def shuffled(count: int, *, seed: int, epoch: int) -> Order:
    """An order that depends on the seed and the epoch alone: not on ranks, workers, or what was
    resumed.
    """
    keys = tuple(
        int.from_bytes(hashlib.sha256(f"{seed}/{epoch}/{number}".encode()).digest()[:8], "big")
        for number in range(_NUM_ROUNDS)
    )
    return Order(count, keys)


def _mix(value: int) -> int:
    # The finalizer of MurmurHash3: each bit of the input reaches each bit of the output.
    value ^= value >> 33
    value = (value * 0xFF51AFD7ED558CCD) & _MASK
    value ^= value >> 33
    value = (value * 0xC4CEB9FE1A85EC53) & _MASK
    return value ^ (value >> 33)
