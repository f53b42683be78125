"""How an attempt stands: what ended it, or what holds it up.

Called by `plan`. Pure. The first cause decides: when one node fails, the others follow within a
second with errors of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from trainmount_operator.facts import JobFact, PodFact
from trainmount_operator.launch import MESSAGE_PREFIX, RENDEZVOUS_EXIT_CODE
from trainmount_operator.status import Outcome, Reason
from trainmount_operator.telling import telling_line

__all__ = ["Hold", "Verdict", "find_hold", "judge_pods", "node_lost"]

_LONGEST_MESSAGE: Final = 400

# What a kubelet, the scheduler or a controller writes as the reason of a disruption.
_DISRUPTIONS: Final = {
    "Evicted": Reason.EVICTED,
    "EvictionByEvictionAPI": Reason.EVICTED,
    "TerminationByKubelet": Reason.EVICTED,
    "DeletionByTaintManager": Reason.NODE_LOST,
    "DeletionByPodGC": Reason.NODE_LOST,
    "NodeLost": Reason.NODE_LOST,
    "PreemptionByScheduler": Reason.PREEMPTED,
    "Preempting": Reason.PREEMPTED,
    "Terminated": Reason.NODE_SHUTDOWN,
    "NodeShutdown": Reason.NODE_SHUTDOWN,
    "UnexpectedAdmissionError": Reason.NODE_REFUSED,
    "NodeAffinity": Reason.NODE_REFUSED,
    "AdmissionRejected": Reason.NODE_REFUSED,
}

# Why a container does not start, and whether time may heal it.
_WAITING: Final = {
    "ErrImagePull": Reason.IMAGE_UNAVAILABLE,
    "ImagePullBackOff": Reason.IMAGE_UNAVAILABLE,
    "ErrImageNeverPull": Reason.IMAGE_UNAVAILABLE,
    "InvalidImageName": Reason.IMAGE_UNAVAILABLE,
    "ImageInspectError": Reason.IMAGE_UNAVAILABLE,
    "RegistryUnavailable": Reason.IMAGE_UNAVAILABLE,
    "CreateContainerConfigError": Reason.CONFIGURATION_MISSING,
    "CreateContainerError": Reason.CONFIGURATION_MISSING,
}

# Warnings of a pod that is bound and does not start.
_VOLUME_WARNINGS: Final = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")

_MOUNT_FAILED: Final = re.compile(
    r'MountVolume\.\w+ failed for volume "(?P<name>[^"]+)"\s*:\s*'
    r"(?:rpc error: code = \w+ desc = )?(?P<problem>.+)",
    re.DOTALL,
)
_VOLUME_NAME: Final = re.compile(r"volume-\d+")
_OBJECT_MISSING: Final = re.compile(r'(configmap|secret)s? "[^"]+" not found')

# What the scheduler says of pods it could remove, behind what is lacking.
_PREEMPTION: Final = re.compile(r"\s*(no new claims to deallocate,\s*)?preemption:.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An attempt ended."""

    outcome: Outcome
    reason: Reason
    message: str = ""
    exit_code: int | None = None
    pod: PodFact | None = None
    """The pod that decided it, if one did."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """What keeps an attempt from running on all its nodes."""

    reason: Reason
    message: str
    since: datetime | None = None
    """When the pod it is about was bound to a node; None if it is not bound."""


def judge_pods(
    pods: Sequence[PodFact],
    job: JobFact,
    *,
    num_nodes: int,
    now: datetime,
    node_lost_after: timedelta,
) -> Verdict | None:
    """What ended the attempt, None while it goes on."""
    done = {pod.node_rank for pod in pods if pod.phase == "Succeeded"}
    if job.complete or len(done) == num_nodes:
        return Verdict(outcome=Outcome.SUCCEEDED, reason=Reason.COMPLETED)
    missing = min(job.failed_ranks - {pod.node_rank for pod in pods}, default=None)
    if missing is not None:
        # A pod that failed stays until somebody deletes it, and then its peers fail too.
        return Verdict(
            outcome=Outcome.INTERRUPTED,
            reason=Reason.POD_DELETED,
            message=f"node {missing}: its pod is gone",
        )
    causes = [cause for pod in pods if (cause := _cause(pod, now, node_lost_after)) is not None]
    if causes:
        # At the same second a disruption explains a failure; a mere deletion is explained by one.
        return min(causes, key=lambda cause: (cause[0], cause[1]))[2]
    if job.failed:
        return Verdict(
            outcome=Outcome.INTERRUPTED,
            reason=Reason.POD_DELETED,
            message=_short(f"a pod is gone: {job.failure_message}"),
        )
    return None


def find_hold(
    pods: Sequence[PodFact], job: JobFact, *, num_nodes: int, volume_paths: Sequence[str] = ()
) -> Hold | None:
    """What holds the attempt up, the most telling thing first; None if it merely takes its time.

    `volume_paths` are those of the specification, in its order.
    """
    for pod in pods:
        if pod.waiting_reason in _WAITING:
            return Hold(
                reason=_WAITING[pod.waiting_reason],
                message=_short(f"{pod.who}: {pod.waiting_reason}: {pod.waiting_message}"),
                since=pod.scheduled_time,
            )
    for pod in pods:
        if pod.warning and not pod.running and not pod.terminal:
            return _held_by_warning(pod, volume_paths)
    if len(pods) < num_nodes and job.warning:
        return Hold(reason=Reason.PODS_NOT_CREATED, message=_short(job.warning))
    unschedulable = [pod for pod in pods if pod.unschedulable]
    if unschedulable:
        return Hold(
            reason=Reason.UNSCHEDULABLE,
            message=_short(
                f"{len(unschedulable)} of {num_nodes} nodes wait for room: "
                f"{_PREEMPTION.sub('', unschedulable[0].unschedulable)}"
            ),
        )
    return None


def _held_by_warning(pod: PodFact, volume_paths: Sequence[str]) -> Hold:
    if not pod.warning.startswith(_VOLUME_WARNINGS):
        return Hold(reason=Reason.STARTING, message=_short(f"{pod.who}: {pod.warning}"))
    reason, problem = Reason.VOLUME_UNAVAILABLE, pod.warning
    if found := _MOUNT_FAILED.search(pod.warning):
        name, problem = found["name"], found["problem"]
        index = int(name.removeprefix("volume-")) if _VOLUME_NAME.fullmatch(name) else -1
        if 0 <= index < len(volume_paths):
            # The driver's own messages begin with the volume they are about.
            if not problem.startswith("/Volumes/"):
                problem = f"volume {volume_paths[index]}: {problem}"
        elif _OBJECT_MISSING.search(problem):
            reason = Reason.CONFIGURATION_MISSING
    return Hold(reason=reason, message=_short(f"{pod.who}: {problem}"), since=pod.scheduled_time)


def _cause(
    pod: PodFact, now: datetime, node_lost_after: timedelta
) -> tuple[datetime, int, Verdict] | None:
    """When and why this pod ended the attempt; the number orders causes of one second."""
    disrupted = pod.disruption_reason in _DISRUPTIONS or pod.disruption_reason.startswith("OutOf")
    if disrupted or (pod.disruption_reason and pod.disruption_time):
        reason = _DISRUPTIONS.get(pod.disruption_reason, Reason.EVICTED)
        if pod.disruption_reason.startswith("OutOf"):
            reason = Reason.NODE_REFUSED
        message = pod.disruption_message or pod.disruption_reason
        when = pod.disruption_time or pod.deletion_time or pod.exit_time or now
        return when, 0, _interrupted(pod, reason, f"{pod.who}: {message}")
    lost = pod.node_lost_time(node_lost_after)
    if not pod.terminal and lost is not None and lost <= now:
        return lost, 0, node_lost(pod)
    killed_by_deletion = (
        pod.deletion_time is not None
        and pod.exit_reason != "OOMKilled"
        and (pod.exit_time is None or pod.exit_time >= pod.deletion_time)
    )
    if pod.exit_code not in (None, 0) and not killed_by_deletion:
        return pod.exit_time or now, 1, _program_failed(pod)
    if pod.deletion_time is not None and pod.phase != "Succeeded":
        message = f"{pod.who}: pod {pod.name} was deleted"
        return pod.deletion_time, 2, _interrupted(pod, Reason.POD_DELETED, message)
    if pod.phase == "Failed" and pod.exit_code == 0:
        message = f"{pod.who}: the command ended with 0, another container of its pod failed"
        return (
            now,
            1,
            Verdict(
                outcome=Outcome.FAILED,
                reason=Reason.PROGRAM_FAILED,
                message=message,
                exit_code=0,
                pod=pod,
            ),
        )
    if pod.phase == "Failed":
        # No exit code and no reason: nobody knows, so the program is not blamed.
        message = f"{pod.who}: pod {pod.name} failed, its exit code is unknown"
        return now, 3, _interrupted(pod, Reason.POD_DELETED, message)
    return None


def node_lost(pod: PodFact) -> Verdict:
    """The end of an attempt whose pod was on a node that is gone."""
    return _interrupted(pod, Reason.NODE_LOST, f"{pod.who}: the node is gone")


def _interrupted(pod: PodFact, reason: Reason, message: str) -> Verdict:
    return Verdict(outcome=Outcome.INTERRUPTED, reason=reason, message=_short(message), pod=pod)


def _program_failed(pod: PodFact) -> Verdict:
    reason = Reason.PROGRAM_FAILED
    if pod.exit_reason == "OOMKilled":
        reason = Reason.OUT_OF_MEMORY
    elif pod.exit_code == RENDEZVOUS_EXIT_CODE and pod.exit_message.startswith(MESSAGE_PREFIX):
        reason = Reason.RENDEZVOUS_FAILED
    line = telling_line(pod.exit_message)
    what = "was killed: out of memory" if reason == Reason.OUT_OF_MEMORY else "failed"
    message = f"{pod.who} {what} (exit code {pod.exit_code})"
    return Verdict(
        outcome=Outcome.FAILED,
        reason=reason,
        message=_short(f"{message}: {line}" if line else message),
        exit_code=pod.exit_code,
        pod=pod,
    )


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 1] + "…"
