"""`file://`: a directory as a volume. For laptops, tests, and whatever else is mounted as a file
system (NFS).

A file is written under a name of its own in a hidden staging directory of the same file system and
then renamed or linked to its place, so that readers see the old content or the new one. Names are
resolved one by one with `O_NOFOLLOW`, relative to the directory's descriptor: a symbolic link,
whenever it appears, never leads out of the root. What is neither a regular file nor a directory is
not part of the volume.
"""

from __future__ import annotations

import os
import stat as stat_module
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from trainmount_files.directory.io import (
    COPY_BYTES,
    StagedParts,
    copy_from,
    link_or_rename_exclusively,
    new_staging_file,
    open_directory,
    open_parent,
    open_staging,
    os_errors,
    write_all,
)
from trainmount_files.errors import (
    AlreadyExists,
    Cancelled,
    InexactRange,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotFound,
    PreconditionFailed,
)
from trainmount_files.paths import STAGING_NAME, join, split
from trainmount_files.per_process import PerProcess
from trainmount_files.volume import (
    Buffer,
    ByteRange,
    Capabilities,
    FileStat,
    Page,
    Progress,
    Upload,
)

__all__ = ["DirectoryVolume"]

_CAPABILITIES: Final = Capabilities(
    atomic_rename=True, exclusive_create=True, min_part_bytes=1, copies_parts=True
)

_PAGE_ENTRIES: Final = 1000
"""As the Files API, so that whoever reads page by page meets pages here too."""

_SNAPSHOTS: Final = 4
"""Sorted listings kept between pages: without them, a directory of n pages would be scanned n
times.
"""

_PUBLISH_ATTEMPTS: Final = 5
"""A parent may be removed between making it and the rename into it; then it is made again."""


