"""Reading, recording and acting against a cluster kept in memory: the order of writes, and names
held by others.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from trainmount_operator import labels
from trainmount_operator.children import AttemptOptions
from trainmount_operator.cluster import Cluster, Conflict, NotFound, Refused, Unavailable
from trainmount_operator.facts import job_fact, node_fact, pod_fact
from trainmount_operator.plan import Policy
from trainmount_operator.reconcile import Reconciler
from trainmount_operator.workqueue import Workqueue

START = datetime(2026, 1, 1, tzinfo=UTC)
Document = dict[str, Any]


class MemoryCluster:
    """The requests of `Cluster` over a dictionary; `writes` tells them in order."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Document] = {}
        self.writes: list[str] = []
        self.refuse: dict[str, Exception] = {}
        self.version = 0

    def put(self, document: Document) -> Document:
        self.version += 1
        document = copy.deepcopy(document)
        metadata = document["metadata"]
        metadata.setdefault("uid", f"uid-{self.version}")
        metadata.setdefault("generation", 1)
        metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        metadata["resourceVersion"] = str(self.version)
        self.objects[document["kind"], metadata["name"]] = document
        return document

    def get(self, kind: str, namespace: str, name: str) -> Document:
        try:
            return copy.deepcopy(self.objects[kind, name])
        except KeyError:
            raise NotFound(404, f"{kind} {name} not found") from None

    def get_node(self, name: str) -> Document:
        return self.get("Node", "", name)

    def list(
        self, kind: str, namespace: str, *, labels: str = "", fields: str = ""
    ) -> list[Document]:
        wanted = dict(part.split("=") for part in labels.split(",") if part)
        return [
            copy.deepcopy(document)
            for (its_kind, _), document in self.objects.items()
            if its_kind == kind
            and wanted.items() <= (document["metadata"].get("labels") or {}).items()
            and (
                kind != "Event"
                or f"involvedObject.uid={document['involvedObject']['uid']}," in fields
            )
        ]

    def create(self, manifest: Document) -> Document:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in self.refuse:
            raise self.refuse[kind]
        if (kind, name) in self.objects:
            raise Conflict(409, f"{kind} {name} exists")
        self.writes.append(f"create {kind} {name}")
        return self.put(manifest)

    def patch(self, kind: str, namespace: str, name: str, change: Document) -> Document:
        if kind in self.refuse:
            raise self.refuse[kind]
        document = self.get(kind, namespace, name)
        document["spec"] |= change["spec"]
        self.writes.append(f"patch {kind} {name}")
        return self.put(document)

    def patch_status(self, kind: str, namespace: str, name: str, change: Document) -> Document:
        document = self.get(kind, namespace, name)
        if change["metadata"]["resourceVersion"] != document["metadata"]["resourceVersion"]:
            raise Conflict(409, "changed")
        merged = document.get("status", {}) | change["status"]
        document["status"] = {key: value for key, value in merged.items() if value is not None}
        self.writes.append("status")
        return self.put(document)

    def delete(self, kind: str, namespace: str, name: str, *, uid: str, **_: Any) -> None:
        if self.get(kind, namespace, name)["metadata"]["uid"] != uid:
            raise Conflict(409, "another object")
        self.writes.append(f"delete {kind} {name}")
        del self.objects[kind, name]

    def delete_collection(self, kind: str, namespace: str, *, labels: str) -> None:
        for document in self.list(kind, namespace, labels=labels):
            del self.objects[kind, document["metadata"]["name"]]
        self.writes.append(f"prune {kind} {labels.split('=')[-1]}")


@pytest.fixture
def cluster() -> MemoryCluster:
    memory = MemoryCluster()
    memory.put(
        {
            "apiVersion": "trainmount.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "digits", "namespace": "team", "uid": "u"},
            "spec": {
                "experimentName": "digits",
                "compute": {"numAccelerators": 4, "acceleratorsPerNode": 2},
                "command": "python train.py",
            },
        }
    )
    return memory


def reconcile(cluster: MemoryCluster, seconds: float = 0) -> datetime | None:
    return Reconciler(
        cluster=cast("Cluster", cluster),
        policy=Policy(),
        options=AttemptOptions(default_image="runtime:1"),
        clock=lambda: START + timedelta(seconds=seconds),
    ).reconcile("team", "digits")


