"""`trainmount evict`: room in a mount's cache."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmount_cli.mounts import ListOption, MountOption, change_cache
from trainmount_cli.options import OutputOption
from trainmount_cli.output import Output

__all__ = ["evict"]


def evict(
    patterns: Annotated[list[str] | None, typer.Argument(metavar="GLOB")] = None,
    list_file: ListOption = None,
    mount: MountOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Free what the cache keeps of files; what is not uploaded yet is no part of it.

    Paths are as for warm. Exit status: 0 done, 1 some or all failed, 2 wrong arguments,
    130 interrupted.
    """
    from trainmount_fuse.control.text import evict_line

    change_cache(
        "evict", patterns or [], list_file, mount, output, lambda answer: [evict_line(answer)]
    )
