"""Errors of the threads by which a dataset of others reads ahead. Called by `counted`.

A thread of mosaicml's `StreamingDataset` that fails ends its process's part of the epoch as if that
were complete, and lets other loader workers wait for its shard for ever. What it tells of it is its
method `on_exception`.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import get_worker_info

from trainmount.errors import DataError

__all__ = ["Failures", "Watching"]


class Failures:
    """Of the dataset's copies in a rank and its loader workers."""

    def __init__(self, dataset_name: str) -> None:
        self._dataset_name = dataset_name
        self._told, self._tell = multiprocessing.Pipe(duplex=False)
        self._first = ""

    def watch(self, dataset: Any) -> None:
        """Learn of those in this process. A loader worker ends of the first."""
        if not hasattr(dataset, "on_exception"):
            return
        notice = dataset.on_exception

        def on_exception(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                self._tell.send(f"{type(error).__name__}: {error}")
                if get_worker_info() is not None:
                    traceback.print_exception(error)
                    os._exit(1)
            notice(future)

        dataset.on_exception = on_exception

    def check(self, workers: Iterable[BaseProcess] = ()) -> None:
        """Raises DataError with the first of them, once these workers are ended. Called in the
        rank.
        """
        if not self._first and self._told.poll():
            self._first = self._told.recv()
        if self._first:
            for worker in workers:
                worker.terminate()
            raise DataError(
                f"{self._dataset_name} cannot read ahead: {self._first}; "
                "restore what it names, and resume"
            )


class Watching:
    """Watches over the dataset of a loader worker that starts, after the caller's function."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None, failures: Failures) -> None:
        self._worker_init_fn = worker_init_fn
        self._failures = failures

    def __call__(self, worker_id: int) -> None:
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
        worker = get_worker_info()
        assert worker is not None, "torch calls it in its workers"
        self._failures.watch(worker.dataset)
