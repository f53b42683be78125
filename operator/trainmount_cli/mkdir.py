"""`trainmount mkdir`: directories of volumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmount_cli.errors import EXIT_FAILED
from trainmount_cli.options import ChunkOption, OutputOption, ProfileOption, number_of_bytes
from trainmount_cli.output import Output, print_data, select

if TYPE_CHECKING:
    from trainmount_cli.locations import Location, Volumes
    from trainmount_files import Volume

__all__ = ["mkdir"]


def mkdir(
    paths: Annotated[list[str], typer.Argument(metavar="PATH")],
    parents: Annotated[
        bool,
        typer.Option("--parents", "-p", help="Make parents too; what is there already is fine."),
    ] = False,
    profile: ProfileOption = None,
    chunk_above: ChunkOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Make directories.

    Exit status: 0 all made, 1 some or all failed, 2 wrong arguments, 130 interrupted.
    """
    select(output)
    from trainmount_cli.locations import Volumes, as_cli_error, parse_location, reason_of
    from trainmount_cli.transfers import interruptible, noticing_silence, print_failures
    from trainmount_files import VolumeError

    locations = [parse_location(text) for text in paths]
    made: list[str] = []
    failures: list[dict[str, str]] = []
    chunks = number_of_bytes("--chunk-above", chunk_above)
    with interruptible("mkdir"), Volumes(profile=profile, chunk_above_bytes=chunks) as volumes:
        for location in locations:
            try:
                with noticing_silence():
                    _make(location, volumes, parents=parents)
                made.append(location.text)
            except VolumeError as error:
                problem = as_cli_error(location, error)
                if len(locations) == 1:
                    raise problem from None
                failure = {
                    "path": location.text,
                    "code": problem.code,
                    "message": reason_of(error, location),
                }
                failures.append(failure)
    if output is Output.JSON:
        print_data({"made": made, "failed": failures})
        raise typer.Exit(EXIT_FAILED if failures else 0)
    raise typer.Exit(print_failures(failures))


def _make(location: Location, volumes: Volumes, *, parents: bool) -> None:
    from trainmount_files import AlreadyExists, NotFound
    from trainmount_files.directory.io import os_errors
    from trainmount_files.paths import parent_of

    if location.is_local:
        with os_errors("make directory", location.text):
            location.local_path.mkdir(parents=parents, exist_ok=parents)
        return
    volume, path = volumes.of(location)
    if not parents:
        # The stores make parents by themselves, and are content with what is there.
        try:
            volume.stat(path)
        except NotFound:
            pass
        else:
            raise AlreadyExists("make directory", path, "something is at the path")
        try:
            volume.stat(parent_of(path))
        except NotFound:
            _require_volume(location, volume)
            reason = "its parent is not there; -p makes it"
            raise NotFound("make directory", path, reason) from None
    volume.make_directory(path)


def _require_volume(location: Location, volume: Volume) -> None:
    from trainmount_files import NotFound

    try:
        volume.stat("")
    except NotFound:
        reason = f"there is no volume {location.url}"
        raise NotFound("make directory", location.path, reason) from None
