"""A directory of a volume that is not mounted as a place of checkpoints: files go up as parts from
the memory they are in, with no local copy.

Made by `stores.open_store`.
"""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO, Final, cast

from trainmount.checkpoint.stores import GivenUp, OpenFile
from trainmount.errors import CheckpointError, DamagedCheckpoint
from trainmount_files import open_volume
from trainmount_files.cancellation import LinkedEvent
from trainmount_files.errors import Cancelled, InexactRange, NotFound, VolumeError
from trainmount_files.transfer.parts import anonymous
from trainmount_files.transfer.reader import open_reader
from trainmount_files.transfer.workers import Workers, raise_first
from trainmount_files.transfer.writer import PART_REFUSALS, open_writer
from trainmount_files.volume import MIB, ByteRange, Upload, Volume, list_directory

__all__ = ["VolumeStore"]

_STREAMS: Final = 8
"""Parts that a rank sends at once."""

_AHEAD: Final = 2
"""Parts of a file that wait besides: one is being filled, one is next."""

_JOINED_BYTES: Final = 64 * MIB
"""Memory of all parts together that are joined of small pieces. Large ones are sent from where they
are.
"""

_END_SECONDS: Final = 30.0
"""Threads of a file that was given up end at once; this only bounds the wait for them."""


class VolumeStore:
    """Implements `CheckpointStore`. No request is sent before the first use."""

    num_readers = 8

    def __init__(self, url: str) -> None:
        self._url = url
        self._volume: Volume = open_volume(url)

    @property
    def location(self) -> str:
        return self._url

    def names(self, directory: str) -> list[str]:
        with self._told():
            try:
                return sorted(stat.name for stat in list_directory(self._volume, directory))
            except NotFound:
                return []

    def make_directory(self, directory: str) -> None:
        """Nothing: the store makes parents with the files."""

    def piece_bytes(self, file_bytes: int) -> int:
        can = self._volume.capabilities
        least = -(-file_bytes // can.max_parts)
        if least <= can.part_bytes:
            return can.part_bytes
        return min(-(-least // MIB) * MIB, can.max_part_bytes)

    def write(
        self,
        name: str,
        pieces: Iterable[memoryview],
        stop: threading.Event,
        *,
        num_writers: int,
        is_synced: bool,  # noqa: ARG002 - what the store has is durable
    ) -> None:
        with self._told():
            can = self._volume.capabilities
            parallelism = 1 if can.parts_in_order else max(1, _STREAMS // num_writers)
            joined_bytes = _JOINED_BYTES // (num_writers * (parallelism + _AHEAD))
            parts = _parts(pieces, can.min_part_bytes, max(joined_bytes, can.min_part_bytes))
            _NewFile(self._volume, name, stop, parallelism).send(parts)

    def publish(self, name: str, data: bytes) -> None:
        # Over whatever is there, so that a try whose answer was lost may be repeated.
        with self._told():
            self._volume.put(name, data, want_version=False)

    def size(self, name: str) -> int | None:
        with self._told():
            try:
                return self._volume.stat(name).size_bytes
            except NotFound:
                return None

    def sizes(self, directory: str) -> dict[str, int]:
        with self._told():
            try:
                entries = list_directory(self._volume, directory)
                return {one.name: one.size_bytes for one in entries if not one.is_directory}
            except NotFound:
                return {}

    def open(self, name: str) -> OpenFile:
        return _VolumeFile(self._volume, name, self._url)

    def stream(self, name: str) -> BinaryIO:
        try:
            return cast("BinaryIO", io.BufferedReader(open_reader(self._volume, name)))
        except NotFound as error:
            raise DamagedCheckpoint(f"{self._url}/{name} is missing") from error
        except VolumeError as error:
            raise CheckpointError(f"{self._url}: {error}") from error

    def remove_directory(self, directory: str, first: str) -> None:
        with self._told():
            for name in sorted(self.names(directory), key=lambda name: name != first):
                try:
                    self._volume.delete(f"{directory}/{name}")
                except NotFound:
                    continue
            try:
                self._volume.remove_directory(directory)
            except NotFound:
                return

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the volume as those of a checkpoint."""
        try:
            yield
        except Cancelled as error:
            raise GivenUp(f"{self._url}: {error}") from error
        except VolumeError as error:
            raise CheckpointError(f"{self._url}: {error}") from error


class _VolumeFile:
    """A file of a volume; implements `OpenFile`."""

    def __init__(self, volume: Volume, name: str, url: str) -> None:
        self._volume = volume
        self._name = name
        self._url = url

    def read_into(self, offset: int, target: memoryview, stop: threading.Event) -> None:
        wanted = ByteRange(offset, offset + len(target))
        where = f"{self._url}/{self._name}"
        try:
            if target:
                self._volume.read_into(self._name, wanted, target, cancel=stop)
        except NotFound as error:
            raise DamagedCheckpoint(f"{where} is missing") from error
        except InexactRange as error:
            raise DamagedCheckpoint(f"{where} is shorter than recorded: {error.reason}") from error
        except Cancelled as error:
            raise GivenUp(f"{where}: the load was given up") from error
        except VolumeError as error:
            raise CheckpointError(f"{self._url}: {error}") from error

    def close(self) -> None:
        """Nothing: requests are made one by one."""


class _NewFile:
    """A file on its way up. Used by one thread."""

    def __init__(self, volume: Volume, name: str, stop: threading.Event, parallelism: int) -> None:
        self._volume = volume
        self._name = name
        self._stop = LinkedEvent(stop)
        self._parallelism = parallelism

    def send(self, parts: Iterator[memoryview]) -> None:
        """Store the file: by one request if it is one part."""
        # Over whatever is there: nobody else writes into this generation, and a request whose
        # answer was lost may be repeated.
        first, second = next(parts, memoryview(b"")), next(parts, None)
        limit = self._volume.capabilities.max_put_bytes
        if second is None and (limit is None or len(first) <= limit):
            self._volume.put(self._name, first, want_version=False)
            return
        rest = itertools.chain([] if second is None else [second], parts)
        upload: Upload | None = None
        try:
            upload = self._volume.start_upload(self._name, cancel=self._stop)
            # Alone: whether the store takes parts shows here.
            upload.put_part(1, first)
        except PART_REFUSALS:
            if upload is not None:
                upload.abort()
            self._gather(itertools.chain([first], rest))
            return
        except BaseException:
            if upload is not None:
                upload.abort()
            raise
        self._send_rest(upload, rest)

    def _send_rest(self, upload: Upload, parts: Iterable[memoryview]) -> None:
        workers = Workers(self._parallelism, "checkpoint-part")
        sending: set[Future[None]] = set()
        try:
            for number, part in enumerate(parts, start=2):
                sending.add(workers.submit(partial(upload.put_part, number, part)))
                if len(sending) >= self._parallelism:
                    done, sending = wait(sending, return_when=FIRST_COMPLETED)
                    raise_first(list(done))
            done, sending = wait(sending, return_when=FIRST_EXCEPTION)
            raise_first(list(done))
            upload.complete()
        except BaseException:
            self._stop.set()
            workers.close(_END_SECONDS)
            upload.abort()
            raise
        workers.close(_END_SECONDS)

    def _gather(self, parts: Iterable[memoryview]) -> None:
        """Where the store takes no parts: one request for all, gathered in a nameless file."""
        with open_writer(self._volume, self._name, cancel=self._stop) as writer:
            for part in parts:
                writer.write(part)


def _parts(pieces: Iterable[memoryview], least: int, joined_bytes: int) -> Iterator[memoryview]:
    """The same bytes in parts of at least `least` bytes, but for the last one.

    Pieces that are long enough are parts themselves; of others, `joined_bytes` are copied together.
    """
    joined = memoryview(b"")
    filled = 0
    for piece in pieces:
        while piece:
            needed = max(least - filled, 0)
            if filled == 0 and len(piece) >= least:
                yield piece
                break
            # Where the rest of the piece is a part itself, no more of it is copied than must be.
            can_leave = len(piece) - needed >= least
            count = needed if can_leave else min(len(piece), joined_bytes - filled)
            if not joined:
                joined = memoryview(anonymous(joined_bytes))
            joined[filled : filled + count] = piece[:count]
            piece = piece[count:]
            filled += count
            if can_leave or filled == joined_bytes:
                yield joined[:filled]
                joined, filled = memoryview(b""), 0
    if filled:
        yield joined[:filled]
