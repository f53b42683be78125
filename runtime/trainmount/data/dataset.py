"""The files of one directory as a dataset. Called by training programs and by `loader`.

Given to `trainmount.data.DataLoader`, it is read by position: the loader says which files make up a
batch, so that the job has one position that continues on any grid. Iterated directly, or by torch's
own DataLoader, it is a stream for each (rank, loader worker), every file in exactly one of them,
and `state_dict` is that stream's progress.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch.utils.data import IterableDataset, get_worker_info

from trainmount.data.cache import FileCache
from trainmount.data.items import Fetched, Item, Items, OnError
from trainmount.data.listing import Selection, list_files
from trainmount.data.manifest import Manifest
from trainmount.data.position import Grid
from trainmount.data.shuffle import Order, sequential, shuffled
from trainmount.data.sources import Source, open_source
from trainmount.distributed import from_first_rank, gather, grid_of_process, is_distributed
from trainmount.errors import DataError, StateMismatch

__all__ = ["UCVolumeDataset"]

_log = logging.getLogger(__name__)

_STREAM_STATE_VERSION: Final = 1
_DEFAULT_CACHE_BYTES: Final = 10 << 30
_DEFAULT_READ_AHEAD_BYTES: Final = 32 << 20
# Files that a direct iteration reads ahead at most.
_STREAM_AHEAD: Final = 16
_STREAMS: Final = itertools.count()


class UCVolumeDataset(IterableDataset[Any]):
    """Each file below `path` as a local path, as bytes or as an open file, in the order of the
    listing or shuffled by seed and epoch.

    Args:
        path: a directory on a mount or anywhere; `/Volumes/...` that is not mounted is read through
            the volume client (`describe` tells which).
        shuffle: a new order each epoch, a function of (seed, epoch) alone.
        seed: of the shuffle.
        pattern: glob over paths relative to `path`; `**/` is any depth. Hidden files and those that
            other systems leave beside data (`_SUCCESS`, `_delta_log`) are never read.
        files: instead of the pattern, the files themselves, in their order: paths relative to
            `path`, or a mapping of them to their sizes in bytes, which saves asking for these.
        checksums: of files, by their relative paths: `crc32:89abcdef`, `sha256:…`. A file with
            other bytes is damaged.
        manifest: a file that keeps the listing. Where it is there, nothing is listed; otherwise it
            is made. JSON lines with `path`, `size` and perhaps a checksum: `"sha256": "…"`.
        item: "path" gives a local path, valid until the next item (or batch) is asked for; "bytes"
            the content; "file" an open binary file.
        on_error: what a missing or damaged file does: "raise"; "skip" leaves it out, logged and
            counted; "quarantine" does that once, and then leaves the file out of all later epochs
            and resumed jobs without another look; "retry" reads a damaged one again, up to four
            times in 1.5 seconds, and then raises.
        max_skipped: more skipped files than this in one process, or more files than this in
            quarantine, are an error all the same.
        distributed: share the files among the ranks. All ranks then construct the dataset together,
            and rank 0 lists for all. False: this process reads all files by itself (an evaluation
            on one rank, say).
        cache_size_bytes: bound of the local copies where the volume is not mounted; 0 keeps none
            after its use.
        cache_dir: where these copies go, for all processes of this machine; default is a directory
            of the user below the system's temporary one.
        read_ahead_bytes: bound of what each loader worker reads of its next files while one is
            used; 0 reads none ahead.
    """

    def __init__(
        self,
        path: str,
        *,
        shuffle: bool = False,
        seed: int = 0,
        pattern: str = "**/*",
        item: Item = "path",
        on_error: OnError = "raise",
        max_skipped: int = 100,
        distributed: bool = True,
        cache_size_bytes: int = _DEFAULT_CACHE_BYTES,
        cache_dir: str | None = None,
        files: Sequence[str] | Mapping[str, int] | None = None,
        checksums: Mapping[str, str] | None = None,
        manifest: str | None = None,
        read_ahead_bytes: int = _DEFAULT_READ_AHEAD_BYTES,
    ) -> None:
        """List the directory; the listing is frozen from here on.

        Raises:
            ValueError: an argument is out of its range.
            DataError: the directory cannot be listed, no file matches, or one of `files` is not
                there.
        """
        super().__init__()
        for name, value, allowed in (
            ("item", item, ("path", "bytes", "file")),
            ("on_error", on_error, ("raise", "skip", "retry", "quarantine")),
        ):
            if value not in allowed:
                choice = ", ".join(map(repr, allowed[:-1])) + f" or {allowed[-1]!r}"
                raise ValueError(f"{name} must be {choice}, got {value!r}")
        if min(max_skipped, cache_size_bytes, read_ahead_bytes) < 0:
            raise ValueError(
                "max_skipped, cache_size_bytes and read_ahead_bytes must not be negative"
            )
        if files is not None and manifest is not None:
            raise ValueError("files and manifest both say what to read: give one of them")
        self.path = str(path)
        self.shuffle = shuffle
        self.seed = seed
        self.pattern = pattern
        self.item = item
        self.on_error = on_error
        self.max_skipped = max_skipped
        self.distributed = distributed
        self.epoch = 0
        self._cache = FileCache(cache_size_bytes, Path(cache_dir) if cache_dir else None)
        self._source: Source = open_source(self.path, self._cache)
        self._stream_start = self._stream_delivered = 0
        self._quarantined: dict[str, str] = {}
        self._grid = Grid(0, 1)
        self._is_agreed = False
        self.manifest = self._list_agreed(Selection(self.path, pattern, files, checksums, manifest))
        self._items = Items(
            self._source,
            self._cache,
            self.manifest,
            item=item,
            on_error=on_error,
            max_skipped=max_skipped,
            read_ahead_bytes=read_ahead_bytes,
        )

    def __getstate__(self) -> dict[str, Any]:
        self.grid()  # a spawned loader worker has no process group to ask
        return self.__dict__.copy()

    def __len__(self) -> int:
        """Number of files, over all ranks."""
        return len(self.manifest)

    def grid(self) -> Grid:
        """This process's place among those that share the files."""
        # A forked loader worker has its rank's process group, another one what was pickled for it.
        if self.distributed and (is_distributed() or get_worker_info() is None):
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

    @property
    def describe(self) -> str:
        """How the files are reached: by a mount, a directory, or the volume client."""
        return self._source.describe

    # For the loader, which says which files, in each of its workers

    def expect(self, indices: Iterable[int]) -> None:
        """These files of the manifest are going to be fetched next, after those that were expected
        before.
        """
        self._items.expect(indices)

    def fetch(self, indices: Sequence[int], group: str) -> Fetched:
        """These files of the manifest. `group` is of the iteration that they are for.

        Raises:
            MissingFile, DamagedFile: unless they are skipped.
            TooManySkipped: this process has skipped more than `max_skipped`.
        """
        return self._items.fetch(indices, group)

    def release(self, copies: Iterable[str]) -> None:
        """The items that these copies are of were used."""
        self._cache.release(copies)

    def abandon(self, group: str) -> None:
        """Nothing of that iteration is going to be used any more."""
        self._cache.abandon(group)

    def begin_epoch(self, quarantined: Collection[int]) -> None:
        """Another iteration begins in this process: what was expected is not fetched any more, nor
        are these files. Raises TooManySkipped where those are more than `max_skipped`.
        """
        self._items.begin_epoch(quarantined)

    def check_skipped(self, count: int, last: str) -> None:
        """Raises TooManySkipped where so many skipped files are more than `max_skipped`."""
        self._items.check_skipped(count, last)

    # Direct iteration

    def __iter__(self) -> Iterator[Any]:
        places = self._stream_places()
        order = self.order(self.epoch)
        start = self._stream_start if self._stream_start < len(places) else 0
        self._stream_start, self._stream_delivered = 0, start
        indices = (order[place] for place in places[start:])
        upcoming = deque(itertools.islice(indices, _STREAM_AHEAD))
        self.begin_epoch(self.manifest.numbers_of(self._quarantined))
        self.expect(upcoming)
        copies = self._copies_in_use()
        try:
            while upcoming:
                items, skipped, new = self.fetch([upcoming.popleft()], copies.group)
                if self.on_error == "quarantine":
                    self._quarantined.update(skipped)
                # The item before is valid until here: its consumer has come back for the next one.
                copies.replace(new)
                for index in itertools.islice(indices, 1):
                    upcoming.append(index)
                    self.expect([index])
                self._stream_delivered += 1
                yield from items
        finally:
            copies.end()
        self._stream_delivered = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """The progress of this (rank, loader worker)'s stream in direct iteration. JSON-able."""
        rank, worker_id = self.grid().rank, _worker()[0]
        known = {"quarantined": dict(self._quarantined)} if self._quarantined else {}
        return {
            "version": _STREAM_STATE_VERSION,
            "delivered": self._stream_delivered,
            "rank": rank,
            "worker_id": worker_id,
            "epoch": self.epoch,
            **known,
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
        self._stream_start = self._stream_delivered = delivered
        self.epoch = int(state_dict.get("epoch", self.epoch))
        if self.on_error == "quarantine":
            self._quarantined = dict(state_dict.get("quarantined", {}))

    # Private

    def _list_agreed(self, selection: Selection) -> Manifest:
        def list_here() -> Manifest:
            return list_files(self._source, selection)

        if not self.distributed:
            manifest = list_here()
        else:
            self._is_agreed = is_distributed()
            manifest = from_first_rank(list_here)
        if self._source.needs_cache and (self.item != "bytes" or self._cache.limit_bytes):
            self._open_cache()
        _log.info(
            "dataset listed",
            extra={
                "source": self._source.describe,
                "num_files": len(manifest),
                "fingerprint": manifest.fingerprint,
            },
        )
        return manifest

    def _open_cache(self) -> None:
        try:
            self._cache.open()
        except OSError as error:
            raise DataError(
                f"the local copies of {self.path} have no place: {error}; set cache_dir"
            ) from error

    def _copies_in_use(self) -> _CopiesInUse:
        info = get_worker_info()
        if info is None:
            return _CopiesInUse(self._cache, f"stream-{next(_STREAMS)}", keep_bytes=0)
        # torch's own loader prefetches, nobody knows how far: what a worker has handed out stays
        # while there is room.
        group = f"worker-{info.id}"
        self._cache.abandon(group)
        keep_bytes = self._cache.limit_bytes // info.num_workers
        return _CopiesInUse(self._cache, group, keep_bytes=keep_bytes)

    def _stream_places(self) -> range:
        grid = self.grid()
        worker_id, num_workers = _worker()
        of_rank = range(grid.rank, len(self.manifest), grid.world_size)
        return of_rank[worker_id::num_workers]


class _CopiesInUse:
    """The copies that a stream has handed out and that may still be read."""

    def __init__(self, cache: FileCache, group: str, *, keep_bytes: int) -> None:
        self.group = group
        self._cache = cache
        self._keep_bytes = keep_bytes
        self._copies: deque[tuple[str, int]] = deque()
        self._num_bytes = 0

    def replace(self, copies: list[str]) -> None:
        """Hand these out; those before go, the oldest first, as far as they exceed the bound."""
        while self._copies and self._num_bytes >= self._keep_bytes:
            copy, size_bytes = self._copies.popleft()
            self._num_bytes -= size_bytes
            self._cache.release([copy])
        for copy in copies:
            size_bytes = os.stat(copy).st_size  # noqa: PTH116 - once a sample
            self._copies.append((copy, size_bytes))
            self._num_bytes += size_bytes

    def end(self) -> None:
        """The stream has ended. What its consumer has prefetched stays until the next begins."""
        if not self._keep_bytes:
            self._cache.abandon(self.group)


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (info.id, info.num_workers) if info is not None else (0, 1)
