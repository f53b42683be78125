"""The programs that read files by their paths in loader workers, by our loader and by the library
that it stands in for. Each runs in a process of its own, one of them in another environment, so
that nothing of this project is imported at the top. Called for `loader`.
"""

from __future__ import annotations

from typing import Any, Final

from measure import Timing, measured

__all__ = ["BATCH_SIZE", "NUM_WORKERS", "SECOND_EPOCH", "read_by_peer", "read_by_trainmount"]

NUM_WORKERS: Final = 2
BATCH_SIZE: Final = 16

SECOND_EPOCH: Final = "second_epoch_seconds"
"""Of the details of a timing, whose own seconds are the first epoch's."""


def read_by_trainmount(directory: str, num_files: int, file_bytes: int) -> Timing:
    from trainmount.data import DataLoader, UCVolumeDataset

    return _read(DataLoader, UCVolumeDataset, directory, num_files * file_bytes)


def read_by_peer(directory: str, num_files: int, file_bytes: int) -> Timing:
    import mlflow  # noqa: F401 - the library imports it when it begins to read
    from databricks.air.data import DataLoader, UCVolumeDataset

    return _read(DataLoader, UCVolumeDataset, directory, num_files * file_bytes)


def _read(loader: Any, dataset: Any, directory: str, num_bytes: int) -> Timing:
    """Two epochs: the first with the listing and the start of the workers."""
    with measured() as timing:
        batches = loader(
            dataset(directory),
            batch_size=BATCH_SIZE,
            num_workers=NUM_WORKERS,
            collate_fn=_size_of,
        )
        _check(sum(batches), num_bytes)
    with measured() as second:
        _check(sum(batches), num_bytes)
    timing.details[SECOND_EPOCH] = second.seconds
    return timing


def _size_of(paths: list[str]) -> int:
    """What a program does in its workers: it reads the files that it is given."""
    size_bytes = 0
    for path in paths:
        with open(path, "rb") as file:  # noqa: PTH123 - the fastest there is
            size_bytes += len(file.read())
    return size_bytes


def _check(num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        raise RuntimeError(f"{num_bytes} bytes were loaded, {expected} are stored")