def add_pod(cluster: MemoryCluster, rank: int, attempt: int = 0, **status: Any) -> None:
    name = f"digits-{attempt}-{rank}-x"
    found = labels.attempt_labels("digits", "u", attempt) | {labels.COMPLETION_INDEX: str(rank)}
    cluster.put(
        {
            "kind": "Pod",
            "metadata": {"name": name, "labels": found},
            "spec": {"nodeName": f"n{rank}"},
            "status": {"phase": "Running"} | status,
        }
    )


RUNNING = {
    "conditions": [{"type": "Ready", "status": "True"}],
    "containerStatuses": [{"name": "training", "state": {"running": {}}}],
}


def exited(code: int, **fields: Any) -> Document:
    ended = {"exitCode": code, "finishedAt": "2026-01-01T00:00:09Z"} | fields
    return {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [{"name": "training", "state": {"terminated": ended}}],
    }


def standing(cluster: MemoryCluster) -> tuple[str, str]:
    conditions = cluster.get("TrainingJob", "team", "digits")["status"]["conditions"]
    succeeded = next(c for c in conditions if c["type"] == "Succeeded")
    return succeeded["reason"], succeeded["message"]


def test_the_decision_is_recorded_before_anything_is_created(cluster: MemoryCluster) -> None:
    reconcile(cluster)
    assert [w for w in cluster.writes if "Event" not in w] == [
        "status",
        "create ConfigMap digits-0",
        "create Service digits-0",
        "create Job digits-0",
    ]


def test_an_operator_killed_between_any_two_writes_makes_everything_once(
    cluster: MemoryCluster,
) -> None:
    class Killed(BaseException):
        pass

    # The process dies at its first, second, ... write and starts again, until it gets through.
    for deaths in range(20):
        left = deaths

        def dying(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **keywords: Any) -> Any:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                return function(*arguments, **keywords)

            return call

        attempt = MemoryCluster()
        attempt.objects, attempt.version = cluster.objects, cluster.version
        for name in ("create", "patch_status"):
            setattr(attempt, name, dying(getattr(attempt, name)))
        with contextlib.suppress(Killed):
            reconcile(attempt)
        cluster.objects, cluster.version = attempt.objects, attempt.version
    kinds = sorted(kind for kind, _ in cluster.objects if kind != "Event")
    assert kinds == ["ConfigMap", "Job", "Service", "TrainingJob"]
    assert len(cluster.get("TrainingJob", "team", "digits")["status"]["attempts"]) == 1


def test_a_reconcile_that_changes_nothing_writes_nothing(cluster: MemoryCluster) -> None:
    reconcile(cluster)
    for rank in (0, 1):
        add_pod(cluster, rank, **RUNNING)
    reconcile(cluster, 1)
    cluster.writes.clear()
    for seconds in (2, 3, 100):
        reconcile(cluster, seconds)
    assert cluster.writes == []
    assert standing(cluster)[0] == "Running"


def test_a_failed_gang_is_stopped_and_followed_by_another(cluster: MemoryCluster) -> None:
    reconcile(cluster)
    add_pod(cluster, 0, **RUNNING)
    add_pod(cluster, 1, **exited(1, message="boom"))
    cluster.writes.clear()
    reconcile(cluster, 10)
    assert [w for w in cluster.writes if "Event" not in w] == [
        "status",
        "patch Pod digits-0-0-x",
    ]
    cluster.writes.clear()
    reconcile(cluster, 11)
    assert cluster.writes == []
    ending = cluster.get("Pod", "team", "digits-0-0-x")
    assert ending["spec"]["activeDeadlineSeconds"] == 1
    cluster.put(ending | {"status": exited(143) | {"reason": "DeadlineExceeded"}})
    cluster.writes.clear()
    reconcile(cluster, 15)
    assert [w for w in cluster.writes if "Event" not in w] == [
        "status",
        "prune Service 0",
        "prune ConfigMap 0",
        "create ConfigMap digits-1",
        "create Service digits-1",
        "create Job digits-1",
    ]
    assert ("Job", "digits-0") in cluster.objects
    assert {("Pod", "digits-0-0-x"), ("Pod", "digits-0-1-x")} <= cluster.objects.keys()


