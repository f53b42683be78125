"""The conditions of a job, in words for a person, and the events that tell how it got there.

Called by `plan`. Pure. Messages hold instants, never durations that pass: a status that says the
same is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from trainmount_operator.actions import Notice
from trainmount_operator.facts import PodFact
from trainmount_operator.job import TrainingJob
from trainmount_operator.judge import Hold
from trainmount_operator.status import (
    RUNNING,
    SUCCEEDED,
    SUSPENDED,
    AttemptRecord,
    Condition,
    JobStatus,
    Outcome,
    Reason,
    format_time,
)

__all__ = ["describe", "finished", "notices", "refused"]

# Why the objects of an attempt could not be created.
_REFUSALS = (Reason.NAME_CONFLICT, Reason.ATTEMPT_REFUSED)


def describe(
    job: TrainingJob,
    status: JobStatus,
    hold: Hold | None,
    busy: Sequence[PodFact],
    now: datetime,
) -> JobStatus:
    """The conditions of a job that has not ended. `busy` are pods that are to end first."""
    reason, message = _standing(job, status, hold, busy)
    running = reason is Reason.RUNNING
    suspended = reason is Reason.SUSPENDED
    status = _set(status, SUCCEEDED, "Unknown", reason, message, now)
    status = _set(status, RUNNING, _flag(running), reason, "", now)
    why = Reason.SUSPENDED if suspended else Reason.NOT_SUSPENDED
    return _set(status, SUSPENDED, _flag(suspended), why, "", now)


def finished(status: JobStatus, now: datetime) -> JobStatus:
    """The conditions of a job whose last attempt ended it for good."""
    last = status.last_attempt
    assert last is not None
    succeeded = last.outcome is Outcome.SUCCEEDED
    reason = Reason(last.reason)
    if succeeded:
        message = f"all nodes ended with 0 in attempt {last.number}"
    else:
        message = f"attempt {last.number}: {last.message}"
    if last.outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
        message += f" (retries spent: {status.retries})"
    status = _set(status, SUCCEEDED, _flag(succeeded), reason, message, now)
    status = _set(status, RUNNING, "False", reason, "", now)
    return _set(status, SUSPENDED, "False", Reason.NOT_SUSPENDED, "", now)


def refused(
    status: JobStatus, generation: int, reason: Reason, message: str, now: datetime
) -> JobStatus:
    """The conditions of a job that cannot go on until somebody changes it or what is in its way."""
    status = replace(status, observed_generation=generation)
    status = _set(status, SUCCEEDED, "Unknown", reason, message, now)
    if status.running_nodes:
        # What runs goes on; only the next attempt is in question.
        return status
    status = _set(status, RUNNING, "False", reason, "", now)
    return _set(status, SUSPENDED, "False", Reason.NOT_SUSPENDED, "", now)


def notices(before: JobStatus, after: JobStatus) -> tuple[Notice, ...]:
    """The events of one step, oldest first."""
    result = []
    known = {record.number: record for record in before.attempts}
    for record in after.attempts:
        old = known.get(record.number)
        if record.outcome is not None and (old is None or old.outcome is not record.outcome):
            result.append(_ended_notice(record, after))
        elif old is None:
            result.append(_started_notice(record, after))
    old_state, new_state = before.condition(SUCCEEDED), after.condition(SUCCEEDED)
    assert new_state is not None
    holds = (
        Reason.UNSCHEDULABLE,
        Reason.IMAGE_UNAVAILABLE,
        Reason.CONFIGURATION_MISSING,
        Reason.VOLUME_UNAVAILABLE,
        Reason.PODS_NOT_CREATED,
    )
    changed = old_state is None or old_state.reason != new_state.reason
    if new_state.status == "False":
        result.append(Notice(reason=new_state.reason, message=new_state.message, warning=True))
    elif new_state.status == "True":
        result.append(Notice(reason=new_state.reason, message=new_state.message))
    elif changed and new_state.reason in holds:
        result.append(Notice(reason=new_state.reason, message=new_state.message, warning=True))
    return tuple(result)


def _standing(
    job: TrainingJob, status: JobStatus, hold: Hold | None, busy: Sequence[PodFact]
) -> tuple[Reason, str]:
    """The one word and the sentence for where a job stands that has not ended."""
    current, last = status.current_attempt, status.last_attempt
    if current is not None:
        old = status.condition(SUCCEEDED)
        if current.job_uid is None and old is not None and old.reason in _REFUSALS:
            # Said until it changes: the attempt is still not created.
            return Reason(old.reason), old.message
        if hold is not None:
            return hold.reason, hold.message
        if status.running_nodes == status.nodes:
            return Reason.RUNNING, f"attempt {current.number} runs on all {status.nodes} nodes"
        running = f"{status.running_nodes} of {status.nodes} nodes run"
        if current.running_time is not None:
            # Some have ended with 0, or a kubelet is late: it ran, and nothing says it failed.
            return Reason.RUNNING, f"attempt {current.number}: {running}"
        return Reason.STARTING, f"attempt {current.number}: {running}"
    if busy:
        pod = busy[0]
        where = f" on {pod.node_name}" if pod.node_name else ""
        waiting = f"waiting for {len(busy)} pods to end, such as {pod.name}{where}"
        return Reason.STOPPING, f"{_why(last)}; {waiting}" if last else waiting
    if job.spec.suspend:
        return Reason.SUSPENDED, "spec.suspend is true"
    assert last is not None
    when = format_time(status.next_attempt_time)
    if last.outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
        spent = f"retry {status.retries} of {job.spec.max_retries}"
        return Reason.WAITING_TO_RETRY, f"{_why(last)}; {spent} at {when}"
    return Reason.WAITING_TO_RETRY, f"{_why(last)}; no retry spent, next attempt at {when}"


def _why(record: AttemptRecord) -> str:
    text = f"attempt {record.number}: {record.reason}"
    return f"{text}: {record.message}" if record.message else text


def _started_notice(record: AttemptRecord, status: JobStatus) -> Notice:
    return Notice(
        reason=Reason.ATTEMPT_STARTED,
        message=f"attempt {record.number} starts on {status.nodes} nodes",
    )


def _ended_notice(record: AttemptRecord, status: JobStatus) -> Notice:
    message = _why(record)
    if record.outcome is Outcome.INTERRUPTED:
        message += "; no retry spent"
    elif record.outcome in (Outcome.FAILED, Outcome.TIMED_OUT) and status.next_attempt_time:
        message += f"; retry {status.retries} follows"
    good = record.outcome in (Outcome.SUCCEEDED, Outcome.SUSPENDED)
    return Notice(reason=f"Attempt{record.outcome}", message=message, warning=not good)


def _set(
    status: JobStatus, kind: str, value: str, reason: Reason, message: str, now: datetime
) -> JobStatus:
    return status.with_condition(
        Condition(
            type=kind,
            status=value,
            reason=str(reason),
            message=message,
            observed_generation=status.observed_generation,
            last_transition_time=now,
        )
    )


def _flag(value: bool) -> str:
    return "True" if value else "False"
