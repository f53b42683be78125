"""The directory that is served: files, directories and volumes as the API's verbs see them.

Blocking; the routes call it in worker threads. Only `resolution` turns names into descriptors.
Errors are `ApiError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmount_files.server.conditions import UNCONDITIONAL, Conditions, FileInfo, file_info
from trainmount_files.server.errors import (
    ApiError,
    already_exists,
    directory_not_found,
    disk_refusal,
    file_not_found,
    invalid,
)
from trainmount_files.server.folding import FoldedNameError, Folding
from trainmount_files.server.implicit import is_implicit, mark_explicit, mark_implicit, probe_marks
from trainmount_files.server.paths import VolumePath, is_object_name
from trainmount_files.server.resolution import open_directory, open_regular, stat_regular
from trainmount_files.server.settings import parse_volume_name
from trainmount_files.server.snapshots import Snapshots
from trainmount_files.server.staging import Staging, Temporary

__all__ = ["DirectoryStore", "Entry"]

_VOLUME_DEPTH: Final = 3

_SECOND_NS: Final = 1_000_000_000

# The lock, not a path, of those who make directories by name and those who remove unnamed ones.
_TREE: Final = ""

# A directory can go between its opening and the new name in it; it is made again.
_PUBLISH_TRIES: Final = 10


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing; `file` is None for a directory."""

    name: str
    file: FileInfo | None


