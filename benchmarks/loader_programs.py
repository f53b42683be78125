"""The programs that read files with a data loader: ours, torch's, and the one of the library that
ours stands in for. Each runs in a process of its own, one of them in another environment, so that
nothing of this project is imported at the top. Called for `loader`.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any, Final

from measure import Timing, measured

__all__ = [
    "NUM_WORKERS",
    "SECOND_EPOCH",
    "read_by_torch",
    "read_by_trainmount",
    "read_paths_by_peer",
    "read_paths_by_trainmount",
]

NUM_WORKERS: Final = 2
_BATCH_SIZE: Final = 16
_PREFETCH_FACTOR: Final = 4

_PR_SET_PDEATHSIG: Final = 1

SECOND_EPOCH: Final = "second_epoch_seconds"
"""Of the details of a timing, whose own seconds are the first epoch's."""


def read_by_trainmount(directory: str, num_files: int, file_bytes: int) -> Timing:
    """One epoch of `trainmount.data.DataLoader`, the listing and the start of its workers too."""
    from programs import load_client

    from trainmount.data import DataLoader, UCVolumeDataset

    load_client()
    with measured() as timing:
        dataset = UCVolumeDataset(directory, item="bytes")
        loader = DataLoader(
            dataset,
            batch_size=_BATCH_SIZE,
            num_workers=NUM_WORKERS,
            prefetch_factor=_PREFETCH_FACTOR,
            collate_fn=list,
        )
        num_bytes = sum(len(item) for batch in loader for item in batch)
    _check(num_bytes, num_files * file_bytes)
    return timing


def read_by_torch(directory: str, num_files: int, file_bytes: int) -> Timing:
    """One epoch of torch's DataLoader over the files of a directory, its listing and the start of
    its workers too."""
    from torch.utils.data import DataLoader, Dataset

    class Files(Dataset[bytes]):
        def __init__(self) -> None:
            with os.scandir(directory) as entries:
                self.paths = sorted(entry.path for entry in entries if entry.is_file())

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, index: int) -> bytes:
            with open(self.paths[index], "rb") as file:  # noqa: PTH123 - the fastest there is
                return file.read()

    with measured() as timing:
        loader: DataLoader[Any] = DataLoader(
            Files(),
            batch_size=_BATCH_SIZE,
            num_workers=NUM_WORKERS,
            prefetch_factor=_PREFETCH_FACTOR,
            collate_fn=list,
            persistent_workers=True,
            worker_init_fn=_end_with_parent,
        )
        num_bytes = sum(len(item) for batch in loader for item in batch)
    _check(num_bytes, num_files * file_bytes)
    return timing


def _end_with_parent(_worker: int) -> None:
    """torch's workers stay for ever where the benchmark is stopped while they hand a batch over."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def read_paths_by_trainmount(directory: str, num_files: int, file_bytes: int) -> Timing:
    from trainmount.data import DataLoader, UCVolumeDataset

    return _read(DataLoader, UCVolumeDataset, directory, num_files * file_bytes)


def read_paths_by_peer(directory: str, num_files: int, file_bytes: int) -> Timing:
    import mlflow  # noqa: F401 - the library imports it when it begins to read
    from databricks.air.data import DataLoader, UCVolumeDataset

    return _read(DataLoader, UCVolumeDataset, directory, num_files * file_bytes)


def _read(loader: Any, dataset: Any, directory: str, num_bytes: int) -> Timing:
    """Two epochs: the first with the listing and the start of the workers."""
    with measured() as timing:
        batches = loader(
            dataset(directory),
            batch_size=_BATCH_SIZE,
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
