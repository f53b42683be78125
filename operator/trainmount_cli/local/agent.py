"""The first process of a run: starts the services, runs attempts until the job ends, tears down.

Called by `supervisor` in a fresh PID and mount namespace; when this process ends, by whatever, the
kernel ends everything else of the run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Final

from trainmount_cli.local.children import Children
from trainmount_cli.local.gang import Gang
from trainmount_cli.local.processes import ProcessTable
from trainmount_cli.local.progress import CANCELLED, INTERRUPTED, Progress
from trainmount_cli.local.root import enter_root
from trainmount_cli.local.services import ServiceError, Services, WantedMount
from trainmount_cli.local.store import RunFolder
from trainmount_cli.local.volumes import volume_name
from trainmount_operator.job import TrainingJob
from trainmount_operator.status import Outcome, Reason

__all__ = ["CANCEL_FILE", "run_agent"]

_log = logging.getLogger(__name__)

CANCEL_FILE: Final = "cancel"
"""In the run's folder: the stop that comes is a person's."""

_TICK_SECONDS: Final = 0.25
_FIRST_BACKOFF_SECONDS: Final = 1.0
_LONGEST_BACKOFF_SECONDS: Final = 60.0
_MAX_LOST_MOUNTS: Final = 20


@dataclass(frozen=True, kw_only=True)
class _End:
    """How an attempt ended."""

    outcome: Outcome
    reason: str
    message: str
    decisive_rank: int | None = None


class _Stop(Exception):
    """SIGTERM came."""


def run_agent(
    folder: RunFolder,
    job: TrainingJob,
    progress: Progress,
    *,
    data: Path,
    secrets: Mapping[str, str],
    proc_fd: int,
) -> None:
    """Run the job to an end that `progress` tells. `proc_fd` is the machine's `/proc`."""
    children = Children()
    table = ProcessTable(proc_fd)
    mounts = [
        WantedMount(path=Path(v.path), source=v.source or v.path, read_only=v.read_only)
        for v in job.spec.volumes
    ]
    names = [volume_name(mount.source) for mount in mounts]
    services = Services(
        folder,
        children=children,
        table=table,
        progress=progress,
        data=data,
        volumes=sorted({name for name in names if name is not None}),
        mounts=mounts,
    )
    progress.pids["init"] = table.own_outer_pid
    progress.begin()
    agent = _Agent(folder, job, progress, children, table, services, secrets)
    try:
        enter_root(folder.scratch_root, [PurePosixPath(mount.path) for mount in mounts])
    except OSError as error:
        progress.failed("SandboxUnavailable", f"cannot build the run's file tree: {error}")
        return
    try:
        services.start()
        agent.run()
    except _Stop:
        agent.note_stop()
    except ServiceError as error:
        if children.is_stopping:
            agent.note_stop()
        else:
            progress.failed(Reason.VOLUME_UNAVAILABLE, str(error))
    finally:
        for problem in services.stop():
            progress.note("VolumeNotUnmounted", problem)


