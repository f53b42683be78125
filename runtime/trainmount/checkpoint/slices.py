"""Which bytes of a stored chunk a sub-tensor is made of. Pure; called by `fetching`.

A chunk's elements are stored in row-major order. A sub-tensor of it is read in parts whose bytes
lie close together, so that neither much else is read nor much memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Part", "cut_slice", "strides_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a sub-tensor, and the bytes of the chunk from its first to its last element."""

    start: int
    """In bytes, from the chunk's first element."""

    end: int

    offsets: tuple[int, ...]
    """Inside the sub-tensor, in elements."""

    lengths: tuple[int, ...]


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, of a chunk in row-major order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def cut_slice(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    element_bytes: int,
    *,
    limit_bytes: int,
    hole_bytes: int,
) -> Iterator[Part]:
    """The sub-tensor of `lengths` at `offsets` of a chunk, none of whose lengths is 0, in parts.

    A part spans at most `limit_bytes`, if it has more than one element, and holes of `hole_bytes`
    and more between its elements are left out.
    """
    strides = strides_of(shape)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    yield from _cut(
        (0,) * len(shape), lengths, first, strides, element_bytes, limit_bytes, hole_bytes
    )


def _cut(
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    first: int,
    strides: tuple[int, ...],
    element_bytes: int,
    limit_bytes: int,
    hole_bytes: int,
) -> Iterator[Part]:
    # Number of elements from the first to the last one.
    span = 1 + _reach(lengths, strides)
    axis = next((axis for axis, length in enumerate(lengths) if length > 1), None)
    if axis is not None:
        row = 1 + _reach(lengths[axis + 1 :], strides[axis + 1 :])
        # Holes between rows of an outer axis are at least as large as those of an inner one.
        has_holes = (strides[axis] - row) * element_bytes >= hole_bytes
        if has_holes or span * element_bytes > limit_bytes:
            room = limit_bytes // element_bytes - row
            count = 1 if has_holes else max(0, room // strides[axis]) + 1
            for start in range(0, lengths[axis], count):
                yield from _cut(
                    _with(offsets, axis, offsets[axis] + start),
                    _with(lengths, axis, min(count, lengths[axis] - start)),
                    first + start * strides[axis],
                    strides,
                    element_bytes,
                    limit_bytes,
                    hole_bytes,
                )
            return
    yield Part(first * element_bytes, (first + span) * element_bytes, offsets, lengths)


def _reach(lengths: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))


def _with(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
