"""The changes that a plan may ask for, as values.

Made by `plan`, carried out by `apply`. Each is idempotent and names what it is about exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Action",
    "CreateAttempt",
    "DeleteJob",
    "DeletePod",
    "DeleteTrainingJob",
    "EndPod",
    "Notice",
    "SuspendJob",
]


@dataclass(frozen=True, kw_only=True)
class CreateAttempt:
    """Create the ConfigMap, the Service and the Job of an attempt, as far as they are missing."""

    number: int


@dataclass(frozen=True, kw_only=True)
class SuspendJob:
    """Keep an ended attempt's Job from making pods. It stays, and with it the pods that ended.

    Its controller deletes what still runs: asked for when nothing does.
    """

    name: str


@dataclass(frozen=True, kw_only=True)
class DeleteJob:
    """Delete a Job and its pods."""

    name: str
    uid: str


@dataclass(frozen=True, kw_only=True)
class EndPod:
    """Stop a pod with its grace period and keep it, with its logs and exit codes."""

    name: str
    uid: str


@dataclass(frozen=True, kw_only=True)
class DeletePod:
    """End a pod that has nothing to tell, or, where no kubelet can confirm its end, any."""

    name: str
    uid: str
    force: bool


@dataclass(frozen=True, kw_only=True)
class DeleteTrainingJob:
    """The job's time to live is over; its children go with it."""


Action = CreateAttempt | SuspendJob | DeleteJob | EndPod | DeletePod | DeleteTrainingJob


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An event on the TrainingJob."""

    reason: str
    message: str
    warning: bool = False