class DirectoryStore:
    """A directory of `catalog/schema/volume` trees. Any thread."""

    def __init__(
        self,
        directory: Path,
        staging: Staging,
        *,
        implicit_directories: bool = False,
        folding: Folding | None = None,
    ) -> None:
        """For `implicit_directories` see `ServerSettings`; OSError if the disk cannot do it."""
        if implicit_directories:
            probe_marks(staging.path)
        self._root_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._staging = staging
        self._made_by_file = mark_implicit if implicit_directories else None
        self._implicit = implicit_directories
        self._folding = folding or Folding.probe(staging.path)
        self._snapshots = Snapshots()

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
                    if is_object_name(entry.name) and entry.is_dir(follow_symlinks=False)
                )
        except (FileNotFoundError, NotADirectoryError):
            kind = ("metastore", "Catalog", "Schema")[len(parents)]
            name = ".".join(parents)
            code = f"{kind.upper()}_DOES_NOT_EXIST"
            raise ApiError(404, code, f"{kind} '{name}' does not exist.") from None

    def object_mtime_ns(self, *names: str) -> int | None:
        """When something was last made or removed in a catalog, schema or volume; None for one that
        is gone.
        """
        try:
            with open_directory(self._root_fd, names) as fd:
                return os.fstat(fd).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None

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
        return file_fd, file_info(os.fstat(file_fd))

    def stat_file(self, path: VolumePath, *, cached: bool = False) -> FileInfo:
        with self._parent(path, file_not_found(str(path)), cached=cached) as fd:
            return file_info(stat_regular(fd, path.names[-1], cached=cached))

    def delete_file(
        self, path: VolumePath, conditions: Conditions = UNCONDITIONAL, *, vanish: bool = False
    ) -> None:
        """With `vanish`, directories above that become empty go too, whoever made them.

        Raises:
            ApiError: 404 for anything but a file, 412 for another version than the conditions'.
        """
        with (
            self._parent(path, file_not_found(str(path)), exact=True) as fd,
            self._staging.locked(str(path)),
        ):
            info = file_info(stat_regular(fd, path.names[-1]))
            conditions.require_write(info, str(path))
            os.unlink(path.names[-1], dir_fd=fd)
            self._staging.sync(fd)
        self._prune(path, everything=vanish)

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

    def require_writable(
        self, path: VolumePath, *, overwrite: bool, conditions: Conditions
    ) -> None:
        """Asked before the bytes come, so that none are sent for nothing; `publish` holds it all
        against a race. Raises ApiError as that does.
        """
        self.require_volume(path)
        if not overwrite and self.exists(path):
            raise already_exists(str(path))
        if conditions.are_of_writes:
            try:
                current = self.stat_file(path)
            except ApiError as error:
                if error.status != 404:
                    raise
                current = None
            conditions.require_write(current, str(path))

    def publish(
        self,
        temporary: Temporary,
        path: VolumePath,
        *,
        overwrite: bool,
        conditions: Sequence[Conditions] = (),
    ) -> FileInfo:
        """Give a finished file its name in one step, parents included; the name shows the old file
        or all of the new.

        Raises:
            ApiError: 409 for `overwrite=False` over anything, 400 over a directory or below a file,
            412 over another version than that of the conditions.
        """
        if path.is_root:
            raise invalid(f"The path of a file must be below a volume: {path}")
        # The time of publishing, not of writing: a version that is seen later never has the earlier
        # time, on which the guard of `If-Unmodified-Since` stands.
        now = time.time_ns()
        os.utime(temporary.fd, ns=(now, now))
        self._staging.sync(temporary.fd)
        try:
            for _ in range(_PUBLISH_TRIES):
                with contextlib.suppress(FileNotFoundError), self._new_parent(path) as fd:
                    with self._staging.locked(str(path)):
                        _require(conditions, fd, path)
                        _come_after(temporary, fd, path)
                        self._link(temporary, fd, path, overwrite=overwrite)
                    self._staging.sync(fd)
                    return file_info(os.fstat(temporary.fd))
                self.require_volume(path)
        except BaseException:
            # What it brought along goes with it.
            self._prune(path, everything=False)
            raise
        raise ApiError(409, "ABORTED", f"The directory was removed time and again: {path}")

    def _link(self, temporary: Temporary, fd: int, path: VolumePath, *, overwrite: bool) -> None:
        name = path.names[-1]
        places = {"src_dir_fd": temporary.directory_fd, "dst_dir_fd": fd}
        try:
            self._folding.require_exact(fd, name)
            if overwrite:
                os.replace(temporary.name, name, **places)  # noqa: PTH105  by descriptors
            else:
                # A link fails on an existing name, whoever made it and however close the race.
                os.link(temporary.name, name, **places, follow_symlinks=False)
        except FoldedNameError:
            raise _folded(path) from None
        except FileExistsError:
            raise already_exists(str(path)) from None
        except IsADirectoryError:
            raise invalid(
                f"A directory is at the path: {path}", reason="FILES_API_PATH_IS_DIRECTORY"
            ) from None
        except FileNotFoundError:
            raise
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
            with (
                self._staging.locked(_TREE) if self._implicit else contextlib.nullcontext(),
                open_directory(
                    self._root_fd,
                    path.all_names,
                    create_from=_VOLUME_DEPTH,
                    before=self._folding.require_exact,
                ) as fd,
            ):
                if self._implicit:
                    mark_explicit(fd)
                self._staging.sync(fd)
        except FoldedNameError:
            raise _folded(path) from None
        except NotADirectoryError:
            raise already_exists(str(path)) from None
        except OSError as error:
            raise _name_error(error, path) from error

    def remove_directory(self, path: VolumePath, *, vanish: bool = False) -> None:
        """Remove an empty one. `vanish` as for `delete_file`."""
        if path.is_root:
            raise invalid(f"A volume cannot be removed by the Files API: {path}")
        with self._parent(path, directory_not_found(str(path)), exact=True) as fd:
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
        self._prune(path, everything=vanish)

    def _prune(self, path: VolumePath, *, everything: bool) -> None:
        """Remove the directories above `path` that only its children had kept."""
        if not everything and not self._implicit:
            return
        for depth in range(len(path.all_names) - 1, _VOLUME_DEPTH, -1):
            names = path.all_names[:depth]
            # Not empty, or gone: so are those above, or they are another request's to remove.
            try:
                with (
                    self._staging.locked(_TREE),
                    open_directory(self._root_fd, names[:-1]) as parent_fd,
                    open_directory(parent_fd, names[-1:]) as fd,
                ):
                    if not everything and not is_implicit(fd):
                        return
                    os.rmdir(names[-1], dir_fd=parent_fd)
            except OSError:
                return

    def list_page(self, path: VolumePath, after: bytes, size: int) -> tuple[list[Entry], bytes]:
        """The next `size` files and directories directly below in byte order of their names, and
        what the page behind them comes `after`, empty for none. A name that is not UTF-8 cannot be
        told: left out, as is what went away meanwhile.
        """
        with self._directory(path) as fd:
            names, is_last = self._snapshots.page(fd, after, size)
            return _describe(fd, names), b"" if is_last else names[-1]

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
        self, path: VolumePath, missing: ApiError, *, cached: bool = False, exact: bool = False
    ) -> Iterator[int]:
        """The directory that holds `path`; whatever is not there becomes `missing`, with `exact`
        also what is there by another spelling.
        """
        if path.is_root:
            raise missing
        try:
            before = self._folding.require_exact if exact else None
            with open_directory(
                self._root_fd, path.all_names[:-1], cached=cached, before=before
            ) as fd:
                if before is not None:
                    before(fd, path.names[-1])
                yield fd
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise missing from None
        except OSError as error:
            raise _name_error(error, path) from error

    @contextlib.contextmanager
    def _new_parent(self, path: VolumePath) -> Iterator[int]:
        try:
            with open_directory(
                self._root_fd,
                path.all_names[:-1],
                create_from=_VOLUME_DEPTH,
                before=self._folding.require_exact,
                made=self._made_by_file,
            ) as fd:
                yield fd
        except FoldedNameError:
            raise _folded(path) from None
        except FileNotFoundError:
            raise
        except NotADirectoryError:
            raise invalid(
                f"A parent of the path is a file: {path}",
                reason="FILES_API_PARENT_IS_NOT_DIRECTORY",
            ) from None
        except OSError as error:
            raise _name_error(error, path) from error


