"""`trainmount cp`: files and trees between this machine and volumes.

    cp f vol            vol is a directory: vol/f; else the file vol
    cp -r src dst       dst is there: dst/src/...; else dst/...
    cp -r src/ dst      dst/... in either case

The rules are those of cp(1) and of rsync(1) for the slash, and the same in both directions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trainmount_cli.errors import EXIT_FAILED, CliError
from trainmount_cli.options import ChunkOption, OutputOption, ProfileOption, number_of_bytes
from trainmount_cli.output import Output, print_data, select

if TYPE_CHECKING:
    from trainmount_cli.copy_plan import PlannedCopy
    from trainmount_cli.locations import Location, Volumes
    from trainmount_cli.transfers import Part
    from trainmount_files import Volume
    from trainmount_files.trees import CopyOptions

__all__ = ["cp"]

_STREAM: Final = "-"


def cp(
    paths: Annotated[
        list[str], typer.Argument(metavar="SOURCE... DESTINATION", help="'-' is a stream.")
    ],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", "-R", help="Whole trees.")
    ] = False,
    no_clobber: Annotated[
        bool, typer.Option("--no-clobber", "-n", help="Leave files that are there already.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Copy what local links lead to; else they are skipped.")
    ] = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Start no file after the first that failed.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Files at once.")] = 8,
    profile: ProfileOption = None,
    chunk_above: ChunkOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Copy files and directories to, from and between volumes.

    Exit status: 0 all copied, 1 some or all failed, 2 wrong arguments, 130 interrupted.
    """
    select(output)
    from trainmount_cli.locations import Volumes, parse_location
    from trainmount_cli.transfers import interruptible
    from trainmount_files.trees import CopyOptions

    if len(paths) < 2:
        raise CliError("cp needs a source and a destination")
    options = CopyOptions(
        parallelism=jobs, overwrite=not no_clobber, fail_fast=fail_fast, follow_links=follow
    )
    chunks = number_of_bytes("--chunk-above", chunk_above)
    with interruptible("cp"), Volumes(profile=profile, chunk_above_bytes=chunks) as volumes:
        if _STREAM in paths:
            status = _stream(paths, volumes, options, output)
        else:
            sources = [parse_location(text) for text in paths[:-1]]
            destination = parse_location(paths[-1])
            status = _copy(sources, destination, volumes, options, output, recursive=recursive)
    raise typer.Exit(status)


def _copy(
    sources: list[Location],
    destination: Location,
    volumes: Volumes,
    options: CopyOptions,
    output: Output,
    *,
    recursive: bool,
) -> int:
    from trainmount_cli.copy_plan import plan_copies
    from trainmount_cli.locations import as_cli_error
    from trainmount_cli.transfers import (
        Part,
        failures_of,
        noticing_silence,
        print_failures,
        showing_progress,
    )
    from trainmount_files import VolumeError
    from trainmount_files.trees import Report, copy_file, copy_tree

    with noticing_silence():
        planned = plan_copies(sources, destination, volumes, recursive=recursive)
    reports = [Report() for _ in planned]
    parts = [
        Part(copy.source, report, _local_target(copy))
        for copy, report in zip(planned, reports, strict=True)
    ]
    with showing_progress("copied", [part.report for part in parts]):
        for copy, report in zip(planned, reports, strict=True):
            if isinstance(copy.problem, VolumeError):
                report.failed("", copy.problem)
                continue
            assert copy.origin is not None and copy.target is not None
            call = copy_file if copy.is_file else copy_tree
            try:
                call(copy.origin, copy.target, options, report=report)
            except VolumeError as error:
                report.failed("", error)
            if options.fail_fast and report.failures:
                break
    failures = failures_of(parts)
    if len(planned) == 1 and [failure.path for failure in reports[0].failures] == [""]:
        # Nothing could begin: that is the command's own error, not one file's.
        problem = as_cli_error(planned[0].source, reports[0].failures[0].error)
        problem.message = f"{planned[0].source.text}: {failures[0]['message']}"
        raise problem
    _print_result(parts, failures, output)
    if output is Output.JSON:
        return EXIT_FAILED if failures else 0
    return print_failures(failures)


def _local_target(copy: PlannedCopy) -> str:
    from trainmount_files.trees import LocalPlace

    return str(copy.target.path) if isinstance(copy.target, LocalPlace) else ""


def _print_result(parts: Sequence[Part], failures: list[dict[str, str]], output: Output) -> None:
    from trainmount_files.wording import files_text, printable, size_text

    num_files = sum(part.report.num_done for part in parts)
    num_bytes = sum(part.report.num_bytes for part in parts)
    skipped = [
        {"path": part.location.shown(skip.path), "reason": skip.reason}
        for part in parts
        for skip in sorted(part.report.skips, key=lambda skip: skip.path)
    ]
    if output is Output.JSON:
        result = {"copied": num_files, "bytes": num_bytes, "failed": failures, "skipped": skipped}
        print_data(result)
        return
    for entry in skipped:
        print(
            f"trainmount: {printable(entry['path'])}: skipped: {entry['reason']}", file=sys.stderr
        )
    text = f"{files_text(num_files)} copied, {size_text(num_bytes)}"
    if failures:
        text += f"; {len(failures):,} failed"
    if skipped:
        text += f"; {len(skipped):,} skipped"
    print(text)


def _stream(paths: list[str], volumes: Volumes, options: CopyOptions, output: Output) -> int:
    """One side is standard input or output, whose size nobody knows."""
    from trainmount_cli.locations import as_cli_error, parse_location
    from trainmount_files import IsADirectory, VolumeError
    from trainmount_files.transfer import iterate

    if len(paths) != 2 or paths[0] == paths[1]:
        raise CliError("'-' is one of two paths: cp - DESTINATION, or cp SOURCE -")
    location = parse_location(paths[1] if paths[0] == _STREAM else paths[0])
    if location.is_local:
        raise CliError(f"{location.text}: with '-' the other side must be on a volume")
    try:
        volume, path = volumes.of(location)
        if paths[0] == _STREAM:
            if location.has_slash:
                raise IsADirectory("copy", path, "must be the name of a file")
            _store_stream(volume, path, location, options, output)
            return 0
        if output is Output.JSON:
            raise CliError("-o json and '-' would both write to standard output")
        for block in iterate(volume, path):
            sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()
    except VolumeError as error:
        raise as_cli_error(location, error) from None
    return 0


def _store_stream(
    volume: Volume, path: str, location: Location, options: CopyOptions, output: Output
) -> None:
    """Raises VolumeError."""
    from trainmount_files import AlreadyExists
    from trainmount_files.transfer import upload_stream
    from trainmount_files.wording import printable

    result: dict[str, Any] = {"copied": 0, "bytes": 0, "failed": [], "skipped": []}
    try:
        stored = upload_stream(volume, path, sys.stdin.buffer, overwrite=options.overwrite)
        result |= {"copied": 1, "bytes": stored.size_bytes}
    except AlreadyExists:
        if options.overwrite:
            raise
        result["skipped"] = [{"path": location.text, "reason": "exists"}]
    if output is Output.JSON:
        print_data(result)
    elif result["skipped"]:
        print(f"trainmount: {printable(location.text)}: skipped: exists", file=sys.stderr)
