"""Process ids inside and outside of a run's PID namespace, read from the machine's own `/proc`.

The run's first process keeps a descriptor of that `/proc` from before it moved, because the ids
that other programs need (`status.json`) are the machine's. Called by `agent` and `gang`.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

__all__ = ["Process", "ProcessTable"]


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run."""

    inner_pid: int
    """Its id for processes of the run: what `os.kill` takes here."""

    outer_pid: int
    """Its id on the machine."""

    outer_parent_pid: int


class ProcessTable:
    """All processes below the calling one, which is the first of its PID namespace."""

    def __init__(self, proc_fd: int) -> None:
        """`proc_fd`: the machine's `/proc`, opened for reading."""
        self._proc_fd = proc_fd

    @property
    def own_outer_pid(self) -> int:
        return int(os.readlink("self", dir_fd=self._proc_fd))

    def descendants(self) -> dict[int, Process]:
        """By inner id. A process that ends meanwhile may or may not be among them."""
        parents: dict[int, int] = {}
        inner: dict[int, int] = {}
        for name in os.listdir(self._proc_fd):  # noqa: PTH208  a descriptor, not a path
            if name.isdecimal():
                with contextlib.suppress(OSError):
                    parent, last = self._read_status(name)
                    parents[int(name)] = parent
                    inner[int(name)] = last
        own = self.own_outer_pid
        return {
            inner[pid]: Process(inner[pid], pid, parents[pid])
            for pid in parents
            if _is_below(pid, own, parents)
        }

    def outer_pid(self, inner_pid: int) -> int | None:
        """The machine's id of a process of the run; None if it is gone."""
        process = self.descendants().get(inner_pid)
        return None if process is None else process.outer_pid

    def families(self, inner_pids: set[int]) -> set[int]:
        """These processes and everything below them, by inner ids."""
        table = self.descendants()
        roots = {table[pid].outer_pid for pid in inner_pids if pid in table}
        parents = {process.outer_pid: process.outer_parent_pid for process in table.values()}
        return {
            process.inner_pid
            for process in table.values()
            if process.outer_pid in roots
            or any(_is_below(process.outer_pid, root, parents) for root in roots)
        }

    def _read_status(self, name: str) -> tuple[int, int]:
        """The parent's id, and the id in the innermost namespace."""
        fd = os.open(f"{name}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc_fd)
        with os.fdopen(fd, "rb") as file:
            fields = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
        return int(fields[b"PPid"]), int(fields[b"NSpid"].split()[-1])


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    current = parents.get(pid, 0)
    while current and current != ancestor:
        current = parents.get(current, 0)
    return current == ancestor
