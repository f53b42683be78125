"""Copies a file or a whole tree between this machine and volumes, many files at a time.

    copy_tree -> crew (threads) -> list: a page of a directory -> one task for each file -> routes

A tree is walked while it is copied: the first file moves after the first page, and no more than a
few hundred files wait in memory. What cannot be copied is named in the report, and the rest goes
on. Called by the command line and by `publish`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainmount_files.errors import (
    AlreadyExists,
    Cancelled,
    InvalidRequest,
    IsADirectory,
    Unsupported,
    VolumeError,
)
from trainmount_files.trees.crew import Crew
from trainmount_files.trees.entries import Entry
from trainmount_files.trees.local_source import LocalSource
from trainmount_files.trees.local_target import LocalTarget
from trainmount_files.trees.report import Report
from trainmount_files.trees.routes import Download, Relay, Route, Upload
from trainmount_files.volume import Volume

__all__ = ["CopyOptions", "LocalPlace", "Place", "VolumePlace", "copy_file", "copy_tree"]


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A file or directory of this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class VolumePlace:
    """A file or directory of a volume; the root of the volume where `path` is empty."""

    volume: Volume
    path: str


Place = LocalPlace | VolumePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """How a tree is copied."""

    parallelism: int = 8
    """Files at the same time. Each thread holds a directory and a file open, and 1 MiB of memory;
    the two large files that may come down at once have their ranges beside that.
    """

    overwrite: bool = True
    """Whether a file at the destination is replaced; otherwise it stays and is reported as skipped.
    """

    fail_fast: bool = False
    """Start no further file after the first that failed."""

    follow_links: bool = False
    """Copy what a local symbolic link leads to, wherever that is; otherwise links are skipped."""


def copy_tree(
    source: Place,
    destination: Place,
    options: CopyOptions | None = None,
    *,
    report: Report | None = None,
    cancel: threading.Event | None = None,
) -> Report:
    """Copy all that is below the directory `source` to below `destination`, which is made.

    Empty directories are kept; modification times, modes and links are not. A file whose content
    changes meanwhile is copied in one of its versions. `report` is filled in while it goes on.

    Raises:
        Cancelled: `cancel` was set. A KeyboardInterrupt likewise passes when the threads have
            ended: each file of the destination is then the old one, absent or the whole new one.
        InvalidRequest: the destination is inside the source, or both are local.
    """
    return _run(source, destination, options, report, cancel, is_file=False)


def copy_file(
    source: Place,
    destination: Place,
    options: CopyOptions | None = None,
    *,
    report: Report | None = None,
    cancel: threading.Event | None = None,
) -> Report:
    """Copy one file to exactly `destination`, whose parents are made.

    For the rest as `copy_tree`.
    """
    return _run(source, destination, options, report, cancel, is_file=True)


def _run(
    source: Place,
    destination: Place,
    options: CopyOptions | None,
    report: Report | None,
    cancel: threading.Event | None,
    *,
    is_file: bool,
) -> Report:
    options = options or CopyOptions()
    report = report if report is not None else Report()
    _refuse_inside(source, destination)
    route = _route(source, destination, is_file=is_file, follow_links=options.follow_links)
    crew = Crew("copy", 1 if is_file else options.parallelism, cancel)
    copy = _Copy(route, options, report, crew)
    try:
        crew.run(partial(copy.only_file, source) if is_file else partial(copy.directory, ""))
    finally:
        # A thread that the network still holds may use its descriptors.
        if not crew.is_running:
            route.close()
    return report


class _Copy:
    """One run: what its tasks share."""

    def __init__(self, route: Route, options: CopyOptions, report: Report, crew: Crew) -> None:
        self._route = route
        self._options = options
        self._report = report
        self._crew = crew

    def directory(self, path: str) -> None:
        """Bring up all that is in a directory of the source."""
        route, crew = self._route, self._crew
        try:
            entries = route.entries(path)
            # Before anything is made: a source that is not there leaves no directory behind.
            entry = next(entries, None)
            if entry is None or route.makes_directories:
                self._make_directory(path)
            while entry is not None and not crew.stop.is_set():
                if entry.refusal is not None:
                    self._failed(entry.path, entry.refusal)
                elif entry.skip_reason:
                    self._report.skipped(entry.path, entry.skip_reason)
                elif entry.is_directory:
                    crew.add_large(partial(self.directory, entry.path))
                else:
                    self._report.found(1, entry.size_bytes)
                    crew.add(partial(self.file, entry))
                entry = next(entries, None)
        except VolumeError as error:
            self._failed(path, error)

    def file(self, entry: Entry) -> None:
        """Copy one file."""
        report = self._report
        try:
            left = self._route.move(
                entry,
                overwrite=self._options.overwrite,
                cancel=self._crew.stop,
                moved=report.moved,
            )
        except AlreadyExists as error:
            if self._options.overwrite:
                self._failed(entry.path, error)
            else:
                report.skipped(entry.path, "exists")
        except VolumeError as error:
            self._failed(entry.path, error)
        else:
            report.done(left)

    def only_file(self, source: Place) -> None:
        """Copy the root, which is a file."""
        try:
            if isinstance(source, LocalPlace):
                size = _size_for_progress(source.path)
                entry = Entry("", is_directory=False, size_bytes=size)
            else:
                found = source.volume.stat(source.path)
                entry = Entry(
                    "",
                    is_directory=found.is_directory,
                    size_bytes=found.size_bytes,
                    version=found.version,
                )
            if entry.is_directory:
                raise IsADirectory("copy", str(source.path), "is a directory")
            if self._route.makes_directories:
                self._route.make_directory("")
        except VolumeError as error:
            self._failed("", error)
            return
        self._report.found(1, entry.size_bytes)
        self.file(entry)

    def _make_directory(self, path: str) -> None:
        try:
            self._route.make_directory(path)
        except Unsupported:
            # A store of keys alone has no empty directory.
            self._report.skipped(path, "the destination keeps no empty directories")

    def _failed(self, path: str, error: VolumeError) -> None:
        if isinstance(error, Cancelled) and self._crew.stop.is_set():
            # Not this file's failure: everything is being given up.
            return
        self._report.failed(path, error)
        if self._options.fail_fast:
            self._crew.stop.set()


def _route(source: Place, destination: Place, *, is_file: bool, follow_links: bool) -> Route:
    if isinstance(source, LocalPlace):
        if isinstance(destination, LocalPlace):
            raise InvalidRequest("copy", str(source.path), "one of both must be on a volume")
        root, prefix = _split(source.path, is_file=is_file)
        files = LocalSource(root, follow_links=follow_links or is_file)
        return Upload(files, prefix, destination.volume, destination.path)
    if isinstance(destination, LocalPlace):
        root, prefix = _split(destination.path, is_file=is_file)
        return Download(source.volume, source.path, LocalTarget(root), prefix)
    return Relay(source.volume, source.path, destination.volume, destination.path)


def _size_for_progress(path: Path) -> int:
    """Bytes of a local file; what is wrong with it is told when it is opened."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _split(path: Path, *, is_file: bool) -> tuple[Path, str]:
    return (path.parent, path.name) if is_file else (path, "")


def _refuse_inside(source: Place, destination: Place) -> None:
    """A tree that is copied into itself would never end."""
    if not isinstance(source, VolumePlace) or not isinstance(destination, VolumePlace):
        return
    above, below_it = _absolute(source), _absolute(destination)
    if below_it == above:
        raise InvalidRequest("copy", source.path, "source and destination are the same")
    if below_it.startswith(f"{above}/"):
        raise InvalidRequest("copy", source.path, "the destination is inside the source")


def _absolute(place: VolumePlace) -> str:
    return f"{place.volume.url.rstrip('/')}/{place.path}".rstrip("/")
