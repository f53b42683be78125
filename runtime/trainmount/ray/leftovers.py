"""What tasks of an earlier run left behind, told by exact names. Called by `recovery.py` when a run
is planned, and by `job.py` when one has succeeded.

The tasks that did not commit are claimed: their pending files get names that no task knows, so that
none can be committed any more. They are kept until the job has succeeded, and swept once more then:
a task may have been in the midst of its data file.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from pyarrow.fs import FileSelector, FileType  # type: ignore[import-untyped]

from trainmount.ray.filesystem import CheckpointHandler
from trainmount.ray.names import hidden, owners, pending_base

__all__ = ["claim", "sweep"]

_ABANDONED: Final = "_trainmount_abandoned_"
"""Before the base of a task that did not commit."""


def claim(handler: CheckpointHandler) -> None:
    """Let no task that is pending in the checkpoint's directory commit any more."""
    names = handler.files_in_directory()
    committed = set(_committed(names))
    bases = {name: pending_base(name) for name in names if not hidden(name)}
    handler.rename_in_directory(
        (name, f"{_ABANDONED}{base}")
        for name, base in bases.items()
        # What is there twice was committed by a copy of which the original was not yet removed.
        if base is not None and base not in committed
    )


def sweep(handler: CheckpointHandler, folder: str, filesystem: Any) -> int:
    """Delete the data files below `folder` of the tasks that are claimed; how many those were."""
    names = handler.files_in_directory()
    committed = set(_committed(names))
    abandoned = {name.removeprefix(_ABANDONED) for name in names if name.startswith(_ABANDONED)}
    abandoned -= committed
    if not abandoned:
        return 0
    selector = FileSelector(folder, recursive=True, allow_not_found=True)
    files = [info.path for info in filesystem.get_file_info(selector) if info.type == FileType.File]
    owner = owners(abandoned | committed, {posixpath.basename(path) for path in files})
    num = 0
    for path in files:
        if owner.get(posixpath.basename(path)) in abandoned:
            with suppress(FileNotFoundError):
                filesystem.delete_file(path)
                num += 1
    return num


def _committed(names: Iterable[str]) -> Iterable[str]:
    """The bases of committed checkpoint files."""
    for name in names:
        if not hidden(name) and pending_base(name) is None and name.endswith(".parquet"):
            yield name.removesuffix(".parquet")
