"""Reading everything a decision needs, once.

Called by `reconcile`. The Job is read before its pods: what the Job's controller concluded from a
pod is then never newer than what we see of the pod itself.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from trainmount_operator import labels
from trainmount_operator.cluster import Cluster, NotFound
from trainmount_operator.facts import NodeFact, Observed, job_fact, node_fact, pod_fact
from trainmount_operator.job import TrainingJob
from trainmount_operator.status import parse_time

__all__ = ["EVENTS_AFTER", "observe"]

EVENTS_AFTER: Final = timedelta(seconds=3)
"""A pod that has not started this long after it could have is asked for its warnings."""

# Enough to say what is wrong; a gang of hundreds fails for one reason.
_PODS_ASKED: Final = 4

_WAITED: Final = "Unable to attach or mount volumes"

Document = dict[str, Any]


def observe(cluster: Cluster, job: TrainingJob, now: datetime) -> Observed:
    """The Jobs and pods that carry the job's name, with what is known about their nodes."""
    assert job.namespace is not None
    selector = labels.job_selector(job.name)
    jobs = cluster.list("Job", job.namespace, labels=selector)
    pods = cluster.list("Pod", job.namespace, labels=selector)
    nodes = _suspicious_nodes(cluster, pods)
    stuck = [pod for pod in pods if _is_stuck(pod, now)][:_PODS_ASKED]
    warnings = {
        pod["metadata"]["uid"]: _newest_warning(cluster, job.namespace, pod["metadata"]["uid"])
        for pod in [*stuck, *_jobs_without_pods(jobs, pods, now)]
    }
    return Observed(
        jobs=tuple(job_fact(j, warnings.get(j["metadata"]["uid"], "")) for j in jobs),
        pods=tuple(
            pod_fact(
                pod,
                nodes.get(pod.get("spec", {}).get("nodeName", "")),
                warnings.get(pod["metadata"]["uid"], ""),
            )
            for pod in pods
        ),
    )


def _suspicious_nodes(cluster: Cluster, pods: list[Document]) -> dict[str, NodeFact]:
    """The nodes of pods that are bound and neither ended nor ready.

    When a kubelet stops reporting, the node controller marks the node's pods as not ready: a pod
    that is ready needs no look at its node.
    """
    names = set()
    for pod in pods:
        status = pod.get("status", {})
        ready = any(
            c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ()
        )
        ended = status.get("phase") in ("Succeeded", "Failed")
        deleting = "deletionTimestamp" in pod["metadata"]
        if not ended and (deleting or not ready) and pod.get("spec", {}).get("nodeName"):
            names.add(pod["spec"]["nodeName"])
    return {name: _node(cluster, name) for name in sorted(names)}


def _node(cluster: Cluster, name: str) -> NodeFact:
    try:
        return node_fact(cluster.get_node(name))
    except NotFound:
        return node_fact(None)


def _is_stuck(pod: Document, now: datetime) -> bool:
    status = pod.get("status", {})
    if status.get("phase") != "Pending" or not pod.get("spec", {}).get("nodeName"):
        return False
    created = parse_time(pod["metadata"].get("creationTimestamp"))
    return created is not None and now - created >= EVENTS_AFTER


def _jobs_without_pods(jobs: list[Document], pods: list[Document], now: datetime) -> list[Document]:
    """Jobs that want more pods than there are: their own events say why."""
    result = []
    for job in jobs:
        attempt = job["metadata"]["labels"].get(labels.ATTEMPT)
        have = sum(1 for pod in pods if pod["metadata"]["labels"].get(labels.ATTEMPT) == attempt)
        created = parse_time(job["metadata"].get("creationTimestamp"))
        finished = bool(job.get("status", {}).get("conditions"))
        wants = 0 if finished else job.get("spec", {}).get("parallelism", 0)
        if have < wants and created is not None and now - created >= EVENTS_AFTER:
            result.append(job)
    return result


def _newest_warning(cluster: Cluster, namespace: str, uid: str) -> str:
    events = cluster.list("Event", namespace, fields=f"involvedObject.uid={uid},type=Warning")
    # The scheduler's own events repeat what the pod's condition says, and outlive it.
    events = [event for event in events if event.get("reason") != "FailedScheduling"]
    # A kubelet that waited two minutes says only that it did, after it said what for.
    causes = [e for e in events if not e.get("message", "").startswith(_WAITED)]
    events = causes or events
    if not events:
        return ""
    newest = max(
        events,
        key=lambda e: (
            e.get("lastTimestamp") or e.get("eventTime") or e["metadata"]["creationTimestamp"]
        ),
    )
    return f"{newest.get('reason')}: {newest.get('message', '').strip()}"
