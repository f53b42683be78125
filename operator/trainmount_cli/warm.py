"""`trainmount warm`: files into a mount's cache before they are read."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmount_cli.mounts import ListOption, MountOption, change_cache
from trainmount_cli.options import OutputOption
from trainmount_cli.output import Output

__all__ = ["warm"]


def warm(
    patterns: Annotated[list[str] | None, typer.Argument(metavar="GLOB")] = None,
    list_file: ListOption = None,
    mount: MountOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Bring files into the cache of their mount, many at a time, as far as they fit.

    A path is one on the mount or in its volume; a directory is all that is below it; ** is any
    number of directories. Exit status: 0 all warm, 1 some are not and are named, 2 wrong arguments,
    130 interrupted.
    """
    from trainmount_fuse.control.text import warm_lines

    change_cache(
        "warm", patterns or [], list_file, mount, output, lambda answer: [*warm_lines(answer)]
    )
