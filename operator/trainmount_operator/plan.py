"""Deciding what a TrainingJob needs next.

`plan(job, status, observed, now, policy)` is pure: it returns the status to record and the actions
that follow from it. The status is written before the actions are carried out, and every action can
be derived again from status and observation: an operator that dies in between repeats the rest, and
a repeated action changes nothing.

One attempt after another: an attempt is recorded, its objects are created, it is judged; once it
ended, everything of it is stopped, and the next one is recorded only when no pod of the job
computes any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from trainmount_operator import conditions
from trainmount_operator.actions import (
    Action,
    CreateAttempt,
    DeleteJob,
    DeletePod,
    DeleteTrainingJob,
    EndPod,
    Notice,
    SuspendJob,
)
from trainmount_operator.facts import JobFact, Observed, PodFact
from trainmount_operator.job import TrainingJob, TrainingJobSpec
from trainmount_operator.judge import Hold, Verdict, find_hold, judge_pods, node_lost
from trainmount_operator.status import AttemptRecord, JobStatus, Outcome, Reason

__all__ = ["JOBS_KEPT", "Plan", "Policy", "plan"]

JOBS_KEPT = 10
"""Ended attempts whose Job stays, with its pods and their logs, besides the newest."""

# An attempt that ran this long was a real one: the next interruption is not a loop.
_REAL_RUN = timedelta(seconds=60)


# Most attempts run by then, or something is wrong that a person waits to see.
_YOUNG = timedelta(seconds=30)

_SUSPENDED = Verdict(outcome=Outcome.SUSPENDED, reason=Reason.SUSPENDED)
_JOB_DELETED = Verdict(
    outcome=Outcome.INTERRUPTED,
    reason=Reason.JOB_DELETED,
    message="the attempt's Job was deleted",
)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the installation decides about waiting."""

    node_lost_after: timedelta = timedelta(seconds=20)
    """How long a node may be not ready before its pods are given up.

    Comes on top of the time the cluster takes to notice (40 s by default). Longer than a kubelet's
    restart, far shorter than the five minutes after which Kubernetes itself evicts.
    """

    start_deadline: timedelta = timedelta(seconds=300)
    """How long a bound pod may be held up by its image, its configuration or a volume.

    After that the job fails with that reason. Time spent waiting for room does not count.
    """

    retry_backoff: timedelta = timedelta(seconds=5)
    """Before the first retry of a failed program; doubled for each further one."""

    retry_backoff_limit: timedelta = timedelta(seconds=300)
    """The longest time between two attempts."""

    interruption_backoff_limit: timedelta = timedelta(seconds=60)
    """The longest time before another attempt after interruptions in quick succession."""

    resync: timedelta = timedelta(seconds=60)
    """A job that goes on is looked at this often even if nothing happens."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to record, what to do, when to look again."""

    status: JobStatus
    actions: tuple[Action, ...] = ()
    notices: tuple[Notice, ...] = ()
    """Events to publish once the status is recorded."""

    wake_time: datetime | None = None
    """Look again at this time at the latest; None if only a change matters."""


def plan(
    job: TrainingJob, status: JobStatus, observed: Observed, now: datetime, policy: Policy
) -> Plan:
    """What this job needs now. `status` is what was recorded last."""
    now = now.replace(microsecond=0)
    if status.is_terminal:
        return _after_the_end(job, status, observed, now, policy)
    before = status
    status = replace(
        status,
        observed_generation=job.generation,
        nodes=job.spec.compute.num_nodes,
        start_time=status.start_time or now,
    )
    hold, wake = None, now + policy.resync
    if status.current_attempt is not None:
        status, hold, wake = _follow(job, status, observed, now, policy)
    busy = _busy_pods(job, status, observed)
    if status.current_attempt is None and not status.is_terminal:
        status = _excused(job, status, busy, now, policy)
        status, wake = _continue(job, status, bool(busy), now, min(wake, now + policy.resync))
    if not status.is_terminal:
        status = conditions.describe(job, status, hold, busy, now)
    actions = _actions(job, status, observed, busy, now, policy)
    return Plan(
        status=status,
        actions=actions,
        notices=conditions.notices(before, status),
        wake_time=min([wake, *_future_losses(busy, now, policy)]),
    )


