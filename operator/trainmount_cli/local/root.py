"""The file tree a run sees: the machine's own, plus the mount points of its volumes.

`/Volumes` need not exist on the machine and is not made there. A new root directory on a tmpfs
mirrors the old one by bind mounts and has the missing directories besides; only the processes of
the run see it. Called by `agent`, inside of the run's mount namespace.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from trainmount_cli.local.namespaces import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_REC,
    MS_SLAVE,
    MS_UNBINDABLE,
    mount,
    pivot_root,
)

__all__ = ["enter_root"]

_log = logging.getLogger(__name__)


def enter_root(scratch: Path, mount_points: Iterable[PurePosixPath]) -> None:
    """Move this process into a root directory in which every one of `mount_points` is a directory.

    `scratch` is an empty directory that the new root covers; nothing is written into it.

    Raises:
        OSError: a step is not allowed here.
    """
    # What the machine unmounts later is unmounted here too; nothing goes the other way.
    mount("none", Path("/"), flags=MS_REC | MS_SLAVE)
    mount("tmpfs", scratch, filesystem_type="tmpfs", flags=MS_NOSUID, data="mode=755,size=4m")
    # Or the tree below would contain itself.
    mount("none", scratch, flags=MS_UNBINDABLE)
    wanted = {PurePosixPath(str(point).lstrip("/")) for point in mount_points}
    _mirror(Path("/"), scratch, wanted)
    for point in wanted:
        (scratch / point).mkdir(parents=True, exist_ok=True)
    _mount_proc(scratch / "proc")
    pivot_root(scratch)


def _mirror(source: Path, target: Path, wanted: set[PurePosixPath]) -> None:
    """Show the entries of `source` in `target`, an empty directory of the tmpfs.

    An entry on the way to a directory that is wanted and missing cannot be bound as it is: it is
    mirrored one level deeper, where there is room for another name.
    """
    for entry in os.scandir(source):
        place = target / entry.name
        below = {
            point.relative_to(entry.name)
            for point in wanted
            if point.parts[0] == entry.name and len(point.parts) > 1
        }
        is_missing = any(not (source / entry.name / point).is_dir() for point in below)
        try:
            if entry.is_symlink() and not is_missing:
                place.symlink_to(Path(entry.path).readlink())
            elif entry.is_dir(follow_symlinks=False) and is_missing:
                place.mkdir()
                _mirror(Path(entry.path), place, below)
            elif entry.is_dir(follow_symlinks=False):
                if entry.path != "/proc":
                    place.mkdir()
                    mount(entry.path, place, flags=MS_BIND | MS_REC)
            elif not entry.is_symlink():
                place.touch()
                mount(entry.path, place, flags=MS_BIND)
        except OSError as error:
            # A file system that this user may not bind is missing inside; most jobs do not care.
            _log.warning(
                "Left out of the run's root", extra={"path": entry.path, "error": str(error)}
            )


def _mount_proc(place: Path) -> None:
    """The processes of the new PID namespace; those of the machine where that is not allowed."""
    place.mkdir(exist_ok=True)
    try:
        mount("proc", place, filesystem_type="proc", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except PermissionError:
        # Inside containers that hide a part of /proc the kernel refuses a whole one.
        mount("/proc", place, flags=MS_BIND | MS_REC)
