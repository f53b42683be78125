"""`trainmount refresh`: ask the store again for names, sizes and listings."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmount_cli.mounts import MountOption, as_cli_errors, as_path
from trainmount_cli.options import OutputOption
from trainmount_cli.output import Output, print_data, select

__all__ = ["refresh"]


def refresh(
    paths: Annotated[list[str] | None, typer.Argument(metavar="PATH")] = None,
    mount: MountOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Forget what is known of paths and all below them, or of a whole mount: the next look asks
    the store. Cached bytes stay, since they are known by their version.

    Exit status: 0 done, 1 no daemon answers, 2 no such mount.
    """
    select(output)
    from trainmount_cli.transfers import interruptible
    from trainmount_fuse.control import actions

    with interruptible("refresh"), as_cli_errors():
        answers = actions.refresh(paths or [], as_path(mount))
    if output is Output.JSON:
        print_data({"mounts": [{"mountpoint": str(one.mount.mountpoint)} for one in answers]})
