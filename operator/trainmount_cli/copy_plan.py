"""What `cp` has to copy to where: the meaning of its arguments, before anything is made.

source       destination is          goes to
file         missing                 destination; an error where that ends in a slash
file         a file                  destination
file         a directory             destination/name
directory    missing                 destination
directory    a directory             destination/name; destination where the source ends in a
                                     slash
directory    a file                  an error
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from trainmount_cli.errors import EXIT_FAILED, CliError
from trainmount_cli.locations import Location, Volumes, as_cli_error
from trainmount_files import (
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotFound,
    Volume,
    VolumeError,
)
from trainmount_files.directory.io import os_errors
from trainmount_files.trees import LocalPlace, Place, VolumePlace

__all__ = ["PlannedCopy", "plan_copies"]


class _Kind(Enum):
    MISSING = auto()
    FILE = auto()
    DIRECTORY = auto()


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """One source and where it goes, or why it cannot go."""

    source: Location
    problem: VolumeError | None = None
    origin: Place | None = None
    target: Place | None = None
    is_file: bool = False


def plan_copies(
    sources: Sequence[Location], destination: Location, volumes: Volumes, *, recursive: bool
) -> list[PlannedCopy]:
    """One for each source, in order.

    Raises:
        CliError: the destination cannot be used for any of them.
    """
    try:
        kind = _kind_of(destination, volumes)
    except VolumeError as error:
        raise as_cli_error(destination, error) from None
    if kind is _Kind.FILE and destination.has_slash:
        raise CliError(f"{destination.text}: is not a directory", exit_status=EXIT_FAILED)
    if len(sources) > 1 and kind is not _Kind.DIRECTORY:
        raise CliError(
            f"{destination.text}: must be a directory, for {len(sources)} sources",
            code="NOT_FOUND" if kind is _Kind.MISSING else "CONFLICT",
            exit_status=EXIT_FAILED,
        )
    planned: list[PlannedCopy] = []
    for source in sources:
        try:
            planned.append(_plan(source, destination, kind, volumes, recursive=recursive))
        except VolumeError as error:
            planned.append(PlannedCopy(source, error))
    return planned


def _plan(
    source: Location, destination: Location, kind: _Kind, volumes: Volumes, *, recursive: bool
) -> PlannedCopy:
    found = _kind_of(source, volumes)
    if found is _Kind.MISSING:
        raise NotFound("copy", source.text, "no such file or directory")
    is_file = found is _Kind.FILE
    if is_file and source.has_slash:
        raise NotADirectory("copy", source.text, "is not a directory")
    if not is_file and not recursive:
        raise InvalidRequest("copy", source.text, "is a directory; copy it with -r")
    if not is_file and kind is _Kind.FILE:
        raise NotADirectory("copy", source.text, f"{destination.text} is a file")
    if is_file and kind is _Kind.MISSING and destination.has_slash:
        raise NotFound("copy", source.text, f"there is no directory {destination.text}")
    keeps_name = kind is _Kind.DIRECTORY and (is_file or not source.has_slash)
    name = source.name if keeps_name else ""
    if keeps_name and not name:
        raise InvalidRequest("copy", source.text, "has no name; end it with a slash")
    origin = _origin(source, destination, volumes)
    return PlannedCopy(source, None, origin, _target(destination, name, volumes), is_file)


def _origin(source: Location, destination: Location, volumes: Volumes) -> Place:
    if not source.is_local:
        return VolumePlace(*volumes.of(source))
    if not destination.is_local:
        return LocalPlace(source.local_path)
    if not source.text.startswith("file:"):
        raise InvalidRequest("copy", source.text, "both are on this machine; that is for cp(1)")
    inside, outside = destination.local_path.resolve(), source.local_path.resolve()
    if inside == outside:
        reason = "source and destination are the same"
        raise InvalidRequest("copy", source.text, reason)
    if inside.is_relative_to(outside):
        raise InvalidRequest("copy", source.text, "the destination is inside the source")
    return VolumePlace(*volumes.of(source))


def _target(destination: Location, name: str, volumes: Volumes) -> Place:
    if destination.is_local:
        directory = destination.local_path
        return LocalPlace(directory / name if name else directory)
    volume, path = volumes.of(destination)
    return VolumePlace(volume, f"{path}/{name}" if path and name else path or name)


def _kind_of(location: Location, volumes: Volumes) -> _Kind:
    if location.is_local:
        return _local_kind(location)
    volume, path = volumes.of(location)
    try:
        found = volume.stat(path)
    except NotFound:
        _require_volume(location, volume)
        return _Kind.MISSING
    return _Kind.DIRECTORY if found.is_directory else _Kind.FILE


def _require_volume(location: Location, volume: Volume) -> None:
    """Raises NotFound where a whole tree would fail, file by file, for want of the volume."""
    try:
        volume.stat("")
    except NotFound:
        raise NotFound("copy", location.text, f"there is no volume {location.url}") from None


def _local_kind(location: Location) -> _Kind:
    """Links are followed: whoever names one means where it leads."""
    with os_errors("copy", location.text):
        try:
            mode = location.local_path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return _Kind.MISSING
    if stat.S_ISDIR(mode):
        return _Kind.DIRECTORY
    if not stat.S_ISREG(mode):
        raise IsADirectory("copy", location.text, "is neither a file nor a directory")
    return _Kind.FILE
