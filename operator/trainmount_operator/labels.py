"""Names that other programs rely on: labels, and the names of a job's children.

Called by every module that builds or looks for children, and by the command line, which finds pods
by them.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

__all__ = [
    "ATTEMPT",
    "COMPLETION_INDEX",
    "CONTAINER_NAME",
    "DRIVER_NAME",
    "FIELD_MANAGER",
    "JOB_ANNOTATION",
    "JOB_NAME",
    "JOB_UID",
    "MANAGED_BY",
    "MANAGED_BY_VALUE",
    "attempt_labels",
    "attempt_name",
    "attempt_selector",
    "base_name",
    "job_selector",
    "master_address",
    "pod_host_name",
]

# Labels of every child: Job, Pod, Service, ConfigMap.
JOB_NAME: Final = "trainmount.dev/job-name"
"""Value: `base_name()` of the TrainingJob, because a label holds 63 characters and a name 253."""
JOB_UID: Final = "trainmount.dev/job-uid"
"""The TrainingJob's uid: children of an earlier object of the same name are not ours."""
ATTEMPT: Final = "trainmount.dev/attempt"
"""The attempt's number, from 0."""
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY_VALUE: Final = "trainmount-operator"

JOB_ANNOTATION: Final = "trainmount.dev/job"
"""On pods: the TrainingJob's full name, which no label could hold."""

COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
"""Kubernetes' own label on the pods of an Indexed Job: the node rank."""

CONTAINER_NAME: Final = "training"
"""The container that runs the command; its exit code decides an attempt."""

DRIVER_NAME: Final = "csi.trainmount.dev"
FIELD_MANAGER: Final = "trainmount-operator"

# Longest child: base, "-", attempt (5 digits), "-", index (4 digits) and the pod's random suffix
# of 6 stay within the 63 characters of a host name.
_LONGEST_BASE: Final = 46
_PLAIN: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def base_name(job_name: str) -> str:
    """What the names of a job's children start with, and the value of `JOB_NAME`.

    The job's own name where it is short enough and a DNS label; otherwise as much of it as fits and
    a hash of the whole.
    """
    if len(job_name) <= _LONGEST_BASE and _PLAIN.fullmatch(job_name):
        return job_name
    digest = hashlib.sha256(job_name.encode()).hexdigest()[:8]
    readable = re.sub(r"[^a-z0-9]+", "-", job_name)[: _LONGEST_BASE - 13].strip("-")
    return f"job-{readable}-{digest}" if not readable[:1].isalpha() else f"{readable}-{digest}"


def attempt_name(job_name: str, attempt: int) -> str:
    """The name of the Job, the Service and the ConfigMap of one attempt."""
    return f"{base_name(job_name)}-{attempt}"


def pod_host_name(job_name: str, attempt: int, node_rank: int) -> str:
    """The host name that Kubernetes gives the pod with this index of the Indexed Job."""
    return f"{attempt_name(job_name, attempt)}-{node_rank}"


def master_address(job_name: str, attempt: int) -> str:
    """MASTER_ADDR: node 0, resolved by the attempt's headless Service within the namespace."""
    return f"{pod_host_name(job_name, attempt, 0)}.{attempt_name(job_name, attempt)}"


def attempt_labels(job_name: str, uid: str, attempt: int) -> dict[str, str]:
    """Labels of every child of one attempt."""
    return {
        MANAGED_BY: MANAGED_BY_VALUE,
        JOB_NAME: base_name(job_name),
        JOB_UID: uid,
        ATTEMPT: str(attempt),
    }


def attempt_selector(job_name: str, attempt: int) -> str:
    """Label selector for the children of one attempt."""
    return f"{job_selector(job_name)},{ATTEMPT}={attempt}"


def job_selector(job_name: str) -> str:
    """Label selector for all children of a job, also those of an earlier object of its name."""
    return f"{JOB_NAME}={base_name(job_name)}"
