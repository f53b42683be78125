"""Removes whole trees of a volume: files many at a time, a directory when it is empty.

Called by the command line and by `publish`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Final

from trainmount_files.errors import (
    Cancelled,
    DirectoryNotEmpty,
    InvalidRequest,
    NotFound,
    Unsupported,
    VolumeError,
)
from trainmount_files.trees.crew import Crew
from trainmount_files.trees.entries import Entry, below
from trainmount_files.trees.report import Report
from trainmount_files.trees.routes import volume_entries
from trainmount_files.volume import Volume

__all__ = ["remove_tree"]

_LISTINGS: Final = 5
"""Times that one directory is listed: a page that is asked for after some files of the page before
are gone may leave others out.
"""


def remove_tree(
    volume: Volume,
    path: str,
    *,
    keep_root: bool = False,
    parallelism: int = 8,
    report: Report | None = None,
    cancel: threading.Event | None = None,
) -> Report:
    """Remove the directory `path` and all below it; what cannot be removed is named, with the
    reason, and the rest goes on. What is gone already is fine.

    With `keep_root` the directory itself stays, which it must where it is the volume's root.

    Raises:
        InvalidRequest: the volume's root, without `keep_root`.
        Cancelled: `cancel` was set. A KeyboardInterrupt likewise passes when the threads have
            ended.
    """
    if not path and not keep_root:
        raise InvalidRequest("remove directory", path, "the volume's root cannot be removed")
    report = report if report is not None else Report()
    crew = Crew("remove", parallelism, cancel)
    removal = _Removal(volume, path, report, crew)
    crew.run(partial(removal.directory, _Directory("", None, is_kept=keep_root)))
    return report


class _Directory:
    """A directory on its way out. `num_left` is guarded by the removal's lock."""

    def __init__(self, path: str, parent: _Directory | None, *, is_kept: bool = False) -> None:
        self.path = path
        self.parent = parent
        self.is_kept = is_kept
        self.num_left = 0
        """What is known to be in it still, and 1 while it is being listed."""
        self.num_listings = 0


class _Removal:
    def __init__(self, volume: Volume, root: str, report: Report, crew: Crew) -> None:
        self._volume = volume
        self._root = root
        self._report = report
        self._crew = crew
        self._lock = threading.Lock()

    def directory(self, directory: _Directory) -> None:
        """Bring up all that is in a directory."""
        directory.num_left = 1
        directory.num_listings += 1
        try:
            for entry in self._entries(directory):
                if self._crew.stop.is_set():
                    return
                with self._lock:
                    directory.num_left += 1
                if entry.is_directory:
                    inner = _Directory(entry.path, directory)
                    self._crew.add_large(partial(self.directory, inner))
                else:
                    self._report.found(1)
                    self._crew.add(partial(self.file, entry.path, directory))
        except NotFound as error:
            if directory.parent is None:
                self._failed(directory, error)
                return
        except VolumeError as error:
            self._failed(directory, error)
            return
        self._one_less(directory)

    def file(self, path: str, directory: _Directory) -> None:
        """Remove one file."""
        try:
            self._volume.delete(self._full(path))
        except NotFound:
            pass
        except VolumeError as error:
            if not self._is_given_up(error):
                self._report.failed(path, error)
            # The directory stays, and those above it: they are not named as well.
            return
        self._report.done()
        self._one_less(directory)

    def _one_less(self, directory: _Directory | None) -> None:
        while directory is not None:
            with self._lock:
                directory.num_left -= 1
                if directory.num_left:
                    return
            if not directory.is_kept and not self._remove(directory):
                return
            directory = directory.parent

    def _remove(self, directory: _Directory) -> bool:
        """Remove a directory that should be empty; False where it stays."""
        try:
            self._volume.remove_directory(self._full(directory.path))
        except (NotFound, Unsupported):
            # A store of keys alone has no directory without files.
            return True
        except DirectoryNotEmpty as error:
            if directory.num_listings < _LISTINGS and not self._crew.stop.is_set():
                self._crew.add_large(partial(self.directory, directory))
                return False
            self._failed(directory, error)
            return False
        except VolumeError as error:
            self._failed(directory, error)
            return False
        return True

    def _entries(self, directory: _Directory) -> Iterator[Entry]:
        for entry in volume_entries(self._volume, self._root, directory.path):
            if entry.refusal is not None:
                self._report.failed(entry.path, entry.refusal)
                with self._lock:
                    directory.num_left += 1
                continue
            yield entry

    def _failed(self, directory: _Directory, error: VolumeError) -> None:
        if not self._is_given_up(error):
            self._report.failed(directory.path, error)

    def _is_given_up(self, error: VolumeError) -> bool:
        return isinstance(error, Cancelled) and self._crew.stop.is_set()

    def _full(self, path: str) -> str:
        return below(self._root, path)
