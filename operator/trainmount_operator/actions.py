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
    "Notice",
    "SuspendJob",
]


@dataclass(frozen=True, kw_only=True)
class CreateAttempt:
    """Create the ConfigMap, the Service and the Job of an attempt, as far as they are missing."""

    number: int


@dataclass(frozen=True, kw_only=True)
class SuspendJob:
    """Keep an ended attempt's Job from making pods. It stays, and with it the pods that failed."""

    name: str


@dataclass(frozen=True, kw_only=True)
class DeleteJob:
    """Delete a Job and its pods."""

    name: str
    uid: str


@dataclass(frozen=True, kw_only=True)
class DeletePod:
    """End a pod, with its grace period or, where no kubelet can confirm, at once."""

    name: str
    uid: str
    force: bool


@dataclass(frozen=True, kw_only=True)
class DeleteTrainingJob:
    """The job's time to live is over; its children go with it."""


Action = CreateAttempt | SuspendJob | DeleteJob | DeletePod | DeleteTrainingJob


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An event on the TrainingJob."""

    reason: str
    message: str
    warning: bool = False
