"""What `open` returns: binary files over the readers and writers of `transfer`, with the attributes
that users of fsspec expect, and errors of the operating system.

A file that is being written appears when it is closed. What ends it by an exception leaves the path
as it was; fsspec's own wrappers, which close a file whatever has happened, included.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final

from trainmount_files.filesystem.os_errors import as_os_errors
from trainmount_files.transfer import VolumeReader, VolumeWriter

__all__ = ["CompressedFile", "ReadFile", "TextFile", "WriteFile", "sized_buffer"]

_LINE_BYTES: Final = 256 << 10
"""Of the buffer from which lines and other small reads come; larger reads pass it by."""

_FRAMES: Final = 6
"""Calls between a `close` and the `__exit__` that led to it, through the wrappers of fsspec, pandas
and pyarrow.
"""


class ReadFile(io.BufferedReader):
    """One version of a file. Used by one thread at a time; may be pickled and forked.

    Raises OSError with ESTALE where the file has changed since it was opened.
    """

    def __init__(
        self, fs: Any, path: str, reader: VolumeReader, details: dict[str, Any], block_size: int
    ) -> None:
        super().__init__(_RawReader(path, reader), buffer_size=_LINE_BYTES)
        self.fs = fs
        self.path = path
        self.blocksize = block_size
        self.details = details

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _reopen, (self.fs, self.path, self.blocksize, self.details, self.tell())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}>"

    @property
    def size(self) -> int:
        return int(self.details["size"])

    @property
    def full_name(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def info(self) -> dict[str, Any]:
        """The file as it was when it was opened."""
        return self.details

    def readuntil(self, char: bytes = b"\n", blocks: int | None = None) -> bytes:
        """The bytes up to and including `char`, or to the end; read in pieces of `blocks`."""
        if char == b"\n":
            return self.readline()
        found = bytearray()
        start = self.tell()
        while piece := self.read(blocks or _LINE_BYTES):
            seen = max(len(found) - len(char) + 1, 0)
            found += piece
            at = found.find(char, seen)
            if at >= 0:
                del found[at + len(char) :]
                self.seek(start + len(found))
                break
        return bytes(found)


def _reopen(
    fs: Any, path: str, block_size: int, details: dict[str, Any], position: int
) -> ReadFile:
    file: ReadFile = fs.open(path, "rb", block_size=block_size, details=details)
    file.seek(position)
    return file


class _RawReader(io.RawIOBase):
    """A reader that raises OSErrors."""

    mode = "rb"

    def __init__(self, path: str, reader: VolumeReader) -> None:
        super().__init__()
        self.name = path
        self._reader = reader

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._reader.seek(offset, whence)

    def tell(self) -> int:
        return self._reader.tell()

    def readinto(self, buffer: Any, /) -> int:
        with as_os_errors(self.name):
            return self._reader.readinto(buffer)

    def readall(self) -> bytes:
        size = max(self._reader.stat.size_bytes - self._reader.tell(), 0)
        buffer = sized_buffer(size)
        with buffer.getbuffer() as target:
            self.readinto(target)
        return buffer.getvalue()

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()


def sized_buffer(size: int) -> io.BytesIO:
    """A buffer of that many bytes, to be filled in place: `getvalue` of it copies nothing."""
    buffer = io.BytesIO()
    if size:
        buffer.seek(size - 1)
        buffer.write(b"\0")
    return buffer


class WriteFile(io.BufferedIOBase):
    """A file in the making. Used by one thread at a time.

    `close` publishes it, or in a transaction `commit`, after which it is at the path; `discard`
    leaves the path as it was, and so does leaving a `with` block by an exception, of this file or
    of what wraps it. A file that is forgotten is not stored, which is logged.
    """

    mode = "wb"

    def __init__(self, fs: Any, path: str, writer: VolumeWriter, *, autocommit: bool) -> None:
        super().__init__()
        self.fs = fs
        self.path = path
        self.autocommit = autocommit
        self._writer = writer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}>"

    def __del__(self) -> None:
        # The writer says so and gives up, unless a transaction still holds it. The base would
        # close, and so publish what an exception has cut short.
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        self.close()

    @property
    def full_name(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._writer.tell()

    def write(self, data: Any, /) -> int:
        """Take all of `data`; may wait for the store."""
        if self.closed:
            raise ValueError("write to a closed file")
        with as_os_errors(self.path):
            return self._writer.write(data)

    def flush(self) -> None:
        """Nothing: what is not closed cannot be seen."""

    def close(self) -> None:
        """Publish the file, or leave that to the transaction that it was opened in.

        Called by the `__exit__` of a wrapper while an exception leaves its block, it discards.
        """
        if self.closed:
            return
        try:
            if _is_unwinding():
                self.discard()
            elif self.autocommit:
                self.commit()
        finally:
            super().close()

    def commit(self) -> None:
        """Publish the file; safe to repeat."""
        try:
            with as_os_errors(self.path):
                self._writer.close()
        finally:
            self.fs.invalidate_cache(self.path)

    def discard(self) -> None:
        """Leave the path as it was; safe to repeat and after a commit, which stays."""
        self._writer.abort()
        super().close()


class TextFile(io.TextIOWrapper):
    """Text over one of our binary files."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            _discard(self.buffer)
        self.close()

    def __del__(self) -> None:
        # As of a binary file: what was forgotten is not stored. What was closed may be a
        # transaction's.
        with suppress(ValueError):
            if not self.closed:
                _discard(self.buffer)


class CompressedFile(io.BufferedIOBase):
    """A compressor with the file that it writes to; the compressors themselves leave that open."""

    mode = "wb"

    def __init__(self, compressor: Any, file: WriteFile) -> None:
        super().__init__()
        self._compressor = compressor
        self._file = file

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        if not self.closed:
            self.discard()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return int(self._compressor.write(data))

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._compressor.close()
            self._file.close()
        except BaseException:
            self._file.discard()
            raise
        finally:
            super().close()

    def discard(self) -> None:
        """Leave the path as it was; safe to repeat and after `close`."""
        self._file.discard()
        # It still has bytes for a file that takes no more.
        with suppress(ValueError):
            self._compressor.close()
        super().close()


def _discard(file: Any) -> None:
    if isinstance(file, WriteFile | CompressedFile):
        file.discard()


def _is_unwinding() -> bool:
    """Whether the caller's caller was called, not far above, by an `__exit__` that was told of the
    exception which is being handled.

    fsspec's and pandas' own context managers close the file without a word of what happened.
    """
    error = sys.exc_info()[1]
    # The caller may have been called by no Python at all.
    frame: FrameType | None = sys._getframe(1).f_back
    for _ in range(_FRAMES):
        if error is None or frame is None:
            return False
        if frame.f_code.co_name == "__exit__":
            told = frame.f_locals.values()
            return any(
                value is error or (isinstance(value, tuple) and any(v is error for v in value))
                for value in told
            )
        frame = frame.f_back
    return False
