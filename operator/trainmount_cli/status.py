"""`trainmount status`: what is mounted here, and how it is."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmount_cli.errors import EXIT_FAILED
from trainmount_cli.mounts import MountpointArgument, as_cli_errors, as_path
from trainmount_cli.options import OutputOption
from trainmount_cli.output import Output, print_data, select

__all__ = ["status"]


def status(
    mountpoint: MountpointArgument = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="The numbers of one mount, as Prometheus reads them.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Tell of a mount, or of all of this user: source, daemon, cache, memory, and every file whose
    last bytes are only here.

    Exit status: 0 all answer, 1 a daemon gives no answer, 2 no such mount.
    """
    select(output)
    from trainmount_fuse.control import actions
    from trainmount_fuse.control.text import status_lines

    with as_cli_errors():
        if metrics:
            print(actions.metrics(as_path(mountpoint)), end="")
            return
        found = actions.statuses(as_path(mountpoint))
    if output is Output.JSON:
        print_data({"mounts": found})
    elif not found:
        print("nothing is mounted")
    else:
        print("\n".join(line for one in found for line in status_lines(one)))
    raise typer.Exit(EXIT_FAILED if any("error" in one for one in found) else 0)
