"""Processes by identity, not by number alone.

The system gives a number again, perhaps to somebody else's process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rig.waiting import wait_for

__all__ = ["ProcessId", "identify", "namespaces_in_use", "namespaces_of"]

_NAMESPACES = ("mnt", "net", "pid")


@dataclass(frozen=True)
class ProcessId:
    """A process of this machine: its number and when it started, in clock ticks since boot."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        return identify(self.pid) == self

    def kill(self, *, timeout_seconds: float = 20) -> None:
        """`kill -9`, and wait until it is gone. A process that ended already is fine.

        Raises:
            NotReadyError: it hangs in the kernel.
        """
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        wait_for(
            f"the end of process {self.pid}",
            lambda: not self.is_alive(),
            timeout_seconds=timeout_seconds,
            period_seconds=0.05,
        )


def identify(pid: int) -> ProcessId | None:
    """The process with this number now, or None; a zombie counts as gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may hold anything; field 3 (state) follows the last one.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def namespaces_of(pid: int) -> frozenset[str]:
    """The namespaces of a process that a machine of ours has for itself, as `net:[4026532281]`."""
    return frozenset(str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in _NAMESPACES)


def namespaces_in_use(wanted: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Processes that are in one of `wanted`, with its name."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for namespace in namespaces_of(int(folder.name)) & wanted:
                yield int(folder.name), namespace
