"""What the cluster says about a job's children, reduced to what a decision needs.

Built by `observe` out of documents; read by `judge` and `plan`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from trainmount_operator import labels
from trainmount_operator.status import parse_time

__all__ = [
    "ENDING_DEADLINE_SECONDS",
    "JobFact",
    "NodeFact",
    "Observed",
    "PodFact",
    "job_fact",
    "node_fact",
    "pod_fact",
]

Document = Mapping[str, Any]

ENDING_DEADLINE_SECONDS: Final = 1
"""`activeDeadlineSeconds` of a pod that was told to end: the smallest there is."""


@dataclass(frozen=True, kw_only=True)
class NodeFact:
    """One cluster node that a pod of ours is bound to."""

    exists: bool
    out_of_service: bool = False
    """An administrator declared it dead (`node.kubernetes.io/out-of-service`)."""

    not_ready_since: datetime | None = None
    """None while its kubelet reports."""


@dataclass(frozen=True, kw_only=True)
class JobFact:
    """The Indexed Job of one attempt, of this TrainingJob or of an earlier one of its name."""

    name: str
    uid: str
    owner_uid: str
    """The TrainingJob it was made for."""

    attempt: int
    num_nodes: int = 1
    suspended: bool = False
    deleting: bool = False
    complete: bool = False
    failed: bool = False
    failure_message: str = ""
    failed_ranks: frozenset[int] = frozenset()
    """Nodes whose pod failed or was deleted, also those whose pod is not there any more."""

    warning: str = ""
    """The newest warning event, such as a quota that admits no pod."""

    @property
    def finished(self) -> bool:
        return self.complete or self.failed


@dataclass(frozen=True, kw_only=True)
class PodFact:
    """One pod."""

    name: str
    uid: str
    owner_uid: str
    """The TrainingJob it was made for."""

    attempt: int
    node_rank: int
    phase: str = "Pending"
    node_name: str | None = None
    node: NodeFact | None = None
    """None if the node was not looked at, because nothing about the pod is suspicious."""

    scheduled_time: datetime | None = None
    running: bool = False
    """The command's container runs."""

    ready: bool = False
    started: bool = False
    """A container of it has run, so that it has logs."""

    ending: bool = False
    """It was told to end, and stays."""

    deletion_time: datetime | None = None
    """When its deletion was asked for."""

    disruption_reason: str = ""
    """Of the condition DisruptionTarget, or of the pod's status: Evicted, Preempting, ..."""

    disruption_message: str = ""
    disruption_time: datetime | None = None
    exit_code: int | None = None
    """Of the command's container; None if it did not end or nobody knows how."""

    exit_reason: str = ""
    exit_time: datetime | None = None
    exit_message: str = ""
    waiting_reason: str = ""
    """Why a container does not start: ErrImagePull, CreateContainerConfigError, ..."""

    waiting_message: str = ""
    unschedulable: str = ""
    """The scheduler's sentence, empty if it has none."""

    warning: str = ""
    """The newest warning event of a pod that does not start, such as a mount that failed."""

    @property
    def terminal(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def who(self) -> str:
        """For messages: `node 1 (on worker-2)`."""
        where = f" (on {self.node_name})" if self.node_name else ""
        return f"node {self.node_rank}{where}"

    def node_lost_time(self, tolerance: timedelta) -> datetime | None:
        """When its node counts as lost; None while nothing is wrong with it."""
        if self.node is None:
            return None
        if not self.node.exists or self.node.out_of_service:
            return _EPOCH
        since = self.node.not_ready_since
        return None if since is None else since + tolerance


@dataclass(frozen=True, kw_only=True)
class Observed:
    """All children that carry the job's name, whatever their TrainingJob's uid."""

    jobs: tuple[JobFact, ...] = ()
    pods: tuple[PodFact, ...] = ()

    def job(self, uid: str, attempt: int) -> JobFact | None:
        """The Job of one attempt of this very TrainingJob."""
        return next((j for j in self.jobs if (j.owner_uid, j.attempt) == (uid, attempt)), None)

    def pods_of(self, uid: str, attempt: int) -> tuple[PodFact, ...]:
        """The pods of one attempt of this very TrainingJob, by rank."""
        own = (p for p in self.pods if (p.owner_uid, p.attempt) == (uid, attempt))
        return tuple(sorted(own, key=lambda pod: (pod.node_rank, pod.name)))


_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


def job_fact(document: Document, warning: str = "") -> JobFact:
    """Out of a batch/v1 Job that carries our labels."""
    metadata = document["metadata"]
    conditions = _true_conditions(document)
    # The controller announces an end (…Target, …Met) before the last pod is gone.
    failed = conditions.get("Failed") or conditions.get("FailureTarget") or {}
    return JobFact(
        name=metadata["name"],
        uid=metadata["uid"],
        owner_uid=metadata["labels"].get(labels.JOB_UID, ""),
        attempt=_number(metadata["labels"].get(labels.ATTEMPT)),
        num_nodes=document.get("spec", {}).get("completions") or 1,
        suspended=bool(document.get("spec", {}).get("suspend")),
        deleting="deletionTimestamp" in metadata,
        complete="Complete" in conditions or "SuccessCriteriaMet" in conditions,
        failed=bool(failed),
        failure_message=failed.get("message", ""),
        failed_ranks=_ranks(document.get("status", {}).get("failedIndexes") or ""),
        warning=warning,
    )


def node_fact(document: Document | None) -> NodeFact:
    """Out of a node; None is a node that does not exist."""
    if document is None:
        return NodeFact(exists=False)
    taints = document.get("spec", {}).get("taints") or ()
    ready = next(
        (c for c in document.get("status", {}).get("conditions", ()) if c["type"] == "Ready"), None
    )
    since = None
    if ready is not None and ready["status"] != "True":
        since = parse_time(ready.get("lastTransitionTime"))
    return NodeFact(
        exists=True,
        out_of_service=any(t["key"] == "node.kubernetes.io/out-of-service" for t in taints),
        not_ready_since=since,
    )


def pod_fact(document: Document, node: NodeFact | None = None, warning: str = "") -> PodFact:
    """Out of a pod that carries our labels. Tolerates every field that a kubelet may leave out."""
    metadata, status = document["metadata"], document.get("status", {})
    conditions = _true_conditions(document)
    scheduled = conditions.get("PodScheduled", {})
    pod = PodFact(
        name=metadata["name"],
        uid=metadata["uid"],
        owner_uid=metadata["labels"].get(labels.JOB_UID, ""),
        attempt=_number(metadata["labels"].get(labels.ATTEMPT)),
        node_rank=_number(metadata["labels"].get(labels.COMPLETION_INDEX)),
        phase=status.get("phase", "Pending"),
        node_name=document.get("spec", {}).get("nodeName"),
        node=node,
        scheduled_time=parse_time(scheduled.get("lastTransitionTime")),
        ready="Ready" in conditions,
        ending=document.get("spec", {}).get("activeDeadlineSeconds") == ENDING_DEADLINE_SECONDS,
        deletion_time=_deletion_time(metadata),
        unschedulable=_unschedulable(status),
        warning=warning,
    )
    pod = _with_disruption(pod, status, conditions.get("DisruptionTarget"))
    return _with_containers(pod, status)


def _with_disruption(pod: PodFact, status: Document, target: Document | None) -> PodFact:
    if target is not None:
        return replace(
            pod,
            disruption_reason=target.get("reason", "DisruptionTarget"),
            disruption_message=target.get("message", ""),
            disruption_time=parse_time(target.get("lastTransitionTime")),
        )
    # A kubelet that ends or refuses a pod says so in its status, not always in a condition.
    if status.get("reason"):
        return replace(
            pod, disruption_reason=status["reason"], disruption_message=status.get("message", "")
        )
    return pod


def _with_containers(pod: PodFact, status: Document) -> PodFact:
    own = [
        container
        for container in status.get("containerStatuses") or ()
        if container["name"] == labels.CONTAINER_NAME
    ]
    for container in own:
        state = container.get("state") or {}
        ended = state.get("terminated")
        # A kubelet that lost the container reports no exit code of the program's.
        if ended and ended.get("reason") != "ContainerStatusUnknown":
            pod = replace(
                pod,
                exit_code=ended.get("exitCode"),
                exit_reason=ended.get("reason", ""),
                exit_time=parse_time(ended.get("finishedAt")),
                exit_message=ended.get("message", ""),
            )
        pod = replace(pod, running="running" in state)
    initial = status.get("initContainerStatuses") or ()
    for container in [*initial, *(status.get("containerStatuses") or ())]:
        state = container.get("state") or {}
        if "running" in state or "terminated" in state:
            pod = replace(pod, started=True)
    for container in [*initial, *own]:
        waiting = (container.get("state") or {}).get("waiting")
        if waiting and not pod.waiting_reason:
            pod = replace(
                pod,
                waiting_reason=waiting.get("reason", ""),
                waiting_message=waiting.get("message", ""),
            )
    return pod


def _deletion_time(metadata: Document) -> datetime | None:
    # deletionTimestamp is when the pod will be gone: the request plus the grace period.
    end = parse_time(metadata.get("deletionTimestamp"))
    if end is None:
        return None
    return end - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)


def _unschedulable(status: Document) -> str:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "not scheduled")
    return ""


def _true_conditions(document: Document) -> dict[str, Document]:
    conditions = document.get("status", {}).get("conditions") or ()
    return {c["type"]: c for c in conditions if c["status"] == "True"}


def _ranks(text: str) -> frozenset[int]:
    """Out of Kubernetes' form of a set of indexes, such as `1,3-5`."""
    ranks: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)


def _number(value: str | None) -> int:
    return int(value) if value is not None and value.isdigit() else -1