class _Agent:
    """The attempts of one run."""

    def __init__(
        self,
        folder: RunFolder,
        job: TrainingJob,
        progress: Progress,
        children: Children,
        table: ProcessTable,
        services: Services,
        secrets: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._job = job
        self._progress = progress
        self._children = children
        self._table = table
        self._services = services
        self._secrets = secrets
        self._num_lost_mounts = 0

    def run(self) -> None:
        """Attempts until one succeeds or none is left. Raises _Stop, ServiceError."""
        while True:
            end = self._run_attempt(self._progress.next_attempt)
            if end.outcome is Outcome.SUCCEEDED:
                self._progress.succeeded()
                return
            if self._children.is_stopping:
                raise _Stop
            is_retry = end.outcome is not Outcome.INTERRUPTED
            if is_retry and self._progress.status.retries >= self._job.spec.max_retries:
                allowed = self._job.spec.max_retries
                spent = f" after {allowed} retries" if allowed else ""
                self._progress.failed(end.reason, f"{end.message}{spent}")
                return
            self._wait_for_next(is_retry=is_retry, message=end.message)

    def note_stop(self) -> None:
        """Say how the run ended that was told to stop."""
        if (self._folder.path / CANCEL_FILE).exists():
            self._progress.cancelled()
        else:
            self._progress.interrupted("the run was told to stop")

    def _run_attempt(self, number: int) -> _End:
        gang = Gang(self._job, number, self._folder, children=self._children, table=self._table)
        gang.start(self._environment())
        self._progress.attempt_started(number, gang.outer_pids())
        end = None
        started = datetime.now(UTC)
        while end is None:
            self._children.wait(_TICK_SECONDS)
            end = self._judge(gang, started)
        codes = gang.exit_codes
        if end.outcome is not Outcome.SUCCEEDED:
            self._progress.attempt_stopping(end.message)
        # After success nothing is asked any more of what a node left behind.
        grace = 0 if end.outcome is Outcome.SUCCEEDED else self._job.spec.grace_seconds
        gang.stop(grace, lambda: self._services.pids)
        _log.info("Attempt ended", extra={"attempt": number, "reason": end.reason, "codes": codes})
        self._progress.attempt_ended(
            end.outcome,
            end.reason,
            end.message,
            exit_codes=gang.exit_codes,
            decisive_rank=end.decisive_rank,
        )
        return end

    def _judge(self, gang: Gang, started: datetime) -> _End | None:
        """How the attempt ends now, if it does."""
        if self._children.is_stopping:
            is_cancel = (self._folder.path / CANCEL_FILE).exists()
            return _End(
                outcome=Outcome.INTERRUPTED,
                reason=CANCELLED if is_cancel else INTERRUPTED,
                message="the run was cancelled" if is_cancel else "the run was told to stop",
            )
        rank = gang.first_failed()
        if rank is None and gang.has_succeeded():
            return _End(outcome=Outcome.SUCCEEDED, reason=Reason.COMPLETED, message="")
        # Before the programs: a mount that is lost takes them along, and they are not to blame.
        if lost := self._services.tend():
            return _End(outcome=Outcome.INTERRUPTED, reason=Reason.VOLUME_UNAVAILABLE, message=lost)
        if rank is not None:
            return _End(
                outcome=Outcome.FAILED,
                reason=Reason.PROGRAM_FAILED,
                message=f"node {rank} ended with {_describe(gang.exit_codes[rank])}",
                decisive_rank=rank,
            )
        limit = self._job.spec.timeout_minutes
        if limit is not None and datetime.now(UTC) - started > timedelta(minutes=limit):
            message = f"the attempt ran longer than timeoutMinutes ({limit})"
            return _End(outcome=Outcome.TIMED_OUT, reason=Reason.TIMED_OUT, message=message)
        return None

    def _wait_for_next(self, *, is_retry: bool, message: str) -> None:
        """Mend the mounts, then let some time pass. Raises _Stop, ServiceError."""
        if not is_retry:
            self._num_lost_mounts += 1
            if self._num_lost_mounts > _MAX_LOST_MOUNTS:
                raise ServiceError(f"{message}, {_MAX_LOST_MOUNTS} times")
        spent = self._progress.status.retries if is_retry else 0
        backoff = min(_FIRST_BACKOFF_SECONDS * 2**spent, _LONGEST_BACKOFF_SECONDS)
        until = datetime.now(UTC) + timedelta(seconds=backoff)
        self._progress.waiting(
            until, f"{message}; the next attempt starts in {backoff:.0f} s", is_retry=is_retry
        )
        self._services.mend()
        while datetime.now(UTC) < until:
            if self._children.is_stopping:
                raise _Stop
            self._children.wait(_TICK_SECONDS)
            if self._services.tend():
                self._services.mend()

    def _environment(self) -> dict[str, str]:
        # `python` and `torchrun` are those that run this.
        tools = str(Path(sys.executable).parent)
        path = f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {
            **os.environ,
            "PATH": path,
            **self._services.environment,
            **self._job.spec.env_variables,
            **self._secrets,
        }


def _describe(code: int) -> str:
    if code > 128:
        return f"exit code {code} (signal {code - 128})"
    return f"exit code {code}"
