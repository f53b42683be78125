"""Which programs use a mount, told without touching it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["describe_users"]

MAX_SHOWN: Final = 5


def describe_users(mountpoint: Path) -> str:
    """` (name 123, ...)` of the programs that this user may look at; empty where there is none."""
    users = [f"{_name(process)} {process.name}" for process in _users(mountpoint)]
    if not users:
        return ""
    more = ", ..." if len(users) > MAX_SHOWN else ""
    return f" ({', '.join(users[:MAX_SHOWN])}{more})"


def _users(mountpoint: Path) -> Iterator[Path]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and any(_lies_in(link, mountpoint) for link in _links(process)):
            yield process


def _links(process: Path) -> Iterator[Path]:
    try:
        yield process / "cwd"
        yield process / "root"
        yield from (process / "fd").iterdir()
        yield from (process / "map_files").iterdir()
    except OSError:
        # It ended, or belongs to somebody else.
        return


def _lies_in(link: Path, mountpoint: Path) -> bool:
    try:
        return link.readlink().is_relative_to(mountpoint)
    except OSError:
        return False


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").strip()
    except OSError:
        return "?"
