"""How far a run is: the status of its job, written to the folder at every step.

The same conditions, attempts and reasons as in a cluster (`trainmount_operator.status`), so that
`get` reads both alike. Written by the run's first process (`agent`), and by `supervisor` when that
one is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from trainmount_cli.local.store import RunFolder
from trainmount_operator.status import (
    RUNNING,
    SUCCEEDED,
    AttemptRecord,
    Condition,
    JobStatus,
    Outcome,
    Reason,
)

__all__ = ["CANCELLED", "INTERRUPTED", "Progress"]

CANCELLED: Final = "Cancelled"
"""Reason of a run that a person ended."""
INTERRUPTED: Final = "Interrupted"
"""Reason of a run whose supervisor ended before the job did; `--resume` goes on with it."""


class Progress:
    """The status of one run, changed by the sentences below."""

    def __init__(self, folder: RunFolder, job_name: str, num_nodes: int, data: str) -> None:
        self._folder = folder
        self._fixed = {
            "v": 1,
            "runId": folder.run_id,
            "jobName": job_name,
            "dataDirectory": data,
        }
        document = folder.read_status()
        self._node_codes: dict[int, list[dict[str, Any]]] = {
            record["number"]: record.get("nodes", []) for record in document.get("attempts", [])
        }
        self.status = replace(JobStatus.from_document(document), nodes=num_nodes, extra={})
        self.pids: dict[str, Any] = {}
        self.server_url = ""

    @property
    def next_attempt(self) -> int:
        last = self.status.last_attempt
        return 0 if last is None else last.number + 1

    def begin(self) -> None:
        """The supervisor lives; an attempt that an earlier one left open was interrupted."""
        open_attempt = self.status.current_attempt
        if open_attempt is not None:
            self._close(open_attempt, Outcome.INTERRUPTED, INTERRUPTED, "the run was interrupted")
        self.status = replace(
            self.status,
            retries=0,
            completion_time=None,
            next_attempt_time=None,
            start_time=self.status.start_time or _now(),
        )
        self._stand(Reason.STARTING, "the server and the mounts are being started")

    def attempt_started(self, number: int, nodes: Iterable[Mapping[str, Any]]) -> None:
        record = AttemptRecord(number=number, start_time=_now(), running_time=_now())
        self.pids["nodes"] = list(nodes)
        self.status = replace(
            self.status.with_attempt(record),
            running_nodes=self.status.nodes,
            next_attempt_time=None,
        )
        self.status = self._with(RUNNING, "True", Reason.RUNNING)
        self._stand(Reason.RUNNING, f"attempt {number} runs on {self.status.nodes} nodes")

    def attempt_stopping(self, message: str) -> None:
        self._stand(Reason.STOPPING, message)

    def attempt_ended(
        self,
        outcome: Outcome,
        reason: str,
        message: str,
        *,
        exit_codes: Mapping[int, int],
        decisive_rank: int | None = None,
    ) -> None:
        """`exit_codes` by node rank; `decisive_rank` is the node whose code decided."""
        record = self.status.current_attempt
        assert record is not None
        self._node_codes[record.number] = [
            {"rank": rank, "exitCode": code} for rank, code in sorted(exit_codes.items())
        ]
        self.pids["nodes"] = []
        code = None if decisive_rank is None else exit_codes.get(decisive_rank)
        closed = replace(record, exit_code=code, node_rank=decisive_rank)
        self._close(closed, outcome, reason, message)
        self.save()

    def waiting(self, until: datetime, message: str, *, is_retry: bool) -> None:
        """Between two attempts."""
        self.status = replace(
            self.status,
            next_attempt_time=until,
            retries=self.status.retries + is_retry,
            interruptions=self.status.interruptions + (not is_retry),
        )
        self._stand(Reason.WAITING_TO_RETRY, message)

    def succeeded(self) -> None:
        self._finish("True", Reason.COMPLETED, "every node ended with exit code 0")

    def failed(self, reason: str, message: str) -> None:
        self._finish("False", reason, message)

    def cancelled(self) -> None:
        self._finish("False", CANCELLED, "the run was cancelled")

    def interrupted(self, message: str) -> None:
        """It ended before its job did, and can be resumed."""
        open_attempt = self.status.current_attempt
        if open_attempt is not None:
            self._close(open_attempt, Outcome.INTERRUPTED, INTERRUPTED, message)
        self.pids = {}
        self.status = replace(
            self._with(RUNNING, "False", INTERRUPTED), running_nodes=0, next_attempt_time=None
        )
        self._stand(INTERRUPTED, message)

    def note(self, reason: str, message: str) -> None:
        """An event that changes nothing but `pids`."""
        self._event(reason, message)
        self.save()

    def save(self) -> None:
        document = self.status.to_document()
        for record in document["attempts"]:
            record["nodes"] = self._node_codes.get(record["number"], [])
        extra = {"server": {"url": self.server_url}, "pids": self.pids}
        self._folder.write_status(self._fixed | document | extra)

    def _finish(self, status: str, reason: str, message: str) -> None:
        self.pids = {}
        self.status = replace(
            self._with(RUNNING, "False", reason),
            running_nodes=0,
            completion_time=_now(),
            next_attempt_time=None,
        )
        self.status = self._with(SUCCEEDED, status, reason, message)
        self._event(reason, message)
        self.save()

    def _stand(self, reason: str, message: str) -> None:
        """Neither succeeded nor failed; the reason says where it stands."""
        self.status = self._with(SUCCEEDED, "Unknown", reason, message)
        self._event(reason, message)
        self.save()

    def _close(self, record: AttemptRecord, outcome: Outcome, reason: str, message: str) -> None:
        self.status = replace(
            self.status.with_attempt(
                replace(
                    record,
                    outcome=outcome,
                    reason=reason,
                    message=message,
                    completion_time=_now(),
                )
            ),
            running_nodes=0,
        )
        self.status = self._with(RUNNING, "False", reason)

    def _with(self, kind: str, status: str, reason: str, message: str = "") -> JobStatus:
        return self.status.with_condition(
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=message,
                last_transition_time=_now(),
            )
        )

    def _event(self, reason: str, message: str) -> None:
        last = self.status.last_attempt
        self._folder.append_event(reason, message, None if last is None else last.number)


def _now() -> datetime:
    return datetime.now(UTC)
