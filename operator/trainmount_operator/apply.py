"""Carrying a plan's actions out.

The only writer of child objects, called by `reconcile` once the status is recorded. Each action may
have been done before, by this process or by one that died: what is there already, or gone already,
is success.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from trainmount_operator import labels
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
from trainmount_operator.children import AttemptOptions, attempt_objects
from trainmount_operator.cluster import Cluster, ClusterError, Conflict, NotFound, Refused
from trainmount_operator.facts import ENDING_DEADLINE_SECONDS
from trainmount_operator.job import TrainingJob
from trainmount_operator.spec import API_VERSION, KIND
from trainmount_operator.status import format_time

__all__ = ["LeftoverFound", "NameTaken", "apply", "publish"]

logger = logging.getLogger(__name__)

# An event's message is cut by the server above this.
_LONGEST_MESSAGE = 1000


class NameTaken(Exception):
    """A child's name belongs to an object that is not the operator's. `str()` says what to do."""


class LeftoverFound(Exception):
    """A child's name was still held by an earlier job's child, which is being deleted: try again
    soon.
    """


def apply(
    cluster: Cluster, job: TrainingJob, actions: Iterable[Action], options: AttemptOptions
) -> None:
    """Carry the actions out in their order.

    Raises:
        NameTaken: somebody else's object has a child's name.
        LeftoverFound: an earlier job's child has it, for a moment.
        ClusterError: the API server refused or did not answer.
    """
    for action in actions:
        logger.info("Acting", extra={"job": job.name, "action": repr(action)})
        try:
            _carry_out(cluster, job, action, options)
        except NotFound as error:
            # Gone already, unless a whole namespace is.
            if isinstance(action, CreateAttempt):
                raise
            logger.debug("Gone already", extra={"job": job.name, "answer": error.message})


def publish(cluster: Cluster, job: TrainingJob, notices: Iterable[Notice], now: datetime) -> None:
    """Publish events on the TrainingJob, best effort: a lost event is no reason to fail a
    reconcile.
    """
    for notice in notices:
        try:
            cluster.create(_event(job, notice, now))
        except Conflict:
            continue
        except ClusterError as error:
            logger.warning(
                "Event not published",
                extra={"job": job.name, "reason": notice.reason, "answer": error.message},
            )


def _carry_out(cluster: Cluster, job: TrainingJob, action: Action, options: AttemptOptions) -> None:
    assert job.namespace is not None and job.uid is not None
    match action:
        case CreateAttempt(number=number):
            _create_attempt(cluster, job, number, options)
        case SuspendJob(name=name):
            cluster.patch("Job", job.namespace, name, {"spec": {"suspend": True}})
        case DeleteJob(name=name, uid=uid):
            cluster.delete("Job", job.namespace, name, uid=uid)
        case EndPod(name=name, uid=uid):
            _end_pod(cluster, job.namespace, name, uid)
        case DeletePod(name=name, uid=uid, force=force):
            _delete_pod(cluster, job.namespace, name, uid, force)
        case DeleteTrainingJob():
            cluster.delete(KIND, job.namespace, job.name, uid=job.uid)


def _create_attempt(
    cluster: Cluster, job: TrainingJob, number: int, options: AttemptOptions
) -> None:
    assert job.namespace is not None
    if number > 0:
        # The ended attempt's Job stays for its logs; nothing needs its name or its command.
        for kind in ("Service", "ConfigMap"):
            own = labels.attempt_selector(job.name, number - 1)
            cluster.delete_collection(kind, job.namespace, labels=own)
    objects = attempt_objects(job, number, options)
    for manifest in (objects.config_map, objects.service, objects.job):
        try:
            cluster.create(manifest)
        except Conflict:
            _accept_existing(cluster, job, manifest)


def _accept_existing(cluster: Cluster, job: TrainingJob, manifest: dict[str, Any]) -> None:
    """The object is there already: ours, an earlier job's, or a stranger's."""
    assert job.namespace is not None
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    try:
        existing = cluster.get(kind, job.namespace, name)["metadata"]
    except NotFound:
        raise LeftoverFound(f"{kind} {name}") from None
    found = existing.get("labels") or {}
    if found.get(labels.JOB_UID) == job.uid and "deletionTimestamp" not in existing:
        return
    if found.get(labels.JOB_NAME) != labels.base_name(job.name):
        raise NameTaken(
            f"{kind} {name} exists and is not this job's: delete it, or give the job another name"
        )
    if "deletionTimestamp" not in existing:
        cluster.delete(kind, job.namespace, name, uid=existing["uid"])
    raise LeftoverFound(f"{kind} {name}")


def _end_pod(cluster: Cluster, namespace: str, name: str, uid: str) -> None:
    # The kubelet ends a pod whose deadline has passed as it does a deleted one, SIGTERM and the
    # grace period included, and the pod stays as Failed.
    change = {"metadata": {"uid": uid}, "spec": {"activeDeadlineSeconds": ENDING_DEADLINE_SECONDS}}
    try:
        cluster.patch("Pod", namespace, name, change)
    except Conflict:
        logger.debug("Gone already", extra={"pod": name})
    except Refused as error:
        # A cluster's policy may forbid the change, never the end.
        logger.warning("Pod deleted instead", extra={"pod": name, "answer": error.message})
        _delete_pod(cluster, namespace, name, uid, force=False)


def _delete_pod(cluster: Cluster, namespace: str, name: str, uid: str, force: bool) -> None:
    try:
        cluster.delete("Pod", namespace, name, uid=uid, grace_period_seconds=0 if force else None)
    except Conflict:
        # Another pod has the name by now: this one is gone.
        logger.debug("Gone already", extra={"pod": name})


def _event(job: TrainingJob, notice: Notice, now: datetime) -> dict[str, Any]:
    message = notice.message[:_LONGEST_MESSAGE]
    # The name says what the event is about, so that publishing it twice is a conflict.
    identity = f"{job.uid}/{notice.reason}/{message}/{format_time(now)}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{labels.base_name(job.name)}.{digest}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": "Warning" if notice.warning else "Normal",
        "reason": notice.reason,
        "message": message,
        "source": {"component": labels.FIELD_MANAGER},
        "reportingComponent": labels.FIELD_MANAGER,
        "firstTimestamp": format_time(now),
        "lastTimestamp": format_time(now),
        "count": 1,
    }
