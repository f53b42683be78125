"""A file from parts on a store that takes none: one plain object as long as it fits in one, chunks
from then on. Made by `volume.py`.

    put_part -> a temporary file        while all parts together fit in one object
             -> a generation            after that, each part an object; first those of the file

The disk holds at most one object's worth for each upload.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from typing import BinaryIO, Final

from trainmount_files.chunks.generation import Chunks, Generation
from trainmount_files.chunks.manifest import MAX_PARTS
from trainmount_files.errors import Cancelled, TooLarge, Unsupported, local_errors
from trainmount_files.retry import Cancellation
from trainmount_files.transfer.local_files import write_at
from trainmount_files.volume import MIB, Buffer, FileStat

__all__ = ["ChunkedUpload"]

_COPY_BYTES: Final = 8 * MIB

StorePlain = Callable[[BinaryIO, int], FileStat]
"""Stores the first bytes of a file as a plain object."""


class ChunkedUpload:
    """A file in the making; implements `Upload`. Parts from any thread; `complete` and `abort` from
    one.
    """

    def __init__(
        self,
        chunks: Chunks,
        generation: Generation,
        store_plain: StorePlain,
        *,
        max_object_bytes: int,
        overwrite: bool,
        cancel: Cancellation | None,
    ) -> None:
        self._chunks = chunks
        self._generation = generation
        self._path = generation.path
        self._store_plain = store_plain
        self._max_object_bytes = max_object_bytes
        self._overwrite = overwrite
        self._cancel = cancel
        # All guarded by the lock, but for the bytes of the file.
        self._lock = threading.Lock()
        self._calls = 0
        self._is_open = True
        self._is_chunked = False
        self._spool: BinaryIO | None = None
        self._spooled_end = 0
        # part number -> (order of the call, offset, bytes) of parts in the temporary file.
        self._spooled: dict[int, tuple[int, int, int]] = {}

    def __repr__(self) -> str:
        return f"ChunkedUpload({self._path!r})"

    def put_part(self, part_number: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if not 1 <= part_number <= MAX_PARTS:
            reason = f"part {part_number} is not among the 1 to {MAX_PARTS} parts of a file"
            raise TooLarge("upload", self._path, reason)
        if len(view) > self._max_object_bytes:
            reason = f"a part may have {self._max_object_bytes} bytes, this one has {len(view)}"
            raise TooLarge("upload", self._path, reason)
        with self._lock:
            self._check_open()
            self._calls += 1
            order = self._calls
            is_spooled = not self._is_chunked and self._spool_part(part_number, view, order)
            if is_spooled:
                return
            self._is_chunked = True
            # Replaced before it was moved.
            self._spooled.pop(part_number, None)
        self._generation.put(part_number, view, order)
        self._move_spooled()

    def complete(self) -> FileStat:
        with self._lock:
            self._check_open()
        if self._is_chunked:
            self._move_spooled()
            result = self._chunks.publish(self._generation, overwrite=self._overwrite)
        else:
            with local_errors("upload", self._path):
                result = self._complete_plain()
        with self._lock:
            self._is_open = False
            self._free()
        return result

    def abort(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._free()
        if self._is_chunked:
            self._chunks.discard(self._generation)

    def _spool_part(self, part_number: int, data: memoryview, order: int) -> bool:
        """Write a part to the temporary file; False where it is not one object any more."""
        others = sum(s for n, (_, _, s) in self._spooled.items() if n != part_number)
        if others + len(data) > self._max_object_bytes:
            return False
        try:
            if self._spool is None:
                self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_free`
            write_at(self._spool.fileno(), data, self._spooled_end)
        except OSError:
            # No room here; there is at the store.
            return False
        self._spooled[part_number] = (order, self._spooled_end, len(data))
        self._spooled_end += len(data)
        return True

    def _move_spooled(self) -> None:
        """Store what was kept here so far, each part as a chunk. Threads share the work."""
        while True:
            with self._lock:
                self._check_open()
                if not self._spooled or self._spool is None:
                    return
                number, (order, offset, size) = self._spooled.popitem()
                try:
                    with local_errors("upload", self._path):
                        data = _read_at(self._spool.fileno(), offset, size)
                except BaseException:
                    self._spooled[number] = (order, offset, size)
                    raise
            try:
                self._generation.put(number, data, order)
            except BaseException:
                with self._lock:
                    # For the next try; a repeat of the part that came since is newer.
                    self._spooled.setdefault(number, (order, offset, size))
                raise

    def _complete_plain(self) -> FileStat:
        size = sum(size for _, _, size in self._spooled.values())
        parts = [self._spooled[number][1:] for number in sorted(self._spooled)]
        if self._spool is not None and _is_in_order(parts, self._spooled_end):
            return self._store_plain(self._spool, size)
        with tempfile.TemporaryFile() as ordered:
            if self._spool is not None:
                for offset, length in parts:
                    _copy(self._spool.fileno(), offset, length, ordered.fileno())
            return self._store_plain(ordered, size)

    def _check_open(self) -> None:
        if not self._is_open:
            raise Unsupported("upload", self._path, "the upload is complete or aborted")
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled("upload", self._path, "cancelled")

    def _free(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool = None
        self._spooled.clear()


def _is_in_order(parts: list[tuple[int, int]], end: int) -> bool:
    """Whether (offset, bytes) follow each other from 0 to `end`."""
    position = 0
    for offset, size in parts:
        if offset != position:
            return False
        position += size
    return position == end


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += os.pread(descriptor, size - len(data), offset + len(data))
    return bytes(data)


def _copy(source: int, offset: int, size: int, target: int) -> None:
    while size:
        copied = os.sendfile(target, source, offset, min(size, _COPY_BYTES))
        offset += copied
        size -= copied
