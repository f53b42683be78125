"""The directory that is served: files, directories and volumes as the API's verbs see them.

Blocking; the routes call it in worker threads. Only `resolution` turns names into descriptors.
Errors are `ApiError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainmount_files.server.errors import (
    ApiError,
    already_exists,
    directory_not_found,
    file_not_found,
    invalid,
)
from trainmount_files.server.paths import VolumePath
from trainmount_files.server.resolution import open_directory, open_regular, stat_regular
from trainmount_files.server.settings import parse_volume_name
from trainmount_files.server.staging import Staging, Temporary

__all__ = ["DirectoryStore", "Entry", "FileInfo"]

_VOLUME_DEPTH = 3


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A regular file at one moment."""

    size_bytes: int
    mtime_ns: int

    @property
    def mtime_seconds(self) -> int:
        """Cut, not rounded: what `Last-Modified` can say."""
        return self.mtime_ns // 1_000_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing; `file` is None for a directory."""

    name: str
    file: FileInfo | None


class DirectoryStore:
    """A directory of `catalog/schema/volume` trees. Any thread."""

    def __init__(self, directory: Path, staging: Staging) -> None:
        self._root_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._staging = staging

    def close(self) -> None:
        os.close(self._root_fd)

    # Volumes

    def create_volume(self, name: str) -> None:
        """Make the directory of `catalog.schema.volume`; one that is there is fine."""
        with open_directory(self._root_fd, parse_volume_name(name), create_from=0):
            pass

    def list_objects(self, *parents: str) -> list[str]:
        """Sorted names of catalogs, of a catalog's schemas or of a schema's volumes. Raises
        ApiError.
        """
        try:
            with open_directory(self._root_fd, parents) as fd, os.scandir(fd) as entries:
                return sorted(
                    entry.name
                    for entry in entries
                    if "." not in entry.name and entry.is_dir(follow_symlinks=False)
                )
        except (FileNotFoundError, NotADirectoryError):
            kind = ("metastore", "Catalog", "Schema")[len(parents)]
            name = ".".join(parents)
            code = f"{kind.upper()}_DOES_NOT_EXIST"
            raise ApiError(404, code, f"{kind} '{name}' does not exist.") from None

    def require_volume(self, path: VolumePath) -> None:
        """Raises ApiError unless the volume of `path` exists."""
        try:
            with open_directory(self._root_fd, path.all_names[:_VOLUME_DEPTH]):
                return
        except (FileNotFoundError, NotADirectoryError):
            name = ".".join(path.all_names[:_VOLUME_DEPTH])
            raise ApiError(404, "NOT_FOUND", f"Volume '{name}' does not exist.") from None

    # Files

    def open_file(self, path: VolumePath, *, cached: bool = False) -> tuple[int, FileInfo]:
        """A descriptor, which the caller closes, and what it is open on. For `cached` see
        `Api.run_cached`.
        """
        with self._parent(path, file_not_found(str(path)), cached=cached) as fd:
            file_fd = open_regular(fd, path.names[-1], cached=cached)
        return file_fd, _info(os.fstat(file_fd))

    def stat_file(self, path: VolumePath, *, cached: bool = False) -> FileInfo:
        with self._parent(path, file_not_found(str(path)), cached=cached) as fd:
            return _info(stat_regular(fd, path.names[-1], cached=cached))

    def delete_file(self, path: VolumePath) -> None:
        with self._parent(path, file_not_found(str(path))) as fd:
            status = os.stat(path.names[-1], dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(path.names[-1])
            os.unlink(path.names[-1], dir_fd=fd)
            self._staging.sync(fd)

    def exists(self, path: VolumePath) -> bool:
        """Whether anything at all is at `path`."""
        try:
            with self._parent(path, file_not_found(str(path))) as fd:
                os.stat(path.names[-1], dir_fd=fd, follow_symlinks=False)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def publish(self, temporary: Temporary, path: VolumePath, *, overwrite: bool) -> None:
        """Give a finished file its name in one step, parents included; the name shows the old file
        or all of the new.

        Raises:
            ApiError: 409 for `overwrite=False` over anything, 400 over a directory or below a file.
        """
        if path.is_root:
            raise invalid(f"The path of a file must be below a volume: {path}")
        self.require_volume(path)
        # The time of publishing, not of writing: a version that is seen later never has the earlier
        # time, on which the guard of `If-Unmodified-Since` stands.
        os.utime(temporary.fd)
        self._staging.sync(temporary.fd)
        with self._new_parent(path) as fd:
            self._link(temporary, fd, path, overwrite=overwrite)
            self._staging.sync(fd)

    def _link(self, temporary: Temporary, fd: int, path: VolumePath, *, overwrite: bool) -> None:
        name = path.names[-1]
        places = {"src_dir_fd": temporary.directory_fd, "dst_dir_fd": fd}
        try:
            if overwrite:
                os.replace(temporary.name, name, **places)  # noqa: PTH105  by descriptors
            else:
                # A link fails on an existing name, whoever made it and however close the race.
                os.link(temporary.name, name, **places, follow_symlinks=False)
        except FileExistsError:
            raise already_exists(str(path)) from None
        except IsADirectoryError:
            raise invalid(
                f"A directory is at the path: {path}", reason="FILES_API_PATH_IS_DIRECTORY"
            ) from None
        except OSError as error:
            raise _name_error(error, path) from error

    # Directories

    def is_directory(self, path: VolumePath, *, cached: bool = False) -> bool:
        try:
            with open_directory(self._root_fd, path.all_names, cached=cached):
                return True
        except (FileNotFoundError, NotADirectoryError):
            if cached:
                raise
            return False
        except OSError as error:
            raise _name_error(error, path) from error

    def make_directory(self, path: VolumePath) -> None:
        """Make it and its parents; one that is there is fine."""
        self.require_volume(path)
        try:
            with open_directory(self._root_fd, path.all_names, create_from=_VOLUME_DEPTH) as fd:
                self._staging.sync(fd)
        except NotADirectoryError:
            raise already_exists(str(path)) from None
        except OSError as error:
            raise _name_error(error, path) from error

    def remove_directory(self, path: VolumePath) -> None:
        if path.is_root:
            raise invalid(f"A volume cannot be removed by the Files API: {path}")
        with self._parent(path, directory_not_found(str(path))) as fd:
            try:
                os.rmdir(path.names[-1], dir_fd=fd)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise _name_error(error, path) from error
                raise invalid(
                    f"The directory being deleted is not empty: {path}",
                    reason="FILES_API_DIRECTORY_IS_NOT_EMPTY",
                ) from None
            self._staging.sync(fd)

    def list_names(self, path: VolumePath) -> list[bytes]:
        """Names of files and directories directly below, unsorted. A name that is not UTF-8 cannot
        be told: left out.
        """
        with self._directory(path) as fd, os.scandir(fd) as entries:
            found = [os.fsencode(entry.name) for entry in entries if not entry.is_symlink()]
        return [name for name in found if _is_utf8(name)]

    def describe(self, path: VolumePath, names: list[bytes]) -> list[Entry]:
        """The entries of those `names` that are still there."""
        entries = []
        with self._directory(path) as fd:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        entries.append(Entry(name.decode(), None))
                    elif stat.S_ISREG(status.st_mode):
                        entries.append(Entry(name.decode(), _info(status)))
        return entries

    # Descriptors

    @contextlib.contextmanager
    def _directory(self, path: VolumePath) -> Iterator[int]:
        try:
            with open_directory(self._root_fd, path.all_names) as fd:
                yield fd
        except (FileNotFoundError, NotADirectoryError):
            raise directory_not_found(str(path)) from None
        except OSError as error:
            raise _name_error(error, path) from error

    @contextlib.contextmanager
    def _parent(
        self, path: VolumePath, missing: ApiError, *, cached: bool = False
    ) -> Iterator[int]:
        """The directory that holds `path`; whatever is not there becomes `missing`."""
        if path.is_root:
            raise missing
        try:
            with open_directory(self._root_fd, path.all_names[:-1], cached=cached) as fd:
                yield fd
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise missing from None
        except OSError as error:
            raise _name_error(error, path) from error

    @contextlib.contextmanager
    def _new_parent(self, path: VolumePath) -> Iterator[int]:
        try:
            with open_directory(
                self._root_fd, path.all_names[:-1], create_from=_VOLUME_DEPTH
            ) as fd:
                yield fd
        except NotADirectoryError:
            raise invalid(
                f"A parent of the path is a file: {path}",
                reason="FILES_API_PARENT_IS_NOT_DIRECTORY",
            ) from None
        except OSError as error:
            raise _name_error(error, path) from error


def _info(status: os.stat_result) -> FileInfo:
    return FileInfo(status.st_size, status.st_mtime_ns)


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _name_error(error: OSError, path: VolumePath) -> Exception:
    """A refusal for what a disk cannot hold; anything else stays what it is."""
    if error.errno in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL):
        return invalid(f"The disk of the server cannot hold this name: {path}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "RESOURCE_EXHAUSTED", "The disk of the server is full.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        # A mistake in how the server was set up, which no repetition mends: not a 5xx.
        return ApiError(
            403, "PERMISSION_DENIED", f"The server's own user may not do this on its disk: {path}"
        )
    return error
