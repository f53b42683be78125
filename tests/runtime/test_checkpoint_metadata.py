"""What the metadata of a checkpoint may be made of, whichever Python wrote it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from trainmount.checkpoint.unpickling import unpickle_metadata
from trainmount.errors import DamagedCheckpoint


class Written:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self._call


def metadata_with(planner_data: object) -> bytes:
    return pickle.dumps(Metadata(state_dict_metadata={}, planner_data=planner_data))


def test_an_enumeration_reads_the_same_in_both_ways_that_python_writes_it() -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    by_value = metadata_with(Written(_MEM_FORMAT_ENCODING, member.value))
    # Python 3.11.0 to 3.11.3, among them Debian 12's.
    by_name = metadata_with(Written(getattr, _MEM_FORMAT_ENCODING, member.name))
    assert [
        unpickle_metadata(data, "here/metadata").planner_data for data in (by_value, by_name)
    ] == [member] * 2


@pytest.mark.parametrize(
    "planner_data",
    [
        Written(getattr, _MEM_FORMAT_ENCODING, "__class__"),
        Written(getattr, Metadata, "__init__"),
        Written(eval, "1"),
    ],
)
def test_metadata_that_would_run_something_else_is_refused(planner_data: object) -> None:
    with pytest.raises(DamagedCheckpoint, match="here/metadata cannot be read"):
        unpickle_metadata(metadata_with(planner_data), "here/metadata")
