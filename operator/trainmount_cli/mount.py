"""`trainmount mount`: a volume as a directory. Its options are those of
`python -m trainmount_fuse mount`, to which all arguments go.
"""

from __future__ import annotations

import typer

__all__ = ["mount"]


def mount(context: typer.Context) -> None:
    """Mount a volume at a directory: mount SOURCE MOUNTPOINT."""
    from trainmount_fuse.main import main

    raise typer.Exit(main(["mount", *context.args], program="trainmount"))
