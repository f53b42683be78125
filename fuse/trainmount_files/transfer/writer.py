"""A file of a volume from a stream whose length nobody knows yet. Called by `upload.py`, fsspec and
whoever writes as it computes.

    write -> Part, filled -> one thread of `Workers` -> Upload.put_part
    close -> what is left: one `put` where nothing was sent yet, else the last part and `complete`

A writer that is idle holds one part; one that is ahead of its store holds as many as its share of
the memory, then `write` waits.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import weakref
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Any, Final

from trainmount_files.cancellation import LinkedEvent
from trainmount_files.ending import close_files_at_end
from trainmount_files.errors import (
    Cancelled,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    TooLarge,
    Unsupported,
    local_errors,
)
from trainmount_files.transfer.budget import MemoryBudget, shared_budget
from trainmount_files.transfer.parts import Part, PartSizes
from trainmount_files.transfer.spool import Spool
from trainmount_files.transfer.workers import Workers
from trainmount_files.volume import FileStat, Progress, Upload, Volume

__all__ = ["PART_REFUSALS", "VolumeWriter", "open_writer"]

_LOG: Final = logging.getLogger(__name__)

PART_REFUSALS: Final = (InvalidRequest, NotFound, PermissionDenied, Unsupported)
"""What a store that takes no parts says to the first; one request then tells the truth."""

_END_SECONDS: Final = 30.0
"""Threads of a stream that was given up end at once; this only bounds the wait for them."""

_POLL_SECONDS: Final = 0.1


def open_writer(
    volume: Volume,
    path: str,
    *,
    overwrite: bool = True,
    part_bytes: int | None = None,
    parallelism: int = 4,
    size_bytes: int | None = None,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> VolumeWriter:
    """A writable binary file whose `close` publishes it at `path`.

    `part_bytes` is the size of the first parts; without it a stream takes at most 24 MiB of memory,
    and all streams of the process together 80 MiB beyond the first part of each. `size_bytes` is a
    hint.
    """
    if parallelism < 1:
        raise ValueError(f"parallelism must be at least 1, got {parallelism}")
    if volume.capabilities.parts_in_order:
        parallelism = 1
    sizes = PartSizes.of(
        volume.capabilities, part_bytes=part_bytes, parallelism=parallelism, size_bytes=size_bytes
    )
    return VolumeWriter(
        volume,
        path,
        sizes,
        overwrite=overwrite,
        parallelism=parallelism,
        progress=progress,
        cancel=cancel,
    )


class VolumeWriter(io.RawIOBase):
    """A file in the making, see `open_writer`. Used by one thread at a time.

    Leaving a `with` block by an exception, or `abort`, leaves the path as it was, and so does a
    writer that is forgotten, which is logged. After a failed `write` the file cannot be finished.
    """

    def __init__(
        self,
        volume: Volume,
        path: str,
        sizes: PartSizes,
        *,
        overwrite: bool,
        parallelism: int,
        progress: Progress | None,
        cancel: threading.Event | None,
    ) -> None:
        super().__init__()
        self._volume = volume
        self._path = path
        self._pid = os.getpid()
        self._sizes = sizes
        self._overwrite = overwrite
        self._parallelism = parallelism
        self._progress = progress
        self._stop = LinkedEvent(cancel)
        self._budget: MemoryBudget = shared_budget()
        self._workers = Workers(parallelism, "trainmount-upload")
        self._part: Part | None = None
        # Parts on their way, oldest first.
        self._sending: deque[tuple[Future[None], Part]] = deque()
        # Stored, and kept for the next part: fresh memory costs as much as the copy into it.
        self._spare: Part | None = None
        self._sent_parts = 0
        # Where the store takes no parts.
        self._spool: Spool | None = None
        self._position = 0
        self._upload: Upload | None = None
        self._failure: BaseException | None = None
        self._stored: FileStat | None = None
        _OPEN.add(self)

    def __repr__(self) -> str:
        return f"VolumeWriter({self._path!r})"

    def __del__(self) -> None:
        # Not `close`, which would publish half of a file that an exception has cut short.
        if hasattr(self, "_stored"):
            self._give_up()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @property
    def stored(self) -> FileStat:
        """The file at the path, after `close`."""
        if self._stored is None:
            raise ValueError("nothing is stored")
        return self._stored

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def write(self, data: Any, /) -> int:
        """Take all of `data`, a buffer of bytes; may wait for the store.

        Raises:
            ValueError: the file is closed.
            VolumeError: an earlier part could not be stored, and the file never will be.
        """
        self._check_open()
        view = memoryview(data).cast("B")
        total = len(view)
        try:
            while view:
                if self._part is not None and self._part.is_full:
                    # Only now that more is to come: the last part goes with `close`.
                    self._send_part()
                if self._part is None:
                    self._part = self._new_part()
                view = view[self._part.fill(view) :]
        except BaseException as error:
            self._fail(error)
            raise
        self._position += total
        return total

    def close(self) -> None:
        """Publish the file. Returns when it is at the path.

        Raises:
            VolumeError: it is not; the path is as it was.
        """
        if self.closed:
            return
        try:
            self._check_failed()
            self._finish()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._end()

    def abort(self) -> None:
        """Give up and leave the path as it was; safe to repeat and after `close`."""
        if self.closed:
            return
        self._fail(Cancelled("upload", self._path, "the file was given up"))
        self._end()

    def _give_up(self) -> None:
        """Abort a file that nobody will close any more, and say so."""
        if self.closed:
            return
        if os.getpid() != self._pid:
            # A copy in a forked child: the file is the parent's.
            super().close()
            return
        _LOG.warning(
            "%s was being written and never closed; nothing of it is stored",
            self._path,
            extra={"path": self._path},
        )
        self.abort()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("write to a closed file")
        self._check_failed()

    def _check_failed(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._stop.is_set():
            raise Cancelled("upload", self._path, "cancelled")

    def _finish(self) -> None:
        part = self._part
        if self._spool is not None:
            if part is not None:
                self._send_part()
            self._stored = self._volume.upload(
                self._path,
                self._spool.file,
                self._spool.size_bytes,
                overwrite=self._overwrite,
                progress=self._progress,
                cancel=self._stop,
            )
            return
        if self._upload is None:
            data = part.content() if part is not None else memoryview(b"")
            limit = self._volume.capabilities.max_put_bytes
            if limit is None or len(data) <= limit:
                self._stored = self._volume.put(self._path, data, overwrite=self._overwrite)
                if self._progress is not None:
                    self._progress(len(data))
                return
        self._send_part()
        if self._upload is None:
            # The store has just refused a first part that is larger than one request may be.
            self._finish()
            return
        while self._sending:
            self._reap()
        self._stored = self._upload.complete()

    def _new_part(self) -> Part:
        """The next part, as soon as there is memory for it."""
        number = self._sent_parts + 1
        if number > self._sizes.max_parts:
            reason = (
                f"a stream may have {self._sizes.total_bytes} bytes in {self._sizes.max_parts} "
                "parts here; larger first parts (part_bytes) or the size (size_bytes) allow more"
            )
            raise TooLarge("upload", self._path, reason)
        size = self._sizes.size_of(number)
        memory = Part.memory_of(size)
        # One more is being filled than is on its way.
        while len(self._sending) >= self._parallelism:
            self._reap()
        while True:
            spare, self._spare = self._spare, None
            if spare is not None and spare.size_bytes == size:
                spare.filled = 0
                return spare
            if spare is not None:
                spare.free()
            if not self._sending:
                # The first may always be taken; more than that only while the process has room.
                self._budget.take(memory)
                return self._allocate(size)
            if self._budget.take_nowait(memory):
                return self._allocate(size)
            self._reap()

    def _allocate(self, size_bytes: int) -> Part:
        try:
            with local_errors("upload", self._path):
                return Part(size_bytes, self._budget)
        except BaseException:
            self._budget.give_back(Part.memory_of(size_bytes))
            raise

    def _send_part(self) -> None:
        """Hand the current part to a thread."""
        part = self._part
        assert part is not None
        self._part = None
        if self._spool is not None:
            self._keep(part)
            return
        if self._upload is None:
            self._begin(part)
            return
        self._sent_parts += 1
        number = self._sent_parts
        # Not a method of ours: a writer that is forgotten while it sends must be seen to be.
        upload, report = self._upload, self._progress
        sending = self._workers.submit(lambda: _send(upload, number, part, report))
        self._sending.append((sending, part))

    def _begin(self, part: Part) -> None:
        """Store the first part, alone: whether the store takes parts shows here.

        Where it takes none (storage behind a firewall) the stream is gathered in a nameless file
        and goes in one request.
        """
        try:
            self._upload = self._volume.start_upload(
                self._path, overwrite=self._overwrite, cancel=self._stop
            )
            _send(self._upload, 1, part, self._progress)
        except PART_REFUSALS as refusal:
            if self._upload is not None:
                self._upload.abort()
                self._upload = None
            self._spool = Spool(self._path, self._volume.capabilities.max_put_bytes, refusal)
            self._keep(part)
            return
        except BaseException:
            part.free()
            raise
        self._sent_parts = 1
        self._spare = part

    def _keep(self, part: Part) -> None:
        assert self._spool is not None
        try:
            self._spool.append(part.content())
        finally:
            part.free()

    def _reap(self) -> None:
        """Wait until one part more is stored; raise what it failed with."""
        while not any(future.done() for future, _ in self._sending):
            if self._stop.is_set():
                raise Cancelled("upload", self._path, "cancelled")
            wait([future for future, _ in self._sending], _POLL_SECONDS, FIRST_COMPLETED)
        for entry in [entry for entry in self._sending if entry[0].done()]:
            entry[0].result()
            self._sending.remove(entry)
            if self._spare is not None:
                self._spare.free()
            self._spare = entry[1]

    def _fail(self, error: BaseException) -> None:
        """Stop what is under way and free what the store has of it."""
        if self._failure is not None:
            return
        self._failure = error
        self._stop.set()
        self._workers.close(_END_SECONDS)
        # Now, since a program may keep the error, and the error the writer.
        self._free()
        if self._upload is not None:
            self._upload.abort()

    def _end(self) -> None:
        self._workers.close(_END_SECONDS)
        self._free()
        _OPEN.discard(self)
        super().close()

    def _free(self) -> None:
        """Give back what the file stands in."""
        for part in (*(part for _, part in self._sending), self._part, self._spare):
            if part is not None:
                part.free()
        self._sending.clear()
        self._part = self._spare = None
        if self._spool is not None:
            self._spool.close()


def _send(upload: Upload, number: int, part: Part, report: Progress | None) -> None:
    upload.put_part(number, part.content())
    if report is not None:
        report(part.filled)


_OPEN: Final[weakref.WeakSet[VolumeWriter]] = weakref.WeakSet()
"""Writers that are neither closed nor aborted."""


def _report_open_writers() -> None:
    """At the interpreter's end: what was never closed is not stored, and nobody else would say."""
    for writer in list(_OPEN):
        writer._give_up()


close_files_at_end(_report_open_writers)
