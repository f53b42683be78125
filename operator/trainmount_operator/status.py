"""The status of a TrainingJob: the operator's whole memory, as typed values.

Read and written by `plan` (values) and `reconcile` (documents). There is no phase: the conditions
say what is, and the reason of `Succeeded` is the one word a person reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

__all__ = [
    "ATTEMPTS_KEPT",
    "RUNNING",
    "SUCCEEDED",
    "SUSPENDED",
    "AttemptRecord",
    "Condition",
    "JobStatus",
    "Outcome",
    "Reason",
    "format_time",
    "parse_time",
]

# Condition types, each with status True, False or Unknown.
SUCCEEDED: Final = "Succeeded"
"""True: every node ended with 0. False: the job failed for good. Unknown: neither yet, the reason
says where it stands.
"""
RUNNING: Final = "Running"
"""True while the command runs on every node."""
SUSPENDED: Final = "Suspended"
"""True while `spec.suspend` holds the job and nothing of it runs."""

ATTEMPTS_KEPT: Final = 20
"""Records in `status.attempts`; the counters go on."""


class Outcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    """The program's own doing: costs a retry."""
    TIMED_OUT = "TimedOut"
    """`timeoutMinutes` passed: costs a retry."""
    INTERRUPTED = "Interrupted"
    """The cluster's or a person's doing: costs nothing."""
    SUSPENDED = "Suspended"
    MISCONFIGURED = "Misconfigured"
    """It could never have started: another attempt would not either."""


class Reason(StrEnum):
    """Reasons of conditions, attempts and events: one CamelCase word each."""

    # Where a job stands.
    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    WAITING_TO_RETRY = "WaitingToRetry"
    SUSPENDED = "Suspended"
    NOT_SUSPENDED = "NotSuspended"
    COMPLETED = "Completed"
    INVALID_SPEC = "InvalidSpec"
    NAME_CONFLICT = "NameConflict"
    ATTEMPT_REFUSED = "AttemptRefused"
    # What holds an attempt before it runs.
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    CONFIGURATION_MISSING = "ConfigurationMissing"
    VOLUME_UNAVAILABLE = "VolumeUnavailable"
    PODS_NOT_CREATED = "PodsNotCreated"
    # Why an attempt ended.
    PROGRAM_FAILED = "ProgramFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    RENDEZVOUS_FAILED = "RendezvousFailed"
    TIMED_OUT = "TimedOut"
    POD_DELETED = "PodDeleted"
    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    NODE_SHUTDOWN = "NodeShutdown"
    NODE_REFUSED = "NodeRefused"
    JOB_DELETED = "JobDeleted"
    # Events only.
    ATTEMPT_STARTED = "AttemptStarted"
    RESUMED = "Resumed"