def test_a_pod_whose_change_a_policy_forbids_is_deleted(cluster: MemoryCluster) -> None:
    reconcile(cluster)
    add_pod(cluster, 0, **RUNNING)
    add_pod(cluster, 1, **exited(1))
    cluster.refuse["Pod"] = Refused(403, "a policy forbids it")
    reconcile(cluster, 10)
    assert ("Pod", "digits-0-0-x") not in cluster.objects


def test_a_name_held_by_a_stranger_is_said_once_and_tried_again(cluster: MemoryCluster) -> None:
    cluster.put({"kind": "Service", "metadata": {"name": "digits-0", "uid": "s"}, "spec": {}})
    reconcile(cluster)
    assert standing(cluster) == (
        "NameConflict",
        "Service digits-0 exists and is not this job's: delete it, or give the job another name",
    )
    cluster.writes.clear()
    assert reconcile(cluster, 20) == START + timedelta(seconds=35)
    assert cluster.writes == []
    cluster.delete("Service", "team", "digits-0", uid="s")
    reconcile(cluster, 40)
    assert ("Job", "digits-0") in cluster.objects
    reconcile(cluster, 41)
    assert standing(cluster)[0] == "Starting"


def test_a_leftover_of_an_earlier_job_is_deleted_and_never_adopted(cluster: MemoryCluster) -> None:
    old = labels.attempt_labels("digits", "old", 0)
    for kind in ("ConfigMap", "Service"):
        cluster.put({"kind": kind, "metadata": {"name": "digits-0", "labels": old}, "spec": {}})
    for seconds in range(4):
        reconcile(cluster, seconds)
    for kind in ("ConfigMap", "Service", "Job"):
        found = cluster.get(kind, "team", "digits-0")["metadata"]["labels"]
        assert found[labels.JOB_UID] == "u"


def test_an_attempt_the_server_refuses_is_said_with_its_message(cluster: MemoryCluster) -> None:
    cluster.refuse["Job"] = Refused(422, 'Job "digits-0" is invalid: spec.template.spec.x')
    reconcile(cluster)
    assert standing(cluster) == (
        "AttemptRefused",
        'Job "digits-0" is invalid: spec.template.spec.x',
    )
    cluster.writes.clear()
    reconcile(cluster, 20)
    assert cluster.writes == []


def test_a_specification_that_got_past_the_schema_is_refused_with_its_path(
    cluster: MemoryCluster,
) -> None:
    cluster.objects["TrainingJob", "digits"]["spec"]["compute"]["numAccelerators"] = 3
    assert reconcile(cluster) is None
    assert standing(cluster) == (
        "InvalidSpec",
        "spec.compute.numAccelerators: must be a multiple of acceleratorsPerNode (2), got 3",
    )


def test_a_status_that_changed_meanwhile_is_not_overwritten(cluster: MemoryCluster) -> None:
    changed = cluster.patch_status

    def patch_status(kind: str, namespace: str, name: str, change: Document) -> Document:
        cluster.put(cluster.get(kind, namespace, name))
        return changed(kind, namespace, name, change)

    cluster.patch_status = patch_status  # type: ignore[method-assign]
    assert reconcile(cluster) == START
    assert cluster.writes == []


def test_a_job_that_is_gone_or_going_is_left_alone(cluster: MemoryCluster) -> None:
    cluster.objects["TrainingJob", "digits"]["metadata"]["deletionTimestamp"] = "x"
    assert reconcile(cluster) is None
    del cluster.objects["TrainingJob", "digits"]
    assert reconcile(cluster) is None
    assert cluster.writes == []