def _follow(
    job: TrainingJob, status: JobStatus, observed: Observed, now: datetime, policy: Policy
) -> tuple[JobStatus, Hold | None, datetime]:
    """The attempt that goes on: what became of it, what holds it up, when to look again."""
    record = status.current_attempt
    assert record is not None and job.uid is not None
    wake = now + policy.resync
    kubernetes_job = observed.job(job.uid, record.number)
    if record.job_uid is None:
        if kubernetes_job is None or kubernetes_job.deleting:
            if job.spec.suspend:
                return _ended(job.spec, status, record, _SUSPENDED, now, policy), None, wake
            return status, None, wake
        record = replace(record, job_uid=kubernetes_job.uid)
    pods = observed.pods_of(job.uid, record.number)
    # The attempt's size is that of its own specification, which may have been changed since.
    num_nodes = status.nodes if kubernetes_job is None else kubernetes_job.num_nodes
    running = sum(1 for pod in pods if pod.running)
    if running == num_nodes and record.running_time is None:
        record = replace(record, running_time=now)
    status = replace(status, nodes=num_nodes, running_nodes=running).with_attempt(record)
    if kubernetes_job is None or kubernetes_job.deleting:
        return _ended(job.spec, status, record, _JOB_DELETED, now, policy), None, wake
    hold = None
    if record.running_time is None:
        paths = [volume.path for volume in job.spec.volumes]
        hold = find_hold(pods, kubernetes_job, num_nodes=num_nodes, volume_paths=paths)
    verdict = judge_pods(
        pods, kubernetes_job, num_nodes=num_nodes, now=now, node_lost_after=policy.node_lost_after
    )
    if verdict is None and job.spec.suspend:
        verdict = _SUSPENDED
    if verdict is None:
        verdict, wake = _deadlines(job.spec, record, pods, hold, now, policy)
    if verdict is None:
        return status, hold, min([wake, *_future_losses(pods, now, policy)])
    return _ended(job.spec, status, record, verdict, now, policy), None, wake


def _future_losses(pods: Iterable[PodFact], now: datetime, policy: Policy) -> list[datetime]:
    """When nodes that stopped reporting will count as lost."""
    times = (pod.node_lost_time(policy.node_lost_after) for pod in pods if not pod.terminal)
    return [time for time in times if time is not None and time > now]


def _deadlines(
    spec: TrainingJobSpec,
    record: AttemptRecord,
    pods: Iterable[PodFact],
    hold: Hold | None,
    now: datetime,
    policy: Policy,
) -> tuple[Verdict | None, datetime]:
    """Whether the attempt ran or waited too long, and when that may be next."""
    wake = now + policy.resync
    if record.running_time is not None and spec.timeout_minutes is not None:
        end = record.running_time + timedelta(minutes=spec.timeout_minutes)
        if end <= now:
            message = f"still running after {spec.timeout_minutes} minutes"
            verdict = Verdict(outcome=Outcome.TIMED_OUT, reason=Reason.TIMED_OUT, message=message)
            return verdict, wake
        wake = min(wake, end)
    if record.running_time is None:
        # What keeps a pod from starting is told by events, which nobody watches: look for them.
        young = now - record.start_time < _YOUNG
        wake = min(wake, now + timedelta(seconds=2 if young else 10))
    if hold is None:
        return None, wake
    if hold.since is not None:
        end = max(hold.since, record.start_time) + policy.start_deadline
        outcome = Outcome.MISCONFIGURED
    else:
        # No room for all: those that have a place must not keep it from others for ever.
        placed = [pod.scheduled_time for pod in pods if pod.scheduled_time and pod.node_name]
        if not placed or hold.reason == Reason.STARTING:
            return None, wake
        end = max(min(placed), record.start_time) + policy.start_deadline
        outcome = Outcome.INTERRUPTED
    if end <= now:
        return Verdict(outcome=outcome, reason=hold.reason, message=hold.message), wake
    return None, min(wake, end)


