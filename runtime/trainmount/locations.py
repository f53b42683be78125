"""Where a path leads: to a directory of this machine (a mount among them), or straight to a store.

Called by the dataset's sources and by the checkpoint stores, so that both decide alike.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["is_local", "local_path"]

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


def local_path(path: str) -> Path:
    """The directory of a local `path`, absolute."""
    return Path(os.path.abspath(path.removeprefix("file://")))  # noqa: PTH100 - must not follow links, nor touch the mount
