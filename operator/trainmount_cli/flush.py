"""`trainmount flush`: everything that was written to a mount is in its store."""

from __future__ import annotations

import typer

from trainmount_cli.errors import EXIT_FAILED
from trainmount_cli.mounts import MountpointArgument, as_cli_errors, as_path
from trainmount_cli.options import OutputOption
from trainmount_cli.output import Output, print_data, select

__all__ = ["flush"]


def flush(mountpoint: MountpointArgument = None, output: OutputOption = Output.TEXT) -> None:
    """Upload what is written and not uploaded yet, open files too, and what failed before.

    Exit status: 0 the store has everything, 1 some files are only here and are named, 2 no such
    mount, 130 interrupted.
    """
    select(output)
    from trainmount_cli.transfers import interruptible, print_failures
    from trainmount_fuse.control import actions
    from trainmount_fuse.control.text import flush_line

    with interruptible("flush"), as_cli_errors():
        done = actions.flush(as_path(mountpoint))
    failures = done.failures()
    if output is Output.JSON:
        print_data({**done.answer.result, "failed": failures})
        raise typer.Exit(EXIT_FAILED if failures else 0)
    print(flush_line(done.answer))
    messages = [f"{one['reason']}; its bytes are in {one['bytes']}" for one in failures]
    pairs = zip(failures, messages, strict=True)
    raise typer.Exit(print_failures([{**one, "message": text} for one, text in pairs]))
