"""One word and a few lines for where a job stands, the same for runs here and on a cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from trainmount_operator.status import SUCCEEDED, JobStatus, Reason, format_time

__all__ = ["describe", "is_success", "progress_line", "status_word"]

_WAITING: Final = {
    Reason.WAITING_TO_RETRY: "WAITING_FOR_RETRY",
    Reason.STOPPING: "TERMINATING",
    Reason.SUSPENDED: "SUSPENDED",
    "Interrupted": "INTERRUPTED",
}
_ENDED: Final = {"Cancelled": "CANCELED", Reason.TIMED_OUT: "TIMEDOUT"}


def status_word(status: JobStatus, *, is_alive: bool = True) -> str:
    """PENDING, RUNNING, WAITING_FOR_RETRY, TERMINATING, SUSPENDED, INTERRUPTED, and at the end
    SUCCESS, FAILED, CANCELED or TIMEDOUT.

    `is_alive` is whether somebody still works on it: a run of this machine whose supervisor was
    killed has no chance to say so itself.
    """
    condition = status.condition(SUCCEEDED)
    if condition is None:
        return "PENDING" if is_alive else "INTERRUPTED"
    if condition.status == "True":
        return "SUCCESS"
    if condition.status == "False":
        return _ENDED.get(condition.reason, "FAILED")
    if not is_alive:
        return "INTERRUPTED"
    if condition.reason in _WAITING:
        return _WAITING[condition.reason]
    return "RUNNING" if status.current_attempt and status.running_nodes else "PENDING"


def is_success(status: JobStatus) -> bool:
    condition = status.condition(SUCCEEDED)
    return condition is not None and condition.status == "True"


def progress_line(status: JobStatus) -> str:
    """Why it stands where it stands."""
    condition = status.condition(SUCCEEDED)
    return "" if condition is None else condition.message


def describe(
    run_id: str, job_name: str, status: JobStatus, *, experiment: str, is_alive: bool = True
) -> dict[str, Any]:
    """What `get -o json` shows of a run."""
    end = status.completion_time or datetime.now(UTC)
    last = status.last_attempt
    return {
        "run_id": run_id,
        "job_name": job_name,
        "experiment_name": experiment,
        "status": status_word(status, is_alive=is_alive),
        "message": progress_line(status),
        "started_at": format_time(status.start_time),
        "completed_at": format_time(status.completion_time),
        "duration_seconds": (
            None if status.start_time is None else int((end - status.start_time).total_seconds())
        ),
        "attempt_number": None if last is None else last.number,
        "retries": status.retries,
        "interruptions": status.interruptions,
        "attempts": [record.to_document() for record in status.attempts],
    }
