"""What a walk finds: the words between sources, routes and the engine. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from trainmount_files.errors import VolumeError

__all__ = ["Entry", "below"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of a directory."""

    path: str
    """Relative to the root of the tree; empty where the root itself is a file."""

    is_directory: bool

    size_bytes: int = 0
    """As the listing has it; 0 where the source tells it only when the file is opened."""

    version: str = ""
    """As `FileStat.version`; empty where the source has none."""

    skip_reason: str = ""
    """Why it is left out on purpose; empty where it is not."""

    refusal: VolumeError | None = None
    """Why it cannot be copied."""


def below(root: str, path: str) -> str:
    """`path` relative to `root`, as seen from where `root` is; either may be empty."""
    return f"{root}/{path}" if root and path else root or path