def _ended(
    spec: TrainingJobSpec,
    status: JobStatus,
    record: AttemptRecord,
    verdict: Verdict,
    now: datetime,
    policy: Policy,
) -> JobStatus:
    """The attempt is over: record how, and what follows from it."""
    record = replace(
        record,
        completion_time=now,
        outcome=verdict.outcome,
        reason=str(verdict.reason),
        message=verdict.message,
        exit_code=verdict.exit_code,
        node_rank=None if verdict.pod is None else verdict.pod.node_rank,
        node_name=None if verdict.pod is None else verdict.pod.node_name,
    )
    status = replace(status, running_nodes=0, next_attempt_time=None).with_attempt(record)
    if verdict.outcome is Outcome.SUCCEEDED:
        return conditions.finished(replace(status, completion_time=now), now)
    if verdict.outcome is Outcome.SUSPENDED:
        return status
    if verdict.outcome is Outcome.INTERRUPTED:
        status = replace(status, interruptions=status.interruptions + 1)
        return replace(status, next_attempt_time=now + _interruption_delay(status, policy))
    if verdict.outcome is Outcome.MISCONFIGURED:
        return conditions.finished(replace(status, completion_time=now), now)
    if status.retries >= spec.max_retries:
        # Final only when nothing of it runs any more: a lost node may still excuse it.
        return status
    delay = min(policy.retry_backoff * 2**status.retries, policy.retry_backoff_limit)
    return replace(status, retries=status.retries + 1, next_attempt_time=now + delay)


def _excused(
    job: TrainingJob, status: JobStatus, busy: Iterable[PodFact], now: datetime, policy: Policy
) -> JobStatus:
    """The failure of a program as the loss of a node, where that was behind it.

    The peers of a node that dies fail within a second, long before the cluster knows of its death.
    What cannot end tells it: a pod of the same attempt on a node that turns out to be gone.
    """
    last = status.last_attempt
    if last is None or last.reason not in (Reason.PROGRAM_FAILED, Reason.RENDEZVOUS_FAILED):
        return status
    gone = [
        pod
        for pod in busy
        if (pod.owner_uid, pod.attempt) == (job.uid, last.number)
        and (lost := pod.node_lost_time(policy.node_lost_after)) is not None
        and lost <= now
    ]
    if not gone:
        return status
    # Without a time for another attempt, none had been left, and none was counted.
    spent = 0 if status.next_attempt_time is None else 1
    status = replace(status, retries=status.retries - spent)
    return _ended(job.spec, status, last, node_lost(gone[0]), now, policy)


def _interruption_delay(status: JobStatus, policy: Policy) -> timedelta:
    """None for the first, then 2, 4, 8 … s while attempts end soon after they began."""
    quick = 0
    for record in reversed(status.attempts):
        ran = record.running_time is not None and record.completion_time is not None
        if record.outcome is not Outcome.INTERRUPTED:
            break
        if ran and record.completion_time - record.running_time >= _REAL_RUN:  # type: ignore[operator]
            break
        quick += 1
    if quick < 2:
        return timedelta(0)
    return min(timedelta(seconds=2 ** min(quick - 1, 10)), policy.interruption_backoff_limit)


def _continue(
    job: TrainingJob, status: JobStatus, busy: bool, now: datetime, wake: datetime
) -> tuple[JobStatus, datetime]:
    """Between attempts: begin the next one when nothing computes and its time has come, or end the
    job that has no retry left.
    """
    if busy:
        return status, wake
    if status.next_attempt_time is None and _has_failed(status):
        return conditions.finished(replace(status, completion_time=now), now), wake
    if job.spec.suspend:
        return status, wake
    if status.next_attempt_time is not None and status.next_attempt_time > now:
        return status, min(wake, status.next_attempt_time)
    last = status.last_attempt
    record = AttemptRecord(number=0 if last is None else last.number + 1, start_time=now)
    status = replace(
        status, next_attempt_time=None, running_nodes=0, nodes=job.spec.compute.num_nodes
    )
    # Soon again: the Job's uid is recorded and its pods are looked for.
    return status.with_attempt(record), now + timedelta(seconds=2)


