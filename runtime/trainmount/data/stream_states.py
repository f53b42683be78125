"""States of `databricks.air.data`'s loader, for the position of a job and back. Called by `loader`.

Each rank has a state of its own there, with a count for each of its workers (`streams`). Together
they say which files were delivered; what is left is then the job's, and goes on as one position.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainmount.data.dataset import UCVolumeDataset
from trainmount.data.position import Position
from trainmount.data.state import Place
from trainmount.data.streams import Rest, Streams, delivered_by_workers, joined, rank_state
from trainmount.distributed import from_first_rank, gather
from trainmount.errors import StateMismatch
from trainmount.locations import is_local, local_path

__all__ = ["place_of_streams", "stream_state"]


def stream_state(files: UCVolumeDataset, place: Place, num_workers: int) -> dict[str, Any]:
    """This rank's state of version 1 at a place of the job.

    Raises:
        StateMismatch: the streams of the present grid cannot have delivered just these files.
    """
    _check_order(files)
    grid, streams = files.grid(), place.streams
    num_streams = grid.world_size * max(1, num_workers)
    if streams is None:
        streams = Streams(grid.world_size, (0,) * num_streams)
    elif (streams.world_size, len(streams.delivered)) != (grid.world_size, num_streams):
        raise StateMismatch(
            f"this epoch was begun by {streams.num_workers} workers on each of "
            f"{streams.world_size} ranks: until it ends, a state of version 1 is of such a grid"
        )
    delivered, count = place.position.delivered, len(files)
    end = Rest(count, streams)[delivered] if delivered < count else count
    return rank_state(streams.up_to(end), grid.rank, num_workers)


def place_of_streams(
    state: Mapping[str, Any], files: UCVolumeDataset, num_workers: int, epoch: int
) -> Place:
    """What the ranks' states of version 1 say together. Called by all ranks, each with its own.

    Raises:
        StateMismatch: the state of any rank is of another grid, rank or directory.
    """
    grid = files.grid()

    def mine() -> tuple[int, ...]:
        _check_order(files)
        return delivered_by_workers(state, grid, num_workers)

    of_ranks = gather(mine) if files.distributed else [mine()]
    streams = joined(of_ranks)
    streams.check(len(files))
    if files.distributed:
        from_first_rank(lambda: _check_listing(files))
    else:
        _check_listing(files)
    return Place(Position(epoch, streams.total), streams)


def _check_order(files: UCVolumeDataset) -> None:
    if files.shuffle:
        raise StateMismatch(
            "a state of version 1 counts files in the order of the listing: give the dataset "
            "shuffle=False"
        )
    before = ""
    for entry in files.manifest:
        if "/" in entry.path:
            raise StateMismatch(
                f"a state of version 1 counts the files of one directory, and {files.path} has "
                f"{entry.path}: give the dataset pattern='*'"
            )
        if entry.path < before:
            raise StateMismatch(
                f"a state of version 1 counts files in the order of their names, and {entry.path} "
                f"comes after {before}: give the dataset no files of its own"
            )
        before = entry.path


def _check_listing(files: UCVolumeDataset) -> None:
    """Nothing if the streams were over the same files: all that are in the directory, hidden ones
    too. (Without a mount there were no such streams on this machine.)
    """
    if not is_local(files.path):
        return
    with os.scandir(local_path(files.path)) as entries:
        there = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    different = there.symmetric_difference(entry.path for entry in files.manifest)
    if different:
        raise StateMismatch(
            f"a state of version 1 counts all files of {files.path}, and the dataset differs in "
            f"{len(different)}, {min(different)} first: start the epoch anew"
        )
