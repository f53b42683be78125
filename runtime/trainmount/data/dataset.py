"""The files of one directory as a dataset. Called by training programs and by `loader`.

Given to `trainmount.data.DataLoader`, it is read by position: the loader says which files make up a
batch, so that the job has one position that continues on any grid. Iterated directly, or by torch's
own DataLoader, it is a stream for each (rank, loader worker), every file in exactly one of them,
and `state_dict` is that stream's progress.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from torch.utils.data import IterableDataset, get_worker_info

from trainmount.data.cache import FileCache
from trainmount.data.manifest import Entry, Manifest, compile_pattern
from trainmount.data.position import Grid
from trainmount.data.shuffle import Order, sequential, shuffled
from trainmount.data.sources import Source, open_source
from trainmount.distributed import from_first_rank, gather, grid_of_process, is_distributed
from trainmount.errors import DamagedFile, DataError, MissingFile, StateMismatch, TooManySkipped

__all__ = ["UCVolumeDataset"]

_log = logging.getLogger(__name__)

_STREAM_STATE_VERSION: Final = 1
_DEFAULT_CACHE_BYTES: Final = 10 << 30


class UCVolumeDataset(IterableDataset[Any]):
    """Each file below `path`, as a local path or as bytes, in the order of the listing or shuffled
    by seed and epoch.
    """

    def __init__(
        self,
        path: str,
        *,
        shuffle: bool = False,
        seed: int = 0,
        pattern: str = "**/*",
        item: Literal["path", "bytes"] = "path",
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: int = 100,
        distributed: bool = True,
        cache_size_bytes: int = _DEFAULT_CACHE_BYTES,
        cache_dir: str | None = None,
    ) -> None:
        """List the directory; the listing is frozen from here on.

        Args:
            path: a directory on a mount or anywhere; `/Volumes/...` that is not mounted is read
                through the volume client.
            shuffle: a new order each epoch, a function of (seed, epoch) alone.
            seed: of the shuffle.
            pattern: glob over paths relative to `path`; `**/` is any depth. Hidden files and those
                that other systems leave beside data (`_SUCCESS`, `_delta_log`) are never read.
            item: "path" gives a local path, valid until the next item (or batch) is asked for;
            "bytes" the content.
            on_error: what a missing or damaged file does: "raise", or "skip" (logged and counted).
            max_skipped: more skipped files than this in one process are an error all the same.
            distributed: share the files among the ranks. All ranks then construct the dataset
                together, and rank 0 lists for all. False: this process reads all files by itself
                (an evaluation on one rank, say).
            cache_size_bytes: bound of the local copies where the volume is not mounted and `item`
            is "path".
            cache_dir: where these copies go; default is a directory of the user below the system's
                temporary one.

        Raises:
            ValueError: an argument is out of its range.
            DataError: the directory cannot be listed, or no file matches.
        """
        super().__init__()
        if item not in ("path", "bytes"):
            raise ValueError(f"item must be 'path' or 'bytes', got {item!r}")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        if max_skipped < 0 or cache_size_bytes < 0:
            raise ValueError("max_skipped and cache_size_bytes must not be negative")
        self.path = str(path)
        self.shuffle = shuffle
        self.seed = seed
        self.pattern = pattern
        self.item = item
        self.on_error = on_error
        self.max_skipped = max_skipped
        self.distributed = distributed
        self.epoch = 0
        self.cache = FileCache(cache_size_bytes, Path(cache_dir) if cache_dir else None)
        self._source: Source = open_source(self.path, self.cache)
        self._num_skipped = 0
        self._stream_delivered = self._resume_at = 0
        self._grid = Grid(0, 1)
        self._is_agreed = False
        self.manifest = self._list_agreed()

    def __getstate__(self) -> dict[str, Any]:
        self.grid()  # a spawned loader worker has no process group to ask
        return self.__dict__.copy()

    def __len__(self) -> int:
        """Number of files, over all ranks."""
        return len(self.manifest)

    def grid(self) -> Grid:
        """This process's place among those that share the files."""
        if self.distributed and get_worker_info() is None:
            rank, world_size = grid_of_process()
            self._grid = Grid(rank, world_size)
        return self._grid

    def order(self, epoch: int) -> Order:
        """Which file is at which place of an epoch."""
        if not self.shuffle:
            return sequential(len(self.manifest))
        return shuffled(len(self.manifest), seed=self.seed, epoch=epoch)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next direct iteration. Not needed with `trainmount.data.DataLoader`,
        which counts.
        """
        self.epoch = epoch

    def agree(self) -> None:
        """Compare the listings of all ranks, once. Called by each rank.

        Raises:
            ManifestChanged: ranks see different files at `path`.
        """
        if not self.distributed or self._is_agreed or not is_distributed():
            return
        summaries = gather(lambda: self.manifest.summary())
        gather(lambda: self.manifest.check(summaries[0], f"{self.path}, as rank 0 sees it,"))
        self._is_agreed = True

    def fetch(self, indices: Sequence[int]) -> tuple[list[Any], list[str]]:
        """The items of these files of the manifest, and the paths of those that were skipped.

        Raises:
            MissingFile, DamagedFile: with `on_error="raise"`.
            TooManySkipped: this process has skipped more than `max_skipped`.
        """
        items: list[Any] = []
        skipped: list[str] = []
        for index in indices:
            entry = self.manifest[index]
            try:
                items.append(self._load(entry))
            except (MissingFile, DamagedFile) as error:
                if self.on_error == "raise":
                    raise
                skipped.append(entry.path)
                self._count_skipped(error)
        return items, skipped

    # Direct iteration

    def __iter__(self) -> Iterator[Any]:
        places = self._stream_places()
        order = self.order(self.epoch)
        # What was loaded counts once: an iteration that is left early begins anew.
        start, self._resume_at = self._resume_at, 0
        start = start if start < len(places) else 0
        self._stream_delivered = start
        used: list[Entry] = []
        for place in places[start:]:
            entry = self.manifest[order[place]]
            self.cache.hold([entry])
            items, _ = self.fetch([order[place]])
            # The item before is valid until here: its consumer has come back for the next one.
            self.cache.release(used)
            used = [entry]
            self._stream_delivered += 1
            yield from items
        self.cache.release(used)
        self._stream_delivered = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """The progress of this (rank, loader worker)'s stream in direct iteration. JSON-able."""
        rank, worker_id = self.grid().rank, _worker()[0]
        return {
            "version": _STREAM_STATE_VERSION,
            "delivered": self._stream_delivered,
            "rank": rank,
            "worker_id": worker_id,
            "epoch": self.epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Skip what this stream has delivered in the next direct iteration. Nothing skipped is
        read.

        Raises:
            StateMismatch: another version, a negative count, or another stream's state. It is a
                ValueError.
        """
        version, delivered = state_dict.get("version"), state_dict.get("delivered")
        if version != _STREAM_STATE_VERSION:
            raise StateMismatch(
                f"state of a stream must have version {_STREAM_STATE_VERSION}, got {version!r}"
            )
        if not isinstance(delivered, int) or delivered < 0:
            raise StateMismatch(f"delivered must be a number from 0, got {delivered!r}")
        stream = (self.grid().rank, _worker()[0])
        saved = (state_dict.get("rank"), state_dict.get("worker_id"))
        if saved != stream:
            raise StateMismatch(
                f"state is of rank {saved[0]}, worker {saved[1]}, "
                f"but this is rank {stream[0]}, worker {stream[1]}; "
                "use trainmount.data.DataLoader to continue on another grid"
            )
        self._stream_delivered = self._resume_at = delivered
        self.epoch = int(state_dict.get("epoch", self.epoch))

    # Private

    def _load(self, entry: Entry) -> Any:
        return self._source.read(entry) if self.item == "bytes" else self._source.path(entry)

    def _count_skipped(self, error: DataError) -> None:
        self._num_skipped += 1
        _log.warning("file skipped", extra={"reason": str(error), "num_skipped": self._num_skipped})
        if self._num_skipped > self.max_skipped:
            raise TooManySkipped(
                f"{self._num_skipped} files of {self.path} were skipped, "
                f"max_skipped is {self.max_skipped}; "
                f"the last: {error}"
            ) from error

    def _list_agreed(self) -> Manifest:
        matches = compile_pattern(self.pattern)

        def list_files() -> Manifest:
            manifest = Manifest(self._source.scan(matches))
            if len(manifest) == 0:
                raise DataError(f"{self.path}: no file matches {self.pattern!r}")
            return manifest

        if not self.distributed:
            manifest = list_files()
        else:
            self._is_agreed = is_distributed()
            manifest = from_first_rank(list_files)
        if self.item == "path" and self._source.needs_cache:
            self.cache.open()
        _log.info(
            "dataset listed",
            extra={
                "source": self._source.describe,
                "num_files": len(manifest),
                "fingerprint": manifest.fingerprint,
            },
        )
        return manifest

    def _stream_places(self) -> range:
        grid = self.grid()
        worker_id, num_workers = _worker()
        of_rank = range(grid.rank, len(self.manifest), grid.world_size)
        return of_rank[worker_id::num_workers]


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (info.id, info.num_workers) if info is not None else (0, 1)
