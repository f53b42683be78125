"""An upload of numbered parts into a bucket. Made by `BucketVolume.start_upload`.

obstore writes an object's parts in their order and cannot replace one. So parts wait here until
they are next: in memory up to a bound, the rest in a temporary file that has no name. The last
`held_back_bytes` stay here even where they are next, so that a part that is put a second time
replaces the first; once at the store, a part can be repeated but not changed.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from trainmount_files.bucket.writing import ObjectWriter, Writing, whole_bytes
from trainmount_files.errors import Cancelled, InvalidRequest, LocalError, Unsupported
from trainmount_files.volume import Buffer, FileStat

__all__ = ["BucketUpload"]


@dataclass(frozen=True, slots=True)
class _Spilled:
    """Where a part is in the temporary file."""

    offset: int
    size_bytes: int


class BucketUpload:
    """A file of a bucket in the making; implements `trainmount_files.volume.Upload`.

    Memory: a part more than `held_back_bytes` where parts come in their order, than `window_bytes`
    where they do not, and what an `ObjectWriter` holds. Parts that are ahead of their turn by more
    are on the local disk until then.
    """

    def __init__(
        self,
        writing: Writing,
        path: str,
        *,
        overwrite: bool,
        cancel: threading.Event | None,
        to_stat: Callable[[int, str], FileStat],
    ) -> None:
        """`to_stat` finds out what a finished file of that size and ETag is."""
        self._writing = writing
        self._path = path
        self._overwrite = overwrite
        self._stop = _Stop(cancel)
        self._to_stat = to_stat
        # Held while parts go to the store; guards all that follows.
        self._lock = threading.Lock()
        self._is_open = True
        self._waiting: dict[int, bytes | _Spilled] = {}
        self._memory_bytes = 0
        self._next = 1
        # Against a caller's mistake, not against somebody who looks for two parts that agree.
        self._digests: dict[int, bytes] = {}
        self._writer: ObjectWriter | None = None
        self._spill: BinaryIO | None = None
        self._spill_bytes = 0

    def put_part(self, part_number: int, data: Buffer) -> None:
        """Raises also: Unsupported: other bytes for a part that is at the store already;
        LocalError: the temporary file cannot be written.
        """
        if part_number < 1:
            raise InvalidRequest("upload", self._path, "part numbers begin at 1")
        self._check_cancelled()
        options = self._writing.options
        with self._lock:
            self._check_open()
            # A copy, as the caller may use its buffer again at once; by one thread at a time, so
            # that those that wait for their turn hold none.
            copied = whole_bytes(data)
            if part_number < self._next:
                self._check_repeated(part_number, copied)
                return
            self._forget(part_number)
            self._waiting[part_number] = copied
            self._memory_bytes += len(copied)
            while self._memory_bytes > options.held_back_bytes and self._next in self._waiting:
                self._send(self._next)
            if self._memory_bytes > options.window_bytes and part_number in self._waiting:
                self._spill_part(part_number, copied)

    def complete(self) -> FileStat:
        self._check_cancelled()
        with self._lock:
            self._check_open()
            self._is_open = False
            try:
                return self._to_stat(*self._finish())
            except BaseException:
                if self._writer is not None:
                    self._writer.abort()
                raise
            finally:
                self._discard()

    def abort(self) -> None:
        # Ends what another thread is waiting for.
        self._stop.set()
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            if self._writer is not None:
                self._writer.abort()
            self._discard()

    def _finish(self) -> tuple[int, str]:
        """Size and ETag, the latter empty where the file was of several parts."""
        options = self._writing.options
        is_small = self._memory_bytes <= (
            options.part_size_bytes if self._overwrite else options.window_bytes
        )
        if self._writer is None and is_small and self._spill is None:
            data = b"".join(self._read(number) for number in sorted(self._waiting))
            etag = self._writing.put(
                "upload", self._path, data, overwrite=self._overwrite, cancel=self._stop
            )
            return len(data), etag
        for number in sorted(self._waiting):
            self._send(number)
        assert self._writer is not None
        self._writer.finish()
        return self._writer.written_bytes, ""

    def _send(self, part_number: int) -> None:
        data = self._read(part_number)
        if self._writer is None:
            part_bytes = max(self._writing.options.part_size_bytes, len(data))
            self._writer = self._writing.writer(
                "upload",
                self._path,
                part_bytes=part_bytes,
                overwrite=self._overwrite,
                cancel=self._stop,
            )
        self._writer.write(data)
        self._digests[part_number] = _digest(data)
        self._forget(part_number)
        self._next = part_number + 1

    def _read(self, part_number: int) -> bytes:
        part = self._waiting[part_number]
        if isinstance(part, bytes):
            return part
        assert self._spill is not None
        try:
            self._spill.seek(part.offset)
            return self._spill.read(part.size_bytes)
        except OSError as error:
            raise LocalError("upload", self._path, _told(error)) from error

    def _spill_part(self, part_number: int, data: bytes) -> None:
        try:
            if self._spill is None:
                self._spill = tempfile.TemporaryFile(prefix="trainmount-")  # noqa: SIM115
            self._spill.seek(self._spill_bytes)
            self._spill.write(data)
            self._spill.flush()
        except OSError as error:
            self._forget(part_number)
            raise LocalError("upload", self._path, _told(error)) from error
        self._forget(part_number)
        self._waiting[part_number] = _Spilled(self._spill_bytes, len(data))
        self._spill_bytes += len(data)

    def _forget(self, part_number: int) -> None:
        part = self._waiting.pop(part_number, None)
        if isinstance(part, bytes):
            self._memory_bytes -= len(part)

    def _check_repeated(self, part_number: int, data: bytes) -> None:
        if self._digests.get(part_number) != _digest(data):
            raise Unsupported(
                "upload",
                self._path,
                f"part {part_number} is at the store and cannot be replaced by other bytes",
            )

    def _discard(self) -> None:
        self._waiting.clear()
        self._memory_bytes = 0
        if self._spill is not None:
            with suppress(OSError):
                self._spill.close()
            self._spill = None

    def _check_cancelled(self) -> None:
        if self._stop.is_cancelled:
            raise Cancelled("upload", self._path, "cancelled")

    def _check_open(self) -> None:
        if not self._is_open:
            raise Unsupported("upload", self._path, "the upload is complete or aborted")


class _Stop:
    """Set by the caller's event, or by `abort`."""

    def __init__(self, cancel: threading.Event | None) -> None:
        self._cancel = cancel
        self._aborted = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        return self._cancel is not None and self._cancel.is_set()

    def set(self) -> None:
        self._aborted.set()

    def is_set(self) -> bool:
        return self._aborted.is_set() or self.is_cancelled

    def wait(self, timeout: float | None = None) -> bool:
        return self._aborted.wait(timeout) or self.is_cancelled


def _digest(data: bytes) -> bytes:
    # Late, as obstore is: who lacks the extra is told its name by then.
    import xxhash

    return xxhash.xxh3_128_digest(data)


def _told(error: OSError) -> str:
    return f"the temporary file for parts: {(error.strerror or 'failed').lower()}"
