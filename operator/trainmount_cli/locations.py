"""Where `ls`, `cp`, `rm` and `mkdir` are pointed to: a path of a volume, or of this machine.

    /Volumes/c/s/v/x  dbfs:/Volumes/c/s/v/x  s3://bucket/x     a volume and a path in it
    ./x  /data/x  file:///data/x                               this machine

Names are taken as they stand: there are no patterns, `*` and `[` are letters. A path below
`/Volumes` is always the catalog's; one of a mount there is spelled `file:///Volumes/...`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from trainmount_cli.errors import EXIT_FAILED, EXIT_USAGE, CliError
from trainmount_files import (
    AlreadyExists,
    DirectoryNotEmpty,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Volume,
    VolumeError,
    open_volume,
)

__all__ = ["Location", "Volumes", "as_cli_error", "parse_location", "reason_of"]

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*://")

_BUCKETS: Final = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss")

_PLACES: Final = (
    "/Volumes/CATALOG/SCHEMA/VOLUME/..., s3://BUCKET/..., gs://..., az://..., file:///DIRECTORY "
    "or a path of this machine"
)

_CODES: Final[dict[type[VolumeError], str]] = {
    NotFound: "NOT_FOUND",
    PermissionDenied: "PERMISSION_DENIED",
    Unauthenticated: "UNAUTHENTICATED",
    AlreadyExists: "CONFLICT",
    DirectoryNotEmpty: "CONFLICT",
    IsADirectory: "CONFLICT",
    NotADirectory: "CONFLICT",
    Unavailable: "INTERNAL_ERROR",
}


_PLAIN: Final[dict[type[VolumeError], str]] = {
    NotFound: "no such file or directory",
    PermissionDenied: "you may not do this",
    Unauthenticated: "the host does not take the token",
    InvalidRequest: "the store refuses this; is a name too long, or has it odd characters?",
}
"""For an answer of which only the status is known: one to HEAD has no text."""


@dataclass(frozen=True, slots=True)
class Location:
    """What one argument names; nothing is asked of it yet."""

    text: str
    """As it was typed."""

    url: str
    """Of the volume: `/Volumes/c/s/v`, `s3://bucket`; empty for this machine."""

    path: str
    """In the volume, or on this machine."""

    has_slash: bool = False
    """Spelled as a directory's content: it ends in `/`, or in `.` or `..`."""

    @property
    def is_local(self) -> bool:
        return not self.url

    @property
    def local_path(self) -> Path:
        return Path(self.path)

    @property
    def name(self) -> str:
        """What a copy of it is called; empty for the root of a file system."""
        if self.is_local:
            return self.local_path.name
        return (self.path or self.url).rpartition("/")[2]

    def shown(self, path: str) -> str:
        """What lies below it, spelled as it is."""
        base = self.text.rstrip("/") or "/"
        return f"{base.rstrip('/')}/{path}" if path else base


def parse_location(text: str) -> Location:
    """Raises CliError where it can be no place."""
    if not text:
        raise CliError("a path must not be empty")
    if "\0" in text:
        raise CliError("a path must not contain NUL")
    remote = text.removeprefix("dbfs:")
    if remote == "/Volumes" or remote.startswith("/Volumes/"):
        return _of_catalog(text, remote)
    if text.startswith("dbfs:"):
        raise CliError(f"{text}: of dbfs: only dbfs:/Volumes/... can be used")
    if text.startswith("file:"):
        path = text.removeprefix("file:").removeprefix("//").removeprefix("localhost")
        if not path.startswith("/"):
            raise CliError(f"{text}: must be file:///directory/...")
        return _of_machine(text, unquote(path, errors="surrogateescape"))
    scheme = _SCHEME.match(text)
    if scheme is not None:
        place, _, path = text[scheme.end() :].partition("/")
        if scheme[0].removesuffix("://") not in _BUCKETS:
            raise CliError(f"{text}: must be {_PLACES}")
        if not place:
            raise CliError(f"{text}: must name a bucket")
        return Location(text, scheme[0] + place, path.rstrip("/"), path.endswith("/") or not path)
    return _of_machine(text, text)


def _of_catalog(text: str, remote: str) -> Location:
    names = [name for name in remote.split("/")[2:] if name]
    if any(name in (".", "..") for name in names):
        raise CliError(f"{text}: must not contain '.' or '..'")
    if len(names) < 3:
        return Location(text, "/Volumes", "/".join(names), remote.endswith("/"))
    root = "/".join(("/Volumes", *names[:3]))
    return Location(text, root, "/".join(names[3:]), remote.endswith("/"))


def _of_machine(text: str, path: str) -> Location:
    last = path.rstrip("/").rpartition("/")[2]
    return Location(text, "", path, path.endswith("/") or last in ("", ".", ".."))


class Volumes:
    """The volumes of one command, each opened once; closed at its end."""

    def __init__(self, *, profile: str | None = None, chunk_above_bytes: int | None = None) -> None:
        """As in `open_volume`; what is on this machine is never in chunks."""
        self._profile = profile
        self._chunk_above_bytes = chunk_above_bytes
        self._open: dict[str, Volume] = {}

    def __enter__(self) -> Volumes:
        return self

    def __exit__(self, *_: object) -> None:
        for volume in self._open.values():
            volume.close()

    def of(self, location: Location) -> tuple[Volume, str]:
        """The volume of a location and the path in it; on this machine the directory that holds it.

        Raises:
            VolumeError: there is no such directory or volume.
        """
        if not location.is_local:
            return self._get(location.url), location.path
        path = location.local_path
        # Of `.` and `..` the directory above has another name for them.
        path = path.resolve() if location.has_slash else path.parent.resolve() / path.name
        if path == path.parent:
            return self._get(path.as_uri()), ""
        return self._get(path.parent.as_uri()), path.name

    def _get(self, url: str) -> Volume:
        volume = self._open.get(url)
        if volume is None:
            chunks = None if url.startswith("file:") else self._chunk_above_bytes
            volume = self._open[url] = open_volume(
                url, profile=self._profile, chunk_above_bytes=chunks
            )
        return volume


def as_cli_error(location: Location, error: VolumeError) -> CliError:
    """The line for a command that cannot begin."""
    is_usage = isinstance(error, InvalidRequest)
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "INVALID_ARGS")
    status = EXIT_USAGE if is_usage else EXIT_FAILED
    return CliError(f"{location.text}: {reason_of(error, location)}", code=code, exit_status=status)


def reason_of(error: VolumeError, location: Location) -> str:
    """What went wrong at or below `location`, in words."""
    if location.is_local and isinstance(error, DirectoryNotEmpty):
        # A volume has no links, so those of a directory are not seen.
        return "not empty: links and special files are not removed; that is for rm(1)"
    if re.fullmatch(r"HTTP \d+", error.reason) is None:
        return error.reason
    words = next((text for kind, text in _PLAIN.items() if isinstance(error, kind)), "failed")
    return f"{words} ({error.reason})"