def format_time(value: datetime | None) -> str | None:
    """Kubernetes' form of an instant, in whole seconds."""
    return None if value is None else value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(value: object) -> datetime | None:
    """An instant out of a Kubernetes document; None if there is none."""
    if not isinstance(value, str) or not value:
        return None
    return datetime.fromisoformat(value)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One entry of `status.conditions`."""

    type: str
    status: str
    """`True`, `False` or `Unknown`."""

    reason: str
    message: str = ""
    observed_generation: int = 0
    last_transition_time: datetime | None = None
    """When `status` last changed."""

    def to_document(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "observedGeneration": self.observed_generation,
            "lastTransitionTime": format_time(self.last_transition_time),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Condition:
        return cls(
            type=document["type"],
            status=document["status"],
            reason=document.get("reason", ""),
            message=document.get("message", ""),
            observed_generation=document.get("observedGeneration", 0),
            last_transition_time=parse_time(document.get("lastTransitionTime")),
        )


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One entry of `status.attempts`."""

    number: int
    start_time: datetime
    """When the attempt was decided; its objects follow."""

    job_uid: str | None = None
    """The uid of its Job once that was seen. None: create it; set and gone: somebody deleted it."""

    running_time: datetime | None = None
    """When all nodes ran for the first time: `timeoutMinutes` counts from here."""

    completion_time: datetime | None = None
    outcome: Outcome | None = None
    """None while the attempt goes on."""

    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    """Of the container that decided the outcome; None where nobody knows it."""

    node_rank: int | None = None
    node_name: str | None = None

    def to_document(self) -> dict[str, Any]:
        document = {
            "number": self.number,
            "startTime": format_time(self.start_time),
            "jobUID": self.job_uid,
            "runningTime": format_time(self.running_time),
            "completionTime": format_time(self.completion_time),
            "outcome": self.outcome and str(self.outcome),
            "reason": self.reason or None,
            "message": self.message or None,
            "exitCode": self.exit_code,
            "nodeRank": self.node_rank,
            "nodeName": self.node_name,
        }
        return {key: value for key, value in document.items() if value is not None}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> AttemptRecord:
        start_time = parse_time(document["startTime"])
        assert start_time is not None
        outcome = document.get("outcome")
        return cls(
            number=document["number"],
            start_time=start_time,
            job_uid=document.get("jobUID"),
            running_time=parse_time(document.get("runningTime")),
            completion_time=parse_time(document.get("completionTime")),
            outcome=Outcome(outcome) if outcome else None,
            reason=document.get("reason", ""),
            message=document.get("message", ""),
            exit_code=document.get("exitCode"),
            node_rank=document.get("nodeRank"),
            node_name=document.get("nodeName"),
        )


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """`status` as a value."""

    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    attempts: tuple[AttemptRecord, ...] = ()
    """The newest `ATTEMPTS_KEPT`, oldest first; numbers have no gaps."""

    retries: int = 0
    """Spent out of `maxRetries`."""

    interruptions: int = 0
    """Attempts that ended through no fault of the program."""

    nodes: int = 0
    running_nodes: int = 0
    start_time: datetime | None = None
    completion_time: datetime | None = None
    next_attempt_time: datetime | None = None
    """The next attempt does not start before."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of other writers, kept as they are."""

    @property
    def last_attempt(self) -> AttemptRecord | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def current_attempt(self) -> AttemptRecord | None:
        """The attempt that goes on, None between attempts."""
        last = self.last_attempt
        return last if last is not None and last.outcome is None else None

    def condition(self, condition_type: str) -> Condition | None:
        return next((c for c in self.conditions if c.type == condition_type), None)

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended for good: nothing is started or written any more."""
        succeeded = self.condition(SUCCEEDED)
        return succeeded is not None and succeeded.status in ("True", "False")

    def with_attempt(self, record: AttemptRecord) -> JobStatus:
        """With this record in place of the one of its number, or as the newest."""
        others = tuple(other for other in self.attempts if other.number != record.number)
        return replace(self, attempts=(*others, record)[-ATTEMPTS_KEPT:])

    def with_condition(self, new: Condition) -> JobStatus:
        """With this condition; its transition time stays while its status does."""
        old = self.condition(new.type)
        if old is not None and old.status == new.status:
            new = replace(new, last_transition_time=old.last_transition_time)
        conditions = {c.type: c for c in self.conditions} | {new.type: new}
        return replace(self, conditions=tuple(conditions.values()))

    def to_document(self) -> dict[str, Any]:
        """As it stands in the object; the same value always gives the same document."""
        last = self.last_attempt
        document = {
            "observedGeneration": self.observed_generation,
            "conditions": [condition.to_document() for condition in self.conditions],
            "attempt": None if last is None else last.number,
            "attempts": [record.to_document() for record in self.attempts],
            "retries": self.retries,
            "interruptions": self.interruptions,
            "nodes": self.nodes,
            "runningNodes": self.running_nodes,
            "startTime": format_time(self.start_time),
            "completionTime": format_time(self.completion_time),
            "nextAttemptTime": format_time(self.next_attempt_time),
        }
        return dict(self.extra) | {k: v for k, v in document.items() if v is not None}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> JobStatus:
        own = {
            "observedGeneration", "conditions", "attempt", "attempts", "retries", "interruptions",
            "nodes", "runningNodes", "startTime", "completionTime", "nextAttemptTime",
        }  # fmt: skip
        return cls(
            observed_generation=document.get("observedGeneration", 0),
            conditions=tuple(map(Condition.from_document, document.get("conditions", ()))),
            attempts=tuple(map(AttemptRecord.from_document, document.get("attempts", ()))),
            retries=document.get("retries", 0),
            interruptions=document.get("interruptions", 0),
            nodes=document.get("nodes", 0),
            running_nodes=document.get("runningNodes", 0),
            start_time=parse_time(document.get("startTime")),
            completion_time=parse_time(document.get("completionTime")),
            next_attempt_time=parse_time(document.get("nextAttemptTime")),
            extra={key: value for key, value in document.items() if key not in own},
        )
