"""`trainmount ls`: what is in directories of volumes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmount_cli.errors import EXIT_FAILED
from trainmount_cli.options import ChunkOption, OutputOption, ProfileOption, number_of_bytes
from trainmount_cli.output import Output, print_data, select

if TYPE_CHECKING:
    from trainmount_cli.locations import Location, Volumes
    from trainmount_files import FileStat

__all__ = ["ls"]


def ls(
    paths: Annotated[list[str], typer.Argument(metavar="PATH")],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", "-R", help="All that is below, too.")
    ] = False,
    long: Annotated[bool, typer.Option("--long", "-l", help="With size and time.")] = False,
    profile: ProfileOption = None,
    chunk_above: ChunkOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List directories of volumes, in the store's order; directories end in a slash.

    Exit status: 0 all listed, 1 some or all failed, 2 wrong arguments, 130 interrupted.
    """
    select(output)
    from trainmount_cli.locations import Volumes, as_cli_error, parse_location, reason_of
    from trainmount_cli.transfers import interruptible, noticing_silence, print_failures
    from trainmount_files import VolumeError

    locations = [parse_location(text) for text in paths]
    listing = _Listing(output, long=long, with_heads=len(paths) > 1)
    failures: list[dict[str, str]] = []
    if output is Output.TEXT:
        # What is piped on must be the name's own bytes.
        sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    chunks = number_of_bytes("--chunk-above", chunk_above)
    with interruptible("ls"), Volumes(profile=profile, chunk_above_bytes=chunks) as volumes:
        for location in locations:
            try:
                listing.head(location)
                with noticing_silence() as answered:
                    for page in _pages(location, volumes, recursive=recursive):
                        answered()
                        listing.add(location, page)
            except VolumeError as error:
                problem = as_cli_error(location, error)
                if len(locations) == 1 and not listing.entries:
                    raise problem from None
                failure = {
                    "path": location.text,
                    "code": problem.code,
                    "message": reason_of(error, location),
                }
                failures.append(failure)
    if output is Output.JSON:
        print_data({"entries": listing.entries, "failed": failures})
        raise typer.Exit(EXIT_FAILED if failures else 0)
    raise typer.Exit(print_failures(failures))


def _pages(
    location: Location, volumes: Volumes, *, recursive: bool
) -> Iterator[list[tuple[str, FileStat]]]:
    """What is to be shown of one location, page by page, by the name below it."""
    from trainmount_files import NotADirectory, NotFound
    from trainmount_files.volume import list_pages

    volume, path = volumes.of(location)
    waiting = [path]
    cut = len(path) + 1 if path else 0
    while waiting:
        directory = waiting.pop()
        inner: list[str] = []
        try:
            for page in list_pages(volume, directory):
                yield [(entry.path[cut:], entry) for entry in page.entries]
                inner += [entry.path for entry in page.entries if entry.is_directory]
        except NotADirectory:
            if directory != path or location.has_slash:
                raise
            yield [(location.text, volume.stat(path))]
            return
        except NotFound:
            # Below, somebody has removed it since.
            if directory == path:
                raise
        if recursive:
            waiting += reversed(inner)


class _Listing:
    """Prints pages as they come, or gathers them for one envelope."""

    def __init__(self, output: Output, *, long: bool, with_heads: bool) -> None:
        self.entries: list[dict[str, Any]] = []
        self._output = output
        self._long = long
        self._with_heads = with_heads
        self._num_heads = 0
        self._is_terminal = sys.stdout.isatty()
        self._width = 8

    def head(self, location: Location) -> None:
        if self._with_heads and self._output is Output.TEXT:
            if self._num_heads:
                print()
            self._num_heads += 1
            print(f"{self._shown(location.text)}:")

    def add(self, location: Location, page: list[tuple[str, FileStat]]) -> None:
        if self._output is Output.JSON:
            self.entries += [_to_json(location, name, entry) for name, entry in page]
            return
        if self._long:
            # Grows only: columns of a later page may be wider, never narrower.
            sizes = [len(str(entry.size_bytes)) for _, entry in page]
            self._width = max(self._width, *sizes) if sizes else self._width
        for name, entry in page:
            print(self._line(name, entry))

    def _line(self, name: str, entry: FileStat) -> str:
        text = self._shown(name) + ("/" if entry.is_directory and not name.endswith("/") else "")
        if not self._long:
            return text
        size = "-" if entry.is_directory else str(entry.size_bytes)
        return f"{size:>{self._width}}  {_time(entry) or '-':<20}  {text}"

    def _shown(self, name: str) -> str:
        from trainmount_files.wording import printable

        return printable(name) if self._is_terminal else name


def _to_json(location: Location, name: str, entry: FileStat) -> dict[str, Any]:
    return {
        "path": location.shown(name) if name != location.text else name,
        "name": entry.name or name,
        "is_directory": entry.is_directory,
        "size_bytes": None if entry.is_directory else entry.size_bytes,
        "modified_at": _time(entry) or None,
    }


def _time(entry: FileStat) -> str:
    """RFC 3339 in UTC, to the second; empty where the store does not tell."""
    if not entry.mtime_ns:
        return ""
    try:
        moment = datetime.fromtimestamp(entry.mtime_ns // 1_000_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        return ""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
