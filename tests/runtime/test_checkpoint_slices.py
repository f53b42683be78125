"""Loading part of a stored tensor: the right elements, and no more bytes than needed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from trainmount.checkpoint.layout import BLOCK_BYTES
from trainmount.data import UCVolumeReader, UCVolumeWriter

SHAPE = (40, 30, 140)


class OnePart:
    """The planner of a rank whose tensor is a part of the stored one."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target

    def resolve_tensor(self, _request: ReadItem) -> torch.Tensor:
        return self.target

    def commit_tensor(self, _request: ReadItem, tensor: torch.Tensor) -> None:
        assert tensor is not None


@pytest.fixture(scope="module")
def stored(tmp_path_factory: Any) -> tuple[Path, torch.Tensor]:
    path = tmp_path_factory.mktemp("slices")
    tensor = torch.arange(math.prod(SHAPE), dtype=torch.float64).reshape(SHAPE)
    with pytest.warns(UserWarning, match="disabled"):
        dcp.save({"tensor": tensor}, storage_writer=UCVolumeWriter(path))
    return path, tensor


def read_part(
    path: Path, offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    reader = UCVolumeReader(path)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    index = MetadataIndex("tensor", (0, 0, 0))
    request = ReadItem(
        LoadItemType.TENSOR,
        index,
        torch.Size((0, 0, 0)),
        index,
        torch.Size(offsets),
        torch.Size(lengths),
    )
    target = torch.full(lengths, -1.0, dtype=torch.float64)
    reader.read_data(LoadPlan([request]), OnePart(target)).wait()  # type: ignore[arg-type]
    return target, reader.num_bytes_read


@settings(max_examples=60, deadline=None)
@given(bounds=st.tuples(*[st.tuples(st.integers(0, size), st.integers(0, size)) for size in SHAPE]))
def test_any_part_of_a_tensor_is_read_as_it_is(
    stored: tuple[Path, torch.Tensor], bounds: tuple[tuple[int, int], ...]
) -> None:
    path, tensor = stored
    starts = tuple(min(pair) for pair in bounds)
    lengths = tuple(max(pair) - min(pair) for pair in bounds)
    part, _ = read_part(path, starts, lengths)
    slices = tuple(
        slice(start, start + length) for start, length in zip(starts, lengths, strict=True)
    )
    assert torch.equal(part, tensor[slices])


def test_a_rank_reads_its_rows_and_at_most_two_blocks_more(
    stored: tuple[Path, torch.Tensor],
) -> None:
    path, tensor = stored
    part, num_bytes = read_part(path, (10, 0, 0), (10, *SHAPE[1:]))
    assert torch.equal(part, tensor[10:20])
    assert part.nbytes <= num_bytes <= part.nbytes + 2 * BLOCK_BYTES < tensor.nbytes
