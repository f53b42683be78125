"""`trainmount mount`, `remount` and `unmount`: a volume as a directory. Their options are those of
`python -m trainmount_fuse`, to which all arguments go.
"""

from __future__ import annotations

from typing import NoReturn

import typer

__all__ = ["mount", "remount", "unmount"]


def mount(context: typer.Context) -> None:
    """Mount a volume at a directory: mount SOURCE MOUNTPOINT."""
    _hand_on("mount", context)


def remount(context: typer.Context) -> None:
    """Renew a mount in place: remount MOUNTPOINT, with new code, credentials or options."""
    _hand_on("remount", context)


def unmount(context: typer.Context) -> None:
    """Upload what is unsent and end a mount: unmount MOUNTPOINT."""
    _hand_on("unmount", context)


def _hand_on(command: str, context: typer.Context) -> NoReturn:
    from trainmount_fuse.main import main

    raise typer.Exit(main([command, *context.args]))
