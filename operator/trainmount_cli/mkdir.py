"""`trainmount mkdir`: directories of volumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmount_cli.errors import EXIT_FAILED
from trainmount_cli.options import OutputOption
from trainmount_cli.output import Output, print_data, select

if TYPE_CHECKING:
    from trainmount_cli.locations import Location, Volumes

__all__ = ["mkdir"]


def mkdir(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...")],
    parents: Annotated[
        bool,
        typer.Option("--parents", "-p", help="Make parents too; what is there already is fine."),
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Make directories.

    Exit status: 0 all made, 1 some or all failed, 2 wrong arguments, 130 interrupted.
    """
    select(output)
    from trainmount_cli.locations import Volumes, as_cli_error, parse_location
    from trainmount_cli.transfers import interruptible, print_failures
    from trainmount_files import VolumeError

    locations = [parse_location(text) for text in paths]
    made: list[str] = []
    failures: list[dict[str, str]] = []
    with interruptible("mkdir"), Volumes() as volumes:
        for location in locations:
            try:
                _make(location, volumes, parents=parents)
                made.append(location.text)
            except VolumeError as error:
                problem = as_cli_error(location, error)
                if len(locations) == 1:
                    raise problem from None
                failure = {"path": location.text, "code": problem.code, "message": error.reason}
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
            reason = "its parent is not there; -p makes it"
            raise NotFound("make directory", path, reason) from None
    volume.make_directory(path)
