"""The few collective operations that the loader and the checkpointer need, as no-ops in a single
process.

Called by `data` and `checkpoint`. All of them are on the default process group, or on one that is
given; with one that died, they raise after that group's own timeout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist

__all__ = [
    "Group",
    "announced_world_size",
    "from_first_rank",
    "gather",
    "grid_of_process",
    "is_distributed",
    "largest",
    "new_group",
]

Group: TypeAlias = dist.ProcessGroup | None
"""A group of all ranks; None for the default one, and where there is none."""

T = TypeVar("T")


def is_distributed() -> bool:
    """True if this process is one of several ranks, or the only one of an initialised group."""
    return dist.is_available() and dist.is_initialized()


def grid_of_process() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    if is_distributed():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def announced_world_size() -> int:
    """The number of ranks that the launcher announced, 1 if there was none."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def gather(make: Callable[[], T], group: Group = None) -> list[T]:
    """What `make` returns on each rank, in order, on all ranks.

    Where it raises on any rank, the first failed rank's exception is raised on all, so that none
    waits for another.
    """
    if not is_distributed():
        return [make()]
    mine: tuple[T | None, Exception | None]
    try:
        mine = (make(), None)
    except Exception as error:
        mine = (None, error)
    answers: list[tuple[T | None, Exception | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(answers, mine, group=group)
    for _, failure in answers:
        if failure is not None:
            raise failure
    return [answer for answer, _ in answers]  # type: ignore[misc]


def from_first_rank(make: Callable[[], T], group: Group = None) -> T:
    """What `make` returns on rank 0, on all ranks; only rank 0 calls it. Its exception is raised on
    all.
    """
    if not is_distributed():
        return make()
    message: list[tuple[T | None, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            message = [(make(), None)]
        except Exception as error:
            message = [(None, error)]
    dist.broadcast_object_list(message, src=0, group=group)
    answer, failure = message[0]
    if failure is not None:
        raise failure
    return answer  # type: ignore[return-value]


def largest(values: Sequence[int], group: Group = None) -> list[int]:
    """The largest of each value over all ranks, on all ranks. `group` takes tensors of the CPU."""
    if not is_distributed() or dist.get_world_size() == 1:
        return list(values)
    votes = torch.tensor(values, dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    found: list[int] = votes.tolist()
    return found


def new_group() -> Group:
    """A group of all ranks on gloo, whose operations nobody else's can be mistaken for, and which
    keeps no GPU waiting. Called by all ranks together.
    """
    if not is_distributed():
        return None
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "all ranks are members"
    return group
