"""System calls behind `volume.py`: walking without following links, staging files, publishing,
errno to error.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from trainmount_files.errors import (
    AlreadyExists,
    Cancelled,
    DirectoryNotEmpty,
    InvalidRequest,
    IsADirectory,
    NoSpace,
    NotADirectory,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Unavailable,
    Unsupported,
    VolumeError,
)
from trainmount_files.paths import STAGING_NAME
from trainmount_files.volume import MIB, Buffer, FileStat, Progress

__all__ = [
    "COPY_BYTES",
    "StagedParts",
    "copy_from",
    "link_or_rename_exclusively",
    "new_staging_file",
    "open_directory",
    "open_parent",
    "open_staging",
    "os_errors",
    "write_all",
]

COPY_BYTES: Final = 4 * MIB
"""Bytes moved between two looks at the cancel event; also the memory of a copy."""

_ABANDONED_AFTER_SECONDS: Final = 7 * 86_400
"""A staging file that nobody has touched for this long belongs to a process that is gone."""

_RENAME_NOREPLACE: Final = 1

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_ERRORS: Final[dict[int, type[VolumeError]]] = {
    errno.ENOENT: NotFound,
    errno.EEXIST: AlreadyExists,
    errno.ENOTDIR: NotADirectory,
    # A symbolic link where a name was expected; links are not part of a volume.
    errno.ELOOP: NotFound,
    errno.EISDIR: IsADirectory,
    errno.ENOTEMPTY: DirectoryNotEmpty,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
    errno.ENAMETOOLONG: InvalidRequest,
    errno.EILSEQ: InvalidRequest,
    errno.EINVAL: InvalidRequest,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: QuotaExceeded,
}


@contextmanager
def os_errors(operation: str, path: str) -> Iterator[None]:
    """Turn an OSError inside into the tree of `errors.py`; what has no place there: Unavailable."""
    try:
        yield
    except OSError as error:
        kind = _ERRORS.get(error.errno or 0, Unavailable)
        raise kind(operation, path, (error.strerror or "failed").lower()) from error
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            operation, ascii(path)[1:-1], "the name cannot be encoded for the file system"
        ) from error


@contextmanager
def open_directory(root: Path, names: tuple[str, ...], *, make: bool = False) -> Iterator[int]:
    """Descriptor of the directory `names` below `root`, reached without following a link.

    With `make`, directories that are missing are made.
    """
    current = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=current)
            following = os.open(name, _DIRECTORY_FLAGS, dir_fd=current)
            os.close(current)
            current = following
        yield current
    finally:
        os.close(current)


@contextmanager
def open_parent(root: Path, names: tuple[str, ...]) -> Iterator[int]:
    """As `open_directory` for the parent of `names`; a file in between means that nothing is there.

    Raises:
        FileNotFoundError: a parent is missing or is a file, as the Files API has it.
    """
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(open_directory(root, names[:-1]))
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
        yield descriptor


def open_staging(root: Path) -> int:
    """Descriptor of the staging directory, made on first use and swept of what is abandoned; the
    caller closes it.
    """
    made = False
    try:
        (root / STAGING_NAME).mkdir(0o700)
        made = True
    except FileExistsError:
        pass
    descriptor = os.open(root / STAGING_NAME, _DIRECTORY_FLAGS)
    if not made:
        _sweep(descriptor)
    return descriptor


def _sweep(staging: int) -> None:
    limit = time.time() - _ABANDONED_AFTER_SECONDS
    for name in os.listdir(staging):
        with suppress(OSError):
            if os.stat(name, dir_fd=staging, follow_symlinks=False).st_mtime < limit:
                os.unlink(name, dir_fd=staging)


def new_staging_file(staging: int) -> tuple[str, int]:
    """Name and writable descriptor of a new file in the staging directory; the caller closes and
    removes it.
    """
    name = uuid.uuid4().hex
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # 0o666 less the umask, as any program's file: the volume has no modes of its own.
    return name, os.open(name, flags, 0o666, dir_fd=staging)


def write_all(descriptor: int, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view[:COPY_BYTES]) :]


def copy_from(
    source: int,
    size_bytes: int,
    destination: int,
    *,
    path: str,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """Append the first `size_bytes` bytes of `source`, read by position, to `destination`.

    Raises:
        InvalidRequest: the source ends before.
    """
    offset = 0
    while offset < size_bytes:
        if cancel is not None and cancel.is_set():
            raise Cancelled("upload", path, "cancelled")
        data = os.pread(source, min(COPY_BYTES, size_bytes - offset), offset)
        if not data:
            raise InvalidRequest(
                "upload", path, f"the source ended after {offset} of {size_bytes} bytes"
            )
        write_all(destination, data)
        offset += len(data)
        if progress is not None:
            progress(len(data))


def link_or_rename_exclusively(
    source: str, source_directory: int, destination: str, destination_directory: int
) -> None:
    """Give a file its name only where that name is free, in one step; `source` may remain.

    Raises:
        FileExistsError: something has the name.
    """
    try:
        os.link(
            source,
            destination,
            src_dir_fd=source_directory,
            dst_dir_fd=destination_directory,
            follow_symlinks=False,
        )
    except OSError as error:
        # FAT, some network file systems and protected_hardlinks refuse links.
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        _rename_exclusively(source, source_directory, destination, destination_directory)


def _rename_exclusively(
    source: str, source_directory: int, destination: str, destination_directory: int
) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    result = library.renameat2(
        source_directory,
        os.fsencode(source),
        destination_directory,
        os.fsencode(destination),
        ctypes.c_uint(_RENAME_NOREPLACE),
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), destination)


class StagedParts:
    """A file of a directory volume in the making: one staging file a part; implements `Upload`.

    Parts may come in any order and any size, so they are joined by `complete`: into the first
    part's file, which costs nothing where there is only one.
    """

    def __init__(
        self,
        path: str,
        staging: int,
        publish: Callable[[str], FileStat],
        cancel: threading.Event | None = None,
    ) -> None:
        """Owns the descriptor `staging`; `publish` gives a staged file its name."""
        self._path = path
        self._staging = staging
        self._publish = publish
        self._cancel = cancel
        # part number -> staging file; guarded by the lock, as is `_open`.
        self._parts: dict[int, str] = {}
        self._open = True
        self._lock = threading.Lock()

    def put_part(self, part_number: int, data: Buffer) -> None:
        if part_number < 1:
            raise InvalidRequest("upload", self._path, "part numbers begin at 1")
        self._check_cancelled()
        with self._lock:
            self._check_open()
            # A descriptor of our own: `abort` in another thread may close the shared one.
            staging = os.dup(self._staging)
        name = ""
        try:
            with os_errors("upload", self._path):
                name, descriptor = new_staging_file(staging)
                try:
                    write_all(descriptor, data)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            with self._lock:
                self._check_open()
                name, replaced = self._parts.get(part_number, ""), name
                self._parts[part_number] = replaced
        finally:
            if name:
                with suppress(OSError):
                    os.unlink(name, dir_fd=staging)
            os.close(staging)

    def complete(self) -> FileStat:
        self._check_cancelled()
        with self._lock:
            self._check_open()
            try:
                with os_errors("upload", self._path):
                    return self._publish(self._joined())
            finally:
                self._discard()

    def abort(self) -> None:
        with self._lock:
            if self._open:
                self._discard()

    def _joined(self) -> str:
        """Name of the staging file that holds all parts in the order of their numbers."""
        if not self._parts:
            self._parts[1], descriptor = new_staging_file(self._staging)
            os.close(descriptor)
        first, *others = (self._parts[number] for number in sorted(self._parts))
        if not others:
            return first
        target = os.open(first, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, dir_fd=self._staging)
        try:
            for other in others:
                source = os.open(other, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._staging)
                try:
                    size = os.fstat(source).st_size
                    copy_from(source, size, target, path=self._path, cancel=self._cancel)
                finally:
                    os.close(source)
                # The disk never holds the file twice.
                os.unlink(other, dir_fd=self._staging)
            os.fsync(target)
        finally:
            os.close(target)
        return first

    def _discard(self) -> None:
        self._open = False
        for name in self._parts.values():
            with suppress(OSError):
                os.unlink(name, dir_fd=self._staging)
        self._parts.clear()
        os.close(self._staging)

    def _check_cancelled(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled("upload", self._path, "cancelled")

    def _check_open(self) -> None:
        if not self._open:
            raise Unsupported("upload", self._path, "the upload is complete or aborted")
