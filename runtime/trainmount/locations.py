"""Where a path leads: to a directory of this machine (a mount among them), or straight to a store.

Called by the dataset's sources and by the checkpoint stores, so that both decide alike.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["is_local", "local_path", "whole_path"]

_VOLUMES: Final = "/Volumes/"
# /Volumes/<catalog>/<schema>/<volume>: nothing above it can be a mounted volume.
_VOLUME_DEPTH: Final = 5


def is_local(path: str) -> bool:
    """True if `path` is read through the file system; False if the volume client has to.

    A path below `/Volumes` is local if its volume, or a directory of it, is mounted here.
    """
    if "://" in path or path.startswith("dbfs:"):
        return path.startswith("file:///")
    if not path.startswith(_VOLUMES):
        return True
    parts = Path(path).parts
    return any(
        Path(*parts[:depth]).is_dir()
        for depth in range(_VOLUME_DEPTH, max(_VOLUME_DEPTH, len(parts)) + 1)
    )


def whole_path(path: str | os.PathLike[str]) -> str:
    """`path` so that it means the same wherever the process goes afterwards: a program may change
    its directory between two saves.
    """
    text = os.fspath(path)
    is_whole = "://" in text or text.startswith(("/", "dbfs:"))
    return text if is_whole or not text else os.path.abspath(text)  # noqa: PTH100 - as below


def local_path(path: str) -> Path:
    """The directory of a local `path`, absolute."""
    return Path(os.path.abspath(path.removeprefix("file://")))  # noqa: PTH100 - must not follow links, nor touch the mount
