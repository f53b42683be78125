"""One attempt: a process group a node, all of them or none. Called by `agent`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from trainmount_cli.local.children import Children
from trainmount_cli.local.processes import ProcessTable
from trainmount_cli.local.store import RunFolder
from trainmount_operator.environment import NodePlacement, mlflow_run_id, node_environment
from trainmount_operator.job import TrainingJob

__all__ = ["Gang"]

_MASTER_ADDRESS: Final = "127.0.0.1"
_POLL_SECONDS: Final = 0.1

# A launcher's own, which a shell that was started by one would hand down.
_NOT_INHERITED: Final = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK")


class Gang:
    """The nodes of one attempt."""

    def __init__(
        self,
        job: TrainingJob,
        number: int,
        folder: RunFolder,
        *,
        children: Children,
        table: ProcessTable,
    ) -> None:
        self.number = number
        self._job = job
        self._folder = folder
        self._children = children
        self._table = table
        self._pids: dict[int, int] = {}
        """By node rank."""

    def start(self, environment: Mapping[str, str]) -> None:
        """Start every node's command; `environment` is what all of them share."""
        compute = self._job.spec.compute
        port = _free_port()
        directory = self._folder.code if self._folder.code.is_dir() else self._folder.path
        for rank in range(compute.num_nodes):
            placement = NodePlacement(
                job_name=self._job.name,
                attempt=self.number,
                num_nodes=compute.num_nodes,
                accelerators_per_node=compute.accelerators_per_node,
                master_addr=_MASTER_ADDRESS,
                master_port=port,
                node_rank=rank,
                run_id=mlflow_run_id(self._folder.run_id, self.number),
                code_source_path=_if_there(self._folder.code),
                hyperparameters_path=_if_there(self._folder.parameters),
            )
            shared = {k: v for k, v in environment.items() if k not in _NOT_INHERITED}
            shared |= _visible_accelerators(rank, compute.accelerators_per_node, compute.num_nodes)
            self._pids[rank] = self._children.start(
                ["bash", "-euo", "pipefail", "-c", self._job.spec.command],
                log=self._folder.attempt_logs(self.number) / f"node-{rank}.log",
                environment=node_environment(placement, shared),
                directory=directory,
            )

    def outer_pids(self) -> list[dict[str, int | None]]:
        """`{"rank", "pid"}` of every node, with the machine's process ids."""
        outer = {pid: process.outer_pid for pid, process in self._table.descendants().items()}
        return [{"rank": rank, "pid": outer.get(pid)} for rank, pid in self._pids.items()]

    @property
    def exit_codes(self) -> dict[int, int]:
        """By node rank, of the nodes that have ended."""
        codes = self._children.exit_codes
        return {rank: codes[pid] for rank, pid in self._pids.items() if pid in codes}

    def first_failed(self) -> int | None:
        """The rank of the node that failed first."""
        ended = list(self._children.exit_codes)  # in the order of their ends
        failed = [rank for rank, code in self.exit_codes.items() if code != 0]
        return min(failed, key=lambda rank: ended.index(self._pids[rank]), default=None)

    def has_succeeded(self) -> bool:
        return len(self.exit_codes) == len(self._pids) and not any(self.exit_codes.values())

    def stop(self, grace_seconds: float, is_service: Callable[[], set[int]]) -> None:
        """End every process of the attempt: SIGTERM to each node, SIGKILL to what is left.

        Launchers put their ranks into sessions of their own, and a rank outlives a launcher that is
        killed: so what is left is every process of the namespace that `is_service` does not name.
        """
        for rank, pid in self._pids.items():
            if rank not in self.exit_codes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while left := self._left(is_service):
            if time.monotonic() >= deadline:
                for pid in left:
                    _kill(pid)
            self._children.wait(_POLL_SECONDS)

    def _left(self, is_service: Callable[[], set[int]]) -> set[int]:
        self._children.reap()
        everything = set(self._table.descendants())
        return everything - self._table.families(is_service())


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((_MASTER_ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port


def _if_there(path: Path) -> str | None:
    return str(path) if path.exists() else None


def _visible_accelerators(rank: int, per_node: int, num_nodes: int) -> dict[str, str]:
    """Each node its own GPUs, where the machine has enough for all."""
    try:
        available = len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return {}
    if available < per_node * num_nodes or "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    first = rank * per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + per_node)))}
