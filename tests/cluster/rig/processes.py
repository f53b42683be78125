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

__all__ = ["ProcessId", "held_namespaces", "identify", "namespaces_in_use"]

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


@contextlib.contextmanager
def held_namespaces(*pids: int) -> Iterator[frozenset[str]]:
    """The namespaces of processes, named as `net:[4026532281]`, kept alive meanwhile.

    The system gives a name again when a namespace has ended: only while one is held can its name
    tell whether somebody is still in it. Processes that have ended are left out.
    """
    with contextlib.ExitStack() as stack:
        names = set()
        for pid in pids:
            for kind in _NAMESPACES:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    path = Path(f"/proc/{pid}/ns/{kind}")
                    stack.enter_context(path.open("rb"))
                    names.add(str(path.readlink()))
        yield frozenset(names)


def namespaces_in_use(wanted: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Pairs (process, namespace) of who is in one of `wanted`, which the caller holds."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for kind in _NAMESPACES:
                namespace = str((folder / "ns" / kind).readlink())
                if namespace in wanted:
                    yield int(folder.name), namespace
