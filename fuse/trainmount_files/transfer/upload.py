"""From a file or a stream of this machine to a file of a volume. Called by the command line, fsspec
and the tree copies.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
from pathlib import Path
from typing import Final, Protocol

from trainmount_files.errors import Cancelled, InvalidRequest, local_errors
from trainmount_files.transfer.writer import open_writer
from trainmount_files.volume import MIB, FileStat, Progress, Volume

__all__ = ["Readable", "upload_file", "upload_stream"]

_PUT_BYTES: Final = MIB // 4
"""Files up to this size are read into memory and stored by one request."""

_READ_BYTES: Final = MIB


class Readable(Protocol):
    """What an unsized stream can do: a pipe, a socket's file, a decompressor."""

    def read(self, size: int = -1, /) -> bytes | None:
        """At most `size` bytes; empty at the end."""
        ...


def upload_file(
    volume: Volume,
    source: str | os.PathLike[str],
    path: str,
    *,
    overwrite: bool = True,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
    want_version: bool = True,
) -> FileStat:
    """Store a local file, of the size it has when it is opened.

    The path shows its old content, or nothing, until the whole file is there. Bytes that are
    appended meanwhile are not part of it; a file that is deleted meanwhile is stored whole.
    `want_version` as in `Volume.put`.

    Raises:
        AlreadyExists: `overwrite=False` and something is at the path.
        LocalError: the source cannot be read, or is no regular file.
        InvalidRequest: the source has become shorter.
        TooLarge: above a limit of the store.
        Cancelled: `cancel` was set.
    """
    place = Path(source)
    with local_errors("upload", path, place):
        file = _open_regular(place)
    with file:
        if cancel is not None and cancel.is_set():
            raise Cancelled("upload", path, "cancelled")
        size = os.fstat(file.fileno()).st_size
        largest = volume.capabilities.max_put_bytes
        if size > _PUT_BYTES or (largest is not None and size > largest):
            return volume.upload(
                path,
                file,
                size,
                overwrite=overwrite,
                progress=progress,
                cancel=cancel,
                want_version=want_version,
            )
        with local_errors("upload", path, place):
            data = os.pread(file.fileno(), size, 0)
        if len(data) < size:
            raise InvalidRequest("upload", path, f"the source has fewer than {size} bytes")
        stored = volume.put(path, data, overwrite=overwrite, want_version=want_version)
    if progress is not None:
        progress(size)
    return stored


def _open_regular(source: Path) -> io.FileIO:
    # A fifo must not block the open.
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a directory")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is no regular file")
        return io.FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def upload_stream(
    volume: Volume,
    path: str,
    stream: Readable,
    *,
    size_bytes: int | None = None,
    overwrite: bool = True,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> FileStat:
    """Store what can be read from `stream` until its end, or `size_bytes` bytes of it.

    Memory is bounded whatever the size; `size_bytes` lets the parts be of equal size from the
    start. Nothing is at the path, or its old content, until the whole of it is there.

    Raises:
        InvalidRequest: the stream ended before `size_bytes`.
        AlreadyExists: `overwrite=False` and something is at the path.
        TooLarge: more than a file may have.
        Cancelled: `cancel` was set.
    """
    with open_writer(
        volume,
        path,
        overwrite=overwrite,
        size_bytes=size_bytes,
        progress=progress,
        cancel=cancel,
    ) as writer:
        left = size_bytes
        while left is None or left:
            data = stream.read(_READ_BYTES if left is None else min(left, _READ_BYTES))
            if data is None:
                raise InvalidRequest("upload", path, "the stream must block until it has bytes")
            if not data:
                break
            writer.write(data)
            if left is not None:
                left -= len(data)
        if left:
            reason = f"the stream ended {left} bytes before its {size_bytes}"
            raise InvalidRequest("upload", path, reason)
    return writer.stored
