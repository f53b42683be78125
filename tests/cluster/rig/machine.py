"""A machine of the rig: a process tree in namespaces and control groups of its own.

The first process runs a shell script; when it is killed, the kernel ends every process of the
machine, and the network, mounts and so on that they held go with them: that is a machine that loses
its power.
"""

from __future__ import annotations

import contextlib
import subprocess
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rig.cgroups import create_groups, remove_groups, settle_launcher
from rig.errors import NotReadyError
from rig.processes import ProcessId, held_namespaces, identify, namespaces_in_use
from rig.waiting import wait_for

__all__ = ["Machine", "kill_machine", "start_machine"]

_JOIN_AND_UNSHARE = """
echo $$ > "$1"; script=$2; shift 2
for group in "$@"; do echo 0 > "$group/cgroup.procs"; done
exec unshare --net --mount --mount-proc --pid --uts --ipc --cgroup --fork --kill-child \\
  bash "$script"
"""
_LAUNCH = ("setsid", "--fork", "bash", "-euc", _JOIN_AND_UNSHARE, "machine")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A running machine, as it is recorded in the rig's file."""

    name: str
    launcher: ProcessId
    """The process outside that waits for the machine's end."""

    first: ProcessId
    """The machine's process 1, by its number outside."""

    groups: tuple[Path, ...]

    def is_alive(self) -> bool:
        """Whether its first process runs."""
        return self.first.is_alive()

    def enter(self, *command: str) -> list[str]:
        """The command line that runs `command` in this machine's network, as a process outside."""
        return ["nsenter", f"--net=/proc/{self.first.pid}/ns/net", *command]

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` in all namespaces of this machine."""
        return ["nsenter", f"--target={self.first.pid}", "--all", *command]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `from_json`."""
        plain = asdict(self)
        plain["groups"] = [str(group) for group in self.groups]
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Machine:
        """The machine that `to_json` described."""
        return cls(
            name=plain["name"],
            launcher=ProcessId(**plain["launcher"]),
            first=ProcessId(**plain["first"]),
            groups=tuple(Path(group) for group in plain["groups"]),
        )


def start_machine(
    rig: str, name: str, home: Path, script: Path, *, descriptors: tuple[int, ...] = ()
) -> Machine:
    """Start `script` as the first process of a new machine; it inherits `descriptors`.

    The script's output goes to `console.log` in `home`. Its network has no device but a loopback
    that is down: the caller configures it.
    """
    groups = create_groups(rig, name)
    pid_file = home / "launcher.pid"
    pid_file.unlink(missing_ok=True)
    with (home / "console.log").open("ab") as console:
        # setsid forks: the machine has no parent that would have to reap it, and no terminal.
        subprocess.run(
            [*_LAUNCH, str(pid_file), str(script), *(str(group) for group in groups)],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            pass_fds=descriptors,
            check=True,
        )
    what = f"machine {name} to start, see {home}/console.log"
    pid = wait_for(what, lambda: _number_in(pid_file), timeout_seconds=30, period_seconds=0.02)
    launcher = identify(pid)
    child = wait_for(what, lambda: _only_child(pid), timeout_seconds=30, period_seconds=0.02)
    first = identify(child)
    if launcher is None or first is None:
        raise NotReadyError(f"machine {name} ended at once, see {home}/console.log")
    settle_launcher(groups, pid)
    return Machine(name=name, launcher=launcher, first=first, groups=tuple(groups))


def _number_in(file: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(file.read_text())
    return None


def _only_child(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError) as gone:
        raise NotReadyError(f"the process {pid} that starts a machine ended") from gone
    return int(children[0]) if children else None


def kill_machine(machine: Machine) -> None:
    """`kill -9` of the first process; returns when nothing of the machine is left.

    Raises:
        NotReadyError: a process of it hangs in the kernel.
    """
    with held_namespaces(machine.first.pid) if machine.is_alive() else nullcontext() as held:
        machine.first.kill()
        machine.launcher.kill()
        remove_groups(machine.groups)
        namespaces = held or frozenset[str]()
        wait_for(
            lambda: f"{machine.name} to be left by {sorted(namespaces_in_use(namespaces))}",
            lambda: not any(namespaces_in_use(namespaces)),
            timeout_seconds=10,
        )
    with contextlib.suppress(OSError):  # other machines of the rig are still there
        for group in machine.groups:
            launchers = group.parent / "launchers"
            if launchers.is_dir():
                launchers.rmdir()
    for group in machine.groups:
        with contextlib.suppress(OSError):
            group.parent.rmdir()