class DirectoryVolume:
    """A directory as a volume; implements `trainmount_files.volume.Volume`.

    A version is size, modification time in nanoseconds and inode number: each publish makes a new
    inode, so that two writes within one tick of the file system's clock differ too.
    """

    def __init__(self, root: Path) -> None:
        """Raises NotFound or NotADirectory where `root` is no directory. A link at `root` itself is
        followed, once.
        """
        self._root = root.resolve()
        if not self._root.exists():
            raise NotFound("open", str(root), "no such directory")
        if not self._root.is_dir():
            raise NotADirectory("open", str(root), "must be a directory")
        self._closed = False
        self._snapshots = PerProcess(_Snapshots)

    def __repr__(self) -> str:
        return f"DirectoryVolume({str(self._root)!r})"

    def __reduce__(self) -> tuple[type[DirectoryVolume], tuple[Path]]:
        return DirectoryVolume, (self._root,)

    @property
    def url(self) -> str:
        return self._root.as_uri()

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def stat(self, path: str) -> FileStat:
        names = self._names("stat", path)
        with os_errors("stat", path):
            if not names:
                return _to_stat("stat", path, self._root.stat())
            with open_parent(self._root, names) as parent:
                return _stat_at("stat", path, names[-1], parent)

    def list_page(self, path: str, page_token: str | None = None) -> Page:
        names = self._names("list", path)
        with os_errors("list", path), open_directory(self._root, names) as directory:
            snapshot = self._sorted_names(path, directory, is_root=not names)
            start = 0 if page_token is None else _index_after(snapshot, page_token)
            chosen = snapshot[start : start + _PAGE_ENTRIES]
            entries: list[FileStat] = []
            for name in chosen:
                # Gone since the scan, or no file and no directory.
                with suppress(NotFound, FileNotFoundError):
                    entries.append(_stat_at("list", join(path, name), name, directory))
            more = start + _PAGE_ENTRIES < len(snapshot)
            return Page(tuple(entries), chosen[-1] if more else None)

    def read_into(
        self,
        path: str,
        byte_range: ByteRange,
        buffer: bytearray | memoryview,
        *,
        version: str | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        target = memoryview(buffer).cast("B")
        if len(target) < len(byte_range):
            raise ValueError(f"buffer of {len(target)} bytes is shorter than {byte_range}")
        with os_errors("read", path):
            descriptor = self._open_file("read", path)
            try:
                before = _to_stat("read", path, os.fstat(descriptor))
                if version is not None and before.version != version:
                    raise PreconditionFailed("read", path, "the file has changed")
                if byte_range.end > before.size_bytes:
                    raise InexactRange("read", path, "the range reaches past the end of the file")
                _read_exactly(descriptor, path, byte_range, target, cancel)
                # Whoever writes in place, past this class, must not slip in between.
                after = _to_stat("read", path, os.fstat(descriptor))
                if version is not None and after.version != version:
                    raise PreconditionFailed("read", path, "the file changed while it was read")
            finally:
                os.close(descriptor)

    def put(
        self, path: str, data: Buffer, *, overwrite: bool = True, want_version: bool = True
    ) -> FileStat:
        # The version is at hand.
        del want_version
        return self._write(
            "put", path, lambda descriptor: write_all(descriptor, data), overwrite=overwrite
        )

    def upload(
        self,
        path: str,
        source: BinaryIO,
        size_bytes: int,
        *,
        overwrite: bool = True,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
        want_version: bool = True,
    ) -> FileStat:
        del want_version

        def write(descriptor: int) -> None:
            copy_from(
                source.fileno(),
                size_bytes,
                descriptor,
                path=path,
                progress=progress,
                cancel=cancel,
            )

        return self._write("upload", path, write, overwrite=overwrite)

    def start_upload(
        self, path: str, *, overwrite: bool = True, cancel: threading.Event | None = None
    ) -> Upload:
        names = self._file_names("upload", path)
        if not overwrite:
            # Early word; the race is settled by `complete`.
            with suppress(NotFound):
                self.stat(path)
                raise AlreadyExists("upload", path, "something is at the path")
        with os_errors("upload", path):
            staging = open_staging(self._root)

        def publish(staged: str) -> FileStat:
            return self._publish("upload", path, names, staging, staged, overwrite=overwrite)

        return StagedParts(path, staging, publish, cancel)

    def delete(self, path: str) -> None:
        names = self._file_names("delete", path)
        with os_errors("delete", path), open_parent(self._root, names) as parent:
            if _stat_at("delete", path, names[-1], parent).is_directory:
                raise IsADirectory("delete", path, "is a directory")
            os.unlink(names[-1], dir_fd=parent)
            os.fsync(parent)

    def rename(self, source: str, destination: str) -> FileStat:
        old = self._file_names("rename", source)
        new = self._file_names("rename", destination)
        with os_errors("rename", source), open_parent(self._root, old) as old_parent:
            if _stat_at("rename", source, old[-1], old_parent).is_directory:
                raise IsADirectory("rename", source, "is a directory")
            with (
                os_errors("rename", destination),
                open_directory(self._root, new[:-1], make=True) as new_parent,
            ):
                os.rename(old[-1], new[-1], src_dir_fd=old_parent, dst_dir_fd=new_parent)
                os.fsync(new_parent)
                os.fsync(old_parent)
                return _stat_at("rename", destination, new[-1], new_parent)

    def make_directory(self, path: str) -> None:
        names = self._names("make directory", path)
        try:
            with os_errors("make directory", path), open_directory(self._root, names, make=True):
                return
        except NotADirectory:
            with suppress(NotADirectory, NotFound):
                self.stat(path)
                raise AlreadyExists("make directory", path, "a file is at the path") from None
            raise

    def remove_directory(self, path: str) -> None:
        names = self._names("remove directory", path)
        if not names:
            raise InvalidRequest("remove directory", path, "the volume's root cannot be removed")
        with os_errors("remove directory", path), open_parent(self._root, names) as parent:
            _stat_at("remove directory", path, names[-1], parent)
            os.rmdir(names[-1], dir_fd=parent)

    def close(self) -> None:
        self._closed = True

    def _names(self, operation: str, path: str) -> tuple[str, ...]:
        if self._closed:
            raise ValueError(f"{operation} on a closed volume")
        names = split(operation, path)
        if names and names[0] == STAGING_NAME:
            raise InvalidRequest(operation, path, f"the name {STAGING_NAME} is reserved")
        return names

    def _file_names(self, operation: str, path: str) -> tuple[str, ...]:
        names = self._names(operation, path)
        if not names:
            raise IsADirectory(operation, path, "is the volume's root")
        return names

    def _open_file(self, operation: str, path: str) -> int:
        """A descriptor of a regular file; whoever calls closes it."""
        names = self._file_names(operation, path)
        with open_parent(self._root, names) as parent:
            # A fifo or device must not block or act on open: look before, and do not wait.
            found = _stat_at(operation, path, names[-1], parent)
            if found.is_directory:
                raise IsADirectory(operation, path, "is a directory")
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            return os.open(names[-1], flags, dir_fd=parent)

    def _write(
        self, operation: str, path: str, write: Callable[[int], None], *, overwrite: bool
    ) -> FileStat:
        names = self._file_names(operation, path)
        with os_errors(operation, path):
            staging = open_staging(self._root)
            try:
                staged, descriptor = new_staging_file(staging)
                try:
                    try:
                        write(descriptor)
                        os.fsync(descriptor)
                    finally:
                        os.close(descriptor)
                    return self._publish(
                        operation, path, names, staging, staged, overwrite=overwrite
                    )
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(staged, dir_fd=staging)
            finally:
                os.close(staging)

    def _publish(
        self,
        operation: str,
        path: str,
        names: tuple[str, ...],
        staging: int,
        staged: str,
        *,
        overwrite: bool,
    ) -> FileStat:
        """Give the file `staged` of the staging directory its name in one step."""
        with os_errors(operation, path):
            # Taken before, since the file may be replaced at once by somebody else.
            result = _to_stat(operation, path, os.stat(staged, dir_fd=staging))
            for attempt in range(1, _PUBLISH_ATTEMPTS + 1):
                with open_directory(self._root, names[:-1], make=True) as parent:
                    try:
                        if overwrite:
                            os.rename(staged, names[-1], src_dir_fd=staging, dst_dir_fd=parent)
                        else:
                            link_or_rename_exclusively(staged, staging, names[-1], parent)
                    except FileNotFoundError:
                        if attempt == _PUBLISH_ATTEMPTS:
                            raise
                        continue
                    os.fsync(parent)
                    return result
        raise AssertionError("the loop ends by return or raise")

    def _sorted_names(self, path: str, directory: int, *, is_root: bool) -> list[str]:
        """Names in the directory in byte order; from the last scan while the directory did not
        change.
        """
        status = os.fstat(directory)
        state = (status.st_ino, status.st_mtime_ns)
        snapshots = self._snapshots.get()
        kept = snapshots.get(path, state)
        if kept is not None:
            return kept
        names = sorted(os.listdir(directory), key=os.fsencode)
        if is_root:
            names = [name for name in names if name != STAGING_NAME]
        if len(names) > _PAGE_ENTRIES:
            snapshots.keep(path, state, names)
        return names


class _Snapshots:
    """The last sorted listings of long directories. Any thread may call."""

    def __init__(self) -> None:
        # path -> (inode and mtime of the directory, sorted names); guarded by the lock.
        self._by_path: OrderedDict[str, tuple[tuple[int, int], list[str]]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str, state: tuple[int, int]) -> list[str] | None:
        """The names of `path`, unless the directory has changed since."""
        with self._lock:
            kept = self._by_path.get(path)
            return kept[1] if kept is not None and kept[0] == state else None

    def keep(self, path: str, state: tuple[int, int], names: list[str]) -> None:
        with self._lock:
            self._by_path[path] = (state, names)
            self._by_path.move_to_end(path)
            while len(self._by_path) > _SNAPSHOTS:
                self._by_path.popitem(last=False)


def _to_stat(operation: str, path: str, status: os.stat_result) -> FileStat:
    if stat_module.S_ISDIR(status.st_mode):
        return FileStat(path, is_directory=True, mtime_ns=status.st_mtime_ns)
    if not stat_module.S_ISREG(status.st_mode):
        raise NotFound(operation, path, "is neither a file nor a directory")
    version = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"
    return FileStat(
        path,
        is_directory=False,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        version=version,
    )


def _stat_at(operation: str, path: str, name: str, parent: int) -> FileStat:
    return _to_stat(operation, path, os.stat(name, dir_fd=parent, follow_symlinks=False))


def _index_after(names: list[str], token: str) -> int:
    """Index of the first name after `token` in byte order; the token's own name may be gone."""
    key = os.fsencode(token)
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        if os.fsencode(names[middle]) <= key:
            low = middle + 1
        else:
            high = middle
    return low


def _read_exactly(
    descriptor: int,
    path: str,
    byte_range: ByteRange,
    target: memoryview,
    cancel: threading.Event | None,
) -> None:
    done = 0
    while done < len(byte_range):
        if cancel is not None and cancel.is_set():
            raise Cancelled("read", path, "cancelled")
        wanted = min(COPY_BYTES, len(byte_range) - done)
        got = os.preadv(descriptor, [target[done : done + wanted]], byte_range.start + done)
        if got == 0:
            raise InexactRange("read", path, "the file became shorter while it was read")
        done += got
