"""One look at one TrainingJob: read everything, decide, record, act.

Called by `workqueue` in a worker thread, for whatever reason: a change of the job, of a child, a
time that came, or the operator's start. The result is the same for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from trainmount_operator import conditions
from trainmount_operator.apply import LeftoverFound, NameTaken, apply, publish
from trainmount_operator.children import AttemptOptions
from trainmount_operator.cluster import Cluster, Conflict, NotFound, Refused
from trainmount_operator.job import TrainingJob
from trainmount_operator.observe import observe
from trainmount_operator.plan import Policy, plan
from trainmount_operator.spec import KIND, SpecError, parse_job
from trainmount_operator.status import JobStatus, Reason

__all__ = ["Reconciler"]

logger = logging.getLogger(__name__)

# A child of an earlier job of this name is on its way out.
_LEFTOVER_DELAY: Final = timedelta(seconds=1)

# Somebody has to change something first: a name, a quota, a policy.
_REFUSAL_DELAY: Final = timedelta(seconds=15)


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, kw_only=True)
class Reconciler:
    """Reconciles jobs of one cluster. Safe to call from several threads for different jobs."""

    cluster: Cluster
    policy: Policy
    options: AttemptOptions
    clock: Callable[[], datetime] = field(default=_utc_now)

    def reconcile(self, namespace: str, name: str) -> datetime | None:
        """Bring one job forward. Returns when to look again, None if only a change matters.

        Raises:
            ClusterError: try again later.
        """
        try:
            document = self.cluster.get(KIND, namespace, name)
        except NotFound:
            return None
        if "deletionTimestamp" in document["metadata"]:
            # Its children are collected by their owner references.
            return None
        status = JobStatus.from_document(document.get("status") or {})
        now = self.clock()
        try:
            job = parse_job(document)
            if job.spec.code_source is not None and job.spec.code_source.config_map is None:
                raise SpecError(
                    "spec.codeSource.rootPath", "only the command line can read a folder"
                )
        except SpecError as error:
            if not status.is_terminal:
                self._refuse(document, status, Reason.INVALID_SPEC, str(error), now)
            return None
        return self._carry_on(job, document, status, now)

    def _carry_on(
        self, job: TrainingJob, document: Mapping[str, Any], status: JobStatus, now: datetime
    ) -> datetime | None:
        observed = observe(self.cluster, job, now)
        decision = plan(job, status, observed, now, self.policy)
        if not self._record(document, decision.status):
            return now
        publish(self.cluster, job, decision.notices, now)
        try:
            apply(self.cluster, job, decision.actions, self.options)
        except LeftoverFound as leftover:
            logger.info("Leftover found", extra={"job": job.name, "child": str(leftover)})
            return now + _LEFTOVER_DELAY
        except (NameTaken, Refused) as error:
            reason = Reason.ATTEMPT_REFUSED if isinstance(error, Refused) else Reason.NAME_CONFLICT
            current = self.cluster.get(KIND, document["metadata"]["namespace"], job.name)
            self._refuse(current, decision.status, reason, str(error), now)
            return now + _REFUSAL_DELAY
        return decision.wake_time

    def _refuse(
        self,
        document: Mapping[str, Any],
        status: JobStatus,
        reason: Reason,
        message: str,
        now: datetime,
    ) -> None:
        generation = document["metadata"].get("generation", 0)
        self._record(document, conditions.refused(status, generation, reason, message, now))

    def _record(self, document: Mapping[str, Any], status: JobStatus) -> bool:
        """Write the status if it says something new. False if the object changed meanwhile."""
        old, new = document.get("status") or {}, status.to_document()
        if old == new:
            return True
        metadata = document["metadata"]
        change = new | {key: None for key in old if key not in new}
        try:
            self.cluster.patch_status(
                KIND,
                metadata["namespace"],
                metadata["name"],
                # Refused if anybody changed the object since it was read, another operator too.
                {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": change},
            )
        except (Conflict, NotFound):
            logger.info("Changed meanwhile", extra={"job": metadata["name"]})
            return False
        return True