def test_a_pod_that_does_not_start_is_asked_for_its_warnings(cluster: MemoryCluster) -> None:
    reconcile(cluster)
    scheduled = {"type": "PodScheduled", "status": "True"}
    scheduled["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    for rank in (0, 1):
        add_pod(cluster, rank, phase="Pending", conditions=[scheduled])
    for name in ("n0", "n1"):
        cluster.put({"kind": "Node", "metadata": {"name": name}})
    cluster.put(
        {
            "kind": "Event",
            "metadata": {"name": "e"},
            "involvedObject": {
                "uid": cluster.get("Pod", "team", "digits-0-1-x")["metadata"]["uid"]
            },
            "reason": "FailedMount",
            "message": "volume-0: no such volume",
            "lastTimestamp": "2026-01-01T00:00:02Z",
        }
    )
    waited = copy.deepcopy(cluster.objects["Event", "e"])
    waited["metadata"] = {"name": "later"}
    waited["message"] = "Unable to attach or mount volumes: timed out"
    waited["lastTimestamp"] = "2026-01-01T00:00:03Z"
    cluster.put(waited)
    reconcile(cluster, 2)
    assert standing(cluster)[0] == "Starting"
    reconcile(cluster, 4)
    assert standing(cluster) == (
        "VolumeUnavailable",
        "node 1 (on n1): FailedMount: volume-0: no such volume",
    )


POD: Document = {
    "metadata": {
        "name": "p",
        "uid": "1",
        "labels": {labels.JOB_UID: "u", labels.ATTEMPT: "2", labels.COMPLETION_INDEX: "1"},
    }
}


def test_a_pod_without_any_status_is_pending() -> None:
    fact = pod_fact(POD)
    assert (fact.phase, fact.attempt, fact.node_rank, fact.terminal) == ("Pending", 2, 1, False)
    assert fact.exit_code is None


@pytest.mark.parametrize("statuses", [None, [], [{"name": "training", "state": {}}]])
def test_an_evicted_pod_may_have_no_container_statuses(statuses: list[Document] | None) -> None:
    status = {"phase": "Failed", "reason": "Evicted", "message": "disk"}
    fact = pod_fact(POD | {"status": status | {"containerStatuses": statuses}})
    assert (fact.disruption_reason, fact.exit_code) == ("Evicted", None)


def test_a_container_that_the_kubelet_lost_has_no_exit_code() -> None:
    lost = {"exitCode": 137, "reason": "ContainerStatusUnknown"}
    status = {"containerStatuses": [{"name": "training", "state": {"terminated": lost}}]}
    assert pod_fact(POD | {"status": status}).exit_code is None


def test_a_sidecars_exit_code_is_not_the_attempts() -> None:
    states = [
        {"name": "mount", "state": {"terminated": {"exitCode": 137}}},
        {"name": "training", "state": {"terminated": {"exitCode": 0}}},
    ]
    assert pod_fact(POD | {"status": {"containerStatuses": states}}).exit_code == 0


def test_the_indexes_that_a_job_gave_up_are_ranks() -> None:
    metadata = POD["metadata"]
    fact = job_fact({"metadata": metadata, "status": {"failedIndexes": "0,3-5"}})
    assert fact.failed_ranks == {0, 3, 4, 5}
    assert job_fact({"metadata": metadata}).failed_ranks == frozenset()


def test_the_time_of_a_deletion_is_when_it_was_asked_for() -> None:
    metadata = POD["metadata"] | {
        "deletionTimestamp": "2026-01-01T00:00:40Z",
        "deletionGracePeriodSeconds": 30,
    }
    assert pod_fact({"metadata": metadata}).deletion_time == START + timedelta(seconds=10)


def test_a_node_is_unwell_since_its_kubelet_fell_silent() -> None:
    ready = {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    assert node_fact({"status": {"conditions": [ready]}}).not_ready_since == START
    assert (
        node_fact({"status": {"conditions": [ready | {"status": "True"}]}}).not_ready_since is None
    )
    assert node_fact(None).exists is False


def test_the_queue_keeps_reconciles_of_one_job_apart_and_repeats_failures() -> None:
    calls: list[str] = []
    active = 0

    def work(namespace: str, name: str) -> datetime | None:
        nonlocal active
        active += 1
        assert active == 1
        calls.append(name)
        active -= 1
        if len(calls) == 1:
            raise Unavailable(503, "overloaded")
        return None

    async def scenario() -> None:
        queue = Workqueue(work)
        for _ in range(5):
            queue.add(("team", "digits"))
        async with asyncio.timeout(30):
            while len(calls) < 2:
                await asyncio.sleep(0.01)
        await queue.close()
        queue.add(("team", "digits"))
        assert queue.statistics() == {"waiting": 0, "active": 0}

    asyncio.run(scenario())
    assert calls == ["digits", "digits"]