def _has_failed(status: JobStatus) -> bool:
    last = status.last_attempt
    return last is not None and last.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)


def _busy_pods(job: TrainingJob, status: JobStatus, observed: Observed) -> list[PodFact]:
    """Pods of the job's name that may compute and are not of the current attempt."""
    current = status.current_attempt
    return [
        pod
        for pod in observed.pods
        if not pod.terminal
        and (current is None or (pod.owner_uid, pod.attempt) != (job.uid, current.number))
    ]


def _actions(
    job: TrainingJob,
    status: JobStatus,
    observed: Observed,
    busy: Iterable[PodFact],
    now: datetime,
    policy: Policy,
) -> tuple[Action, ...]:
    """Everything that is not as the status wants it."""
    actions: list[Action] = []
    current, last = status.current_attempt, status.last_attempt
    newest = -1 if last is None else last.number
    # The Job of an attempt that goes on, or whose pods all ended well, is left to its controller.
    going_on = {
        record.number for record in status.attempts if record.outcome in (None, Outcome.SUCCEEDED)
    }
    for fact in observed.jobs:
        if fact.deleting:
            continue
        if fact.owner_uid != job.uid or fact.attempt < newest - JOBS_KEPT:
            # An earlier TrainingJob of this name is gone, or it would have this name.
            actions.append(DeleteJob(name=fact.name, uid=fact.uid))
        elif fact.attempt not in going_on and _may_grow(fact, observed):
            actions.append(SuspendJob(name=fact.name))
    for pod in busy:
        lost = pod.node_lost_time(policy.node_lost_after)
        if lost is not None and lost <= now:
            # No kubelet is there to confirm the end of a pod on a dead node.
            actions.append(DeletePod(name=pod.name, uid=pod.uid, force=True))
        elif pod.deletion_time is not None or pod.ending:
            continue
        elif pod.started and pod.owner_uid == job.uid:
            actions.append(EndPod(name=pod.name, uid=pod.uid))
        else:
            # Without logs; and a kubelet that waits for a volume heeds a deletion only.
            actions.append(DeletePod(name=pod.name, uid=pod.uid, force=False))
    if current is not None and current.job_uid is None:
        actions.append(CreateAttempt(number=current.number))
    return tuple(actions)


def _may_grow(fact: JobFact, observed: Observed) -> bool:
    """Whether the Job of an ended attempt must be kept from making a pod that it still lacks."""
    if fact.finished or fact.suspended:
        return False
    pods = observed.pods_of(fact.owner_uid, fact.attempt)
    if len({pod.node_rank for pod in pods} | fact.failed_ranks) >= fact.num_nodes:
        return False
    # A Job that is suspended deletes the pods that run, and their logs with them: they end first.
    return all(pod.terminal for pod in pods)


def _after_the_end(
    job: TrainingJob, status: JobStatus, observed: Observed, now: datetime, policy: Policy
) -> Plan:
    """The status stands for ever; what still runs is stopped, and the time to live runs out."""
    busy = _busy_pods(job, status, observed)
    actions = _actions(job, status, observed, busy, now, policy)
    wake = now + policy.resync if busy else None
    ttl = job.spec.ttl_seconds_after_finished
    if ttl is not None and status.completion_time is not None:
        end = status.completion_time + timedelta(seconds=ttl)
        if end <= now:
            actions = (*actions, DeleteTrainingJob())
        wake = min(wake or end, max(end, now + timedelta(seconds=1)))
    return Plan(status=status, actions=actions, wake_time=wake)