def _come_after(temporary: Temporary, fd: int, path: VolumePath) -> None:
    """See to it that a file is not older than the one it replaces, should the clock have been put
    back or that one be from another clock.

    Raises:
        ApiError: 400, it would replace a link or the like, which nobody sees through the API.
    """
    try:
        status = os.stat(path.names[-1], dir_fd=fd, follow_symlinks=False)
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise invalid(f"What is at the path is no file: {path}")
    replaced_ns = status.st_mtime_ns
    # A second is what `Last-Modified` can tell apart.
    if replaced_ns // _SECOND_NS > os.fstat(temporary.fd).st_mtime_ns // _SECOND_NS:
        os.utime(temporary.fd, ns=(replaced_ns + _SECOND_NS, replaced_ns + _SECOND_NS))


def _require(conditions: Sequence[Conditions], fd: int, path: VolumePath) -> None:
    wanted = [one for one in conditions if one.are_of_writes]
    if not wanted:
        return
    try:
        current = file_info(stat_regular(fd, path.names[-1]))
    except FileNotFoundError:
        current = None
    for one in wanted:
        one.require_write(current, str(path))


def _folded(path: VolumePath) -> ApiError:
    return invalid(
        f"The disk of the server cannot hold this name beside one that it takes for it: {path}"
    )


def _describe(directory_fd: int, names: list[bytes]) -> list[Entry]:
    entries = []
    for name in names:
        try:
            status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(status.st_mode):
            entries.append(Entry(name.decode(), None))
        elif stat.S_ISREG(status.st_mode):
            entries.append(Entry(name.decode(), file_info(status)))
    return entries


def _name_error(error: OSError, path: VolumePath) -> Exception:
    """A refusal where there is one; anything else stays what it is."""
    return disk_refusal(error, str(path)) or error
