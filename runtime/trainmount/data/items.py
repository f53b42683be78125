"""From numbers of files to what a training program gets: read ahead, retried, skipped, released.

Called by `dataset`, in the main process and in each loader worker, which has a copy of its own.
"""

from __future__ import annotations

import io
import logging
import random
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from trainmount.data.cache import FileCache
from trainmount.data.manifest import Manifest
from trainmount.data.read_ahead import ReadAhead
from trainmount.data.sources import Source
from trainmount.errors import DamagedFile, DataError, MissingFile, TooManySkipped

__all__ = ["DataFile", "Fetched", "Item", "Items", "OnError"]

_log = logging.getLogger(__name__)

Item = Literal["path", "bytes", "file"]
OnError = Literal["raise", "skip", "retry", "quarantine"]

# 1.5 seconds: longer troubles than that are outlasted below, by the mount or the volume client.
_PAUSES_SECONDS: Final = (0.1, 0.2, 0.4, 0.8)


class DataFile(io.BufferedReader):
    """A file, open to be read. Where it goes to another process it is closed here and opened there,
    at its beginning.
    """

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path))
        self._path = path

    def __reduce__(self) -> tuple[type[DataFile], tuple[str]]:
        self.close()
        return DataFile, (self._path,)

    def __del__(self) -> None:
        # A sample that is dropped is no leak to be warned of.
        self.close()


class Fetched(NamedTuple):
    """Some files."""

    items: list[Any]
    """In the order in which they were asked for, without those that were left out."""
    skipped: dict[str, str]
    """Those that are missing or damaged, by their paths, and why."""
    copies: list[str]
    """What has to be released once the items are used; none where nothing is copied."""


class Items:
    """The files of one source by their numbers. For one thread."""

    def __init__(
        self,
        source: Source,
        cache: FileCache,
        manifest: Manifest,
        *,
        item: Item,
        on_error: OnError,
        max_skipped: int,
        read_ahead_bytes: int,
    ) -> None:
        self._loading = _Loading(source, cache, manifest, item, retries=on_error == "retry")
        self._item = item
        self._on_error = on_error
        self._max_skipped = max_skipped
        self._read_ahead_bytes = read_ahead_bytes
        self._num_skipped = 0
        self._quarantined: Collection[int] = ()
        self._ahead: ReadAhead[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None}

    def expect(self, numbers: Iterable[int]) -> None:
        """These are going to be fetched next, after those that were expected before."""
        self._reader().expect(number for number in numbers if number not in self._quarantined)

    def fetch(self, numbers: Sequence[int], group: str) -> Fetched:
        """These files but for those in quarantine. Their copies are of that group of the cache.

        Raises:
            MissingFile, DamagedFile: unless they are skipped.
            TooManySkipped: this process has skipped more than `max_skipped`, or more are in
                quarantine.
            DataError: the source cannot be reached, or the disk is full.
        """
        fetched = Fetched([], {}, [])
        reader, has_copies = self._reader(), self._loading.has_copies
        for number in numbers:
            if number in self._quarantined:
                continue
            try:
                loaded = reader.take(number)
                if has_copies:
                    loaded = self._loading.cache.hand_out(loaded, group)
                    fetched.copies.append(loaded)
                fetched.items.append(self._open(loaded) if self._item == "file" else loaded)
            except (MissingFile, DamagedFile) as error:
                if self._on_error not in ("skip", "quarantine"):
                    raise
                fetched.skipped[self._loading.manifest[number].path] = str(error)
                self._num_skipped += 1
                _log.warning(
                    "file skipped",
                    extra={"reason": str(error), "num_skipped": self._num_skipped},
                )
                self.check_skipped(self._num_skipped, str(error))
        return fetched

    def check_skipped(self, count: int, last: str = "") -> None:
        """Raises TooManySkipped where so many are more than `max_skipped`."""
        if count > self._max_skipped:
            raise TooManySkipped(
                f"{count} files of {self._loading.source.describe} were skipped, "
                f"max_skipped is {self._max_skipped}" + (f"; the last: {last}" if last else "")
            )

    def begin_epoch(self, quarantined: Collection[int]) -> None:
        """What was expected before is not going to be fetched, and these files are left alone.

        Raises:
            TooManySkipped: they are more than `max_skipped`.
        """
        self._quarantined = quarantined
        if self._on_error == "quarantine":
            self._num_skipped = len(quarantined)
            self.check_skipped(self._num_skipped)
        if self._ahead is not None and self._ahead.is_of_this_process:
            self._ahead.forget()
        self._loading.cache.begin_epoch()

    # Private

    def _reader(self) -> ReadAhead[Any]:
        if self._ahead is None or not self._ahead.is_of_this_process:
            loading = self._loading
            self._ahead = ReadAhead(
                loading.load,
                loading.manifest.size_bytes_of,
                loading.discard,
                limit_bytes=self._read_ahead_bytes,
                is_always_slow=loading.source.needs_cache and self._read_ahead_bytes > 0,
            )
        return self._ahead

    def _open(self, path: str) -> DataFile:
        try:
            return DataFile(path)
        except FileNotFoundError as error:
            raise MissingFile(
                f"{path} was listed and is gone; restore it, or pass on_error='skip'"
            ) from error


@dataclass(frozen=True)
class _Loading:
    """One file after another, in any thread. An object of its own: in a cycle with who reads ahead
    the local copies would stay until the garbage is collected.
    """

    source: Source
    cache: FileCache
    manifest: Manifest
    item: Item
    retries: bool = field(kw_only=True)

    @property
    def has_copies(self) -> bool:
        return self.item != "bytes" and self.source.needs_cache

    def load(self, number: int, reads: bool) -> Any:
        """The content, or a path; `reads` as of `Source.path`."""
        if self.retries:
            for pause_seconds in _PAUSES_SECONDS:
                try:
                    return self._load(number, reads)
                except MissingFile:
                    raise
                except DataError as error:
                    _log.warning("file is read again", extra={"reason": str(error)})
                time.sleep(pause_seconds * random.uniform(0.5, 1.0))
        return self._load(number, reads)

    def _load(self, number: int, reads: bool) -> Any:
        entry = self.manifest[number]
        if self.item == "bytes":
            return self.source.read(entry)
        return self.source.path(entry, reads=reads)

    def discard(self, loaded: Any) -> None:
        """What was loaded is not going to be used."""
        if self.has_copies:
            self.cache.release([loaded])
