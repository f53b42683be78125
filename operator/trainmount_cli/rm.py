"""`trainmount rm`: files and trees of volumes, gone for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmount_cli.errors import EXIT_FAILED, CliError
from trainmount_cli.options import ChunkOption, OutputOption, ProfileOption, number_of_bytes
from trainmount_cli.output import Output, print_data, select

if TYPE_CHECKING:
    from trainmount_cli.locations import Location, Volumes
    from trainmount_files.trees import Report

__all__ = ["rm"]


def rm(
    paths: Annotated[list[str], typer.Argument(metavar="PATH")],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", "-R", help="Whole trees.")
    ] = False,
    all_contents: Annotated[
        bool,
        typer.Option(
            "--all-contents", help="With -r on a whole volume: empty it. It stays itself."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Files at once.")] = 8,
    profile: ProfileOption = None,
    chunk_above: ChunkOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Remove files and, with -r, directories with all that is in them. Nothing is asked.

    Exit status: 0 all removed, 1 some or all failed, 2 wrong arguments, 130 interrupted.
    """
    select(output)
    from trainmount_cli.locations import Volumes, as_cli_error, parse_location
    from trainmount_cli.transfers import (
        Part,
        failures_of,
        interruptible,
        print_failures,
        showing_progress,
    )
    from trainmount_files import VolumeError
    from trainmount_files.trees import Report
    from trainmount_files.wording import files_text

    locations = [parse_location(text) for text in paths]
    for location in locations:
        _refuse_roots(location, all_contents=all_contents and recursive)
    parts = [Part(location, Report()) for location in locations]
    chunks = number_of_bytes("--chunk-above", chunk_above)
    with interruptible("rm"), Volumes(profile=profile, chunk_above_bytes=chunks) as volumes:
        with showing_progress("removed", [part.report for part in parts]):
            for part in parts:
                try:
                    _remove(part.location, volumes, part.report, jobs, recursive=recursive)
                except VolumeError as error:
                    part.report.failed("", error)
        failures = failures_of(parts)
        first = parts[0].report.failures
        if len(parts) == 1 and not parts[0].report.num_found and len(first) == 1:
            raise as_cli_error(parts[0].location, first[0].error)
    num_removed = sum(part.report.num_done for part in parts)
    if output is Output.JSON:
        print_data({"removed": num_removed, "failed": failures})
        raise typer.Exit(EXIT_FAILED if failures else 0)
    print(
        f"{files_text(num_removed)} removed" + (f"; {len(failures):,} failed" if failures else "")
    )
    raise typer.Exit(print_failures(failures))


def _refuse_roots(location: Location, *, all_contents: bool) -> None:
    if location.is_local:
        last = location.path.rstrip("/").rpartition("/")[2]
        if last in ("", ".", ".."):
            # As rm(1): where one is, and what is above, is hardly ever meant.
            raise CliError(f"{location.text}: is not removed; name the directory")
        return
    if location.url == "/Volumes":
        raise CliError(f"{location.text}: only what is inside a volume can be removed")
    if not location.path and not all_contents:
        raise CliError(f"{location.text}: is a whole volume; -r --all-contents would empty it")


def _remove(
    location: Location, volumes: Volumes, report: Report, jobs: int, *, recursive: bool
) -> None:
    from trainmount_files import IsADirectory, NotADirectory
    from trainmount_files.trees import remove_tree

    volume, path = volumes.of(location)
    found = volume.stat(path)
    if not found.is_directory:
        if location.has_slash:
            raise NotADirectory("remove", path, "is not a directory")
        report.found(1)
        volume.delete(path)
        report.done()
    elif not recursive:
        raise IsADirectory("remove", path, "is a directory; remove it with -r")
    else:
        remove_tree(volume, path, keep_root=not path, parallelism=jobs, report=report)
