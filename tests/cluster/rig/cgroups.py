"""Control groups: each machine of a rig has one of its own in every hierarchy.

They give a node a root of its own to put pods in, count every process of the rig wherever it went,
and are gone after `down`. Version 1, version 2 and both together are understood.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from rig.waiting import wait_for

__all__ = ["create_groups", "members", "mounts_of", "remove_groups", "settle_launcher"]


def _hierarchies() -> list[tuple[Path, str, Path]]:
    """Mount point, type (cgroup or cgroup2) and our own group below it, of each hierarchy."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mount_point = Path(before.split(" ")[4])
        if kind == "cgroup2":
            # Groups with processes can't have inner groups with controllers: start at the root.
            found.append((mount_point, kind, mount_point))
        elif kind == "cgroup":
            names = set(options.split(","))
            group = next((path for key, path in own.items() if set(key.split(",")) <= names), "/")
            # Below our own group, so that a limit which holds for us holds for the rig.
            found.append((mount_point, kind, mount_point / group.lstrip("/")))
    return found


def create_groups(rig: str, machine: str) -> list[Path]:
    """Make the groups of a machine, one in each hierarchy; their parents are the rig's."""
    groups = []
    for _, kind, base in _hierarchies():
        parent = base / f"trainmount-rig-{rig}"
        group = parent / machine
        group.mkdir(parents=True, exist_ok=True)
        if kind == "cgroup":
            for level in (parent, group):
                _inherit_cpuset(level)
        else:
            for level in (base, parent):
                _delegate(level)
            (parent / "launchers").mkdir(exist_ok=True)
        groups.append(group)
    return groups


def _inherit_cpuset(group: Path) -> None:
    # A new group of the version 1 cpuset hierarchy has no processors: nothing may enter it.
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists() and not (group / name).read_text().strip():
            (group / name).write_text((group.parent / name).read_text())


def _delegate(group: Path) -> None:
    for controller in (group / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):  # some are not for us, as in a container
            (group / "cgroup.subtree_control").write_text(f"+{controller}")


def settle_launcher(groups: Iterable[Path], launcher: int) -> None:
    """Move the process that started a machine out of the machine's version 2 group.

    Otherwise the machine could not hand controllers on to the groups of its pods.
    """
    for group in groups:
        side = group.parent / "launchers"
        if side.is_dir():
            (side / "cgroup.procs").write_text(str(launcher))


def mounts_of(groups: Iterable[Path]) -> list[tuple[Path, Path]]:
    """Pairs (group, mount point of its hierarchy): what a machine mounts over what."""
    pairs = []
    for group in groups:
        mount_point = max(
            (mount for mount, *_ in _hierarchies() if group.is_relative_to(mount)),
            key=lambda mount: len(mount.parts),
        )
        pairs.append((group, mount_point))
    return pairs


def members(groups: Iterable[Path]) -> set[int]:
    """Numbers of all processes in `groups` and below."""
    found: set[int] = set()
    for group in groups:
        for folder, _, files in os.walk(group):
            if "cgroup.procs" in files:
                with contextlib.suppress(OSError):
                    found |= {int(pid) for pid in Path(folder, "cgroup.procs").read_text().split()}
    return found - {0}


def remove_groups(groups: Iterable[Path], *, timeout_seconds: float = 20) -> None:
    """Kill what is left in `groups` and remove them with everything below.

    Raises:
        NotReadyError: a process hangs in the kernel, so its group stays.
    """
    groups = [group for group in groups if group.is_dir()]

    def emptied() -> bool:
        left = members(groups)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_for(
        lambda: f"processes {sorted(members(groups))} to end",
        emptied,
        timeout_seconds=timeout_seconds,
        period_seconds=0.05,
    )
    for group in groups:
        for folder, _, _ in os.walk(group, topdown=False):
            # The kernel frees a group a moment after its last process.
            wait_for(f"removal of {folder}", partial(_removed, folder), timeout_seconds=10)


def _removed(folder: str) -> bool:
    with contextlib.suppress(FileNotFoundError, OSError):
        Path(folder).rmdir()
    return not Path(folder).exists()
