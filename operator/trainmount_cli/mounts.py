"""What `status`, `warm`, `evict`, `flush` and `refresh` share. Their work is that of
`trainmount_fuse.control`, which `python -m trainmount_fuse` has too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainmount_cli.errors import EXIT_FAILED, EXIT_USAGE, CliError
from trainmount_cli.output import Output, print_data, select

__all__ = [
    "ListOption",
    "MountOption",
    "MountpointArgument",
    "as_cli_errors",
    "as_path",
    "change_cache",
]

# As text: typer looks at a path, and a mount whose daemon hangs lets nobody look.
MountpointArgument = Annotated[
    str | None, typer.Argument(metavar="MOUNTPOINT", help="The only mount by default.")
]
MountOption = Annotated[
    str | None,
    typer.Option("--mount", metavar="MOUNTPOINT", help="Where there are several."),
]
ListOption = Annotated[
    str | None,
    typer.Option("--list", metavar="FILE", help="One path a line; - is standard input."),
]


@contextlib.contextmanager
def as_cli_errors() -> Iterator[None]:
    """Let what a mount cannot do be one line and an exit status."""
    from trainmount_files.wording import printable
    from trainmount_fuse.control.protocol import ControlError

    try:
        yield
    except ControlError as error:
        code = "NOT_FOUND" if error.exit_code == EXIT_USAGE else "INTERNAL_ERROR"
        message = printable(str(error))
        raise CliError(message, code=code, exit_status=error.exit_code) from None


def as_path(mountpoint: str | None) -> Path | None:
    return None if mountpoint is None else Path(mountpoint)


def change_cache(
    request: str,
    patterns: Sequence[str],
    list_file: str | None,
    mount: str | None,
    output: Output,
    lines: Callable[[Any], Sequence[str]],
) -> None:
    """`warm` or `evict` with a bar, and exit; `lines` is what one mount's answer reads like."""
    select(output)
    from trainmount_cli.transfers import interruptible, print_failures, showing_progress
    from trainmount_files.trees import Report
    from trainmount_fuse.control import actions

    report = Report()

    def progress(counts: Mapping[str, int]) -> None:
        for name, value in counts.items():
            setattr(report, name, value)

    with interruptible(request), as_cli_errors():
        wanted = [*patterns, *(actions.read_list(list_file) if list_file else ())]
        with showing_progress(f"{request}ed", [report]):
            answers = actions.change_cache(request, wanted, as_path(mount), progress)
    failures = [failure for one in answers for failure in one.failures()]
    if output is Output.JSON:
        results = [{"mountpoint": str(a.mount.mountpoint), **a.answer.result} for a in answers]
        print_data({"mounts": results, "failed": failures})
        raise typer.Exit(EXIT_FAILED if failures else 0)
    for one in answers:
        for line in lines(one.answer):
            print(line)
    raise typer.Exit(print_failures([{**f, "message": f["reason"]} for f in failures]))
