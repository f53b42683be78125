"""What a running job loses on a cluster, one thing a test, and that it ends as if nothing was lost.

Each job is held at a gate until the damage is done. Weights are compared bit for bit with those of
a job that nothing happened to.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from rig.digits import GATE_STEP, Digits, DigitsJob
from rig.kubectl import Kubectl
from rig.under_test import ClusterUnderTest
from rig.waiting import wait_for

DAMAGE_STEP = 10
"""Between two checkpoints, so that there is something to lose."""

OPERATOR = r"-m trainmount_operator\b"
SERVE = r"-m trainmount_fuse .*\bserve\b"

UNDISTURBED = [("Succeeded", "Completed")]
INTERRUPTED = [("Interrupted", "PodDeleted"), ("Succeeded", "Completed")]


@pytest.fixture
def job(digits: Digits, request: pytest.FixtureRequest) -> DigitsJob:
    """A gated job that has trained past its first checkpoint, on two nodes."""
    name = str(request.param)
    job = digits.run(name, gate_step=GATE_STEP)
    job.wait_step(DAMAGE_STEP)
    assert len(set(job.nodes(0))) == 2
    return job


def gated(name: str) -> pytest.MarkDecorator:
    """The name of the test's job."""
    return pytest.mark.parametrize("job", [name], indirect=True)


@gated("pod-deleted")
def test_a_deleted_training_pod_costs_no_retry_and_no_sample(
    cluster: ClusterUnderTest, digits: Digits, job: DigitsJob, undisturbed_weights: str
) -> None:
    victim = job.pods(0)[1]["metadata"]["name"]
    digits("delete", "pod", victim, "--wait=false")
    record = job.wait_attempt_ended(0)
    job.open_gate()
    status = job.wait_succeeded()
    assert job.outcomes() == INTERRUPTED
    assert (status["retries"], status["interruptions"]) == (0, 1)
    assert record["nodeRank"] == 1
    assert f"pod {victim} was deleted; no retry spent" in digits("describe", "tj", job.name)
    # The pod got SIGTERM first, and the job saved: nothing was trained twice.
    assert resumed_step(job, 1) >= DAMAGE_STEP
    assert job.weights() == undisturbed_weights


def test_a_process_out_of_memory_costs_a_retry_and_no_sample(
    cluster: ClusterUnderTest, digits: Digits, undisturbed_weights: str
) -> None:
    limit = {"name": "training", "resources": {"limits": {"memory": "2Gi"}}}
    template = {"spec": {"containers": [limit]}}
    job = digits.run("out-of-memory", hog_step=DAMAGE_STEP, pod_template=template)
    record = job.wait_attempt_ended(0)
    status = job.wait_succeeded()
    assert job.outcomes() == [("Failed", "OutOfMemory"), ("Succeeded", "Completed")]
    assert (status["retries"], status["interruptions"]) == (1, 0)
    # Ranks 2 and 3 are on node 1.
    assert record["nodeRank"] == 1
    text = digits("describe", "tj", job.name)
    assert "was killed: out of memory" in text
    assert "retry 1 follows" in text
    assert resumed_step(job, 1) == 8
    assert job.weights() == undisturbed_weights


@gated("operator-killed")
def test_a_job_outlives_its_operator_also_in_the_middle_of_a_restart(
    cluster: ClusterUnderTest,
    kubectl: Kubectl,
    installed: str,
    digits: Digits,
    job: DigitsJob,
    undisturbed_weights: str,
) -> None:
    [operator] = component_pods(kubectl, installed, "operator")
    kill(cluster, operator["spec"]["nodeName"], OPERATOR)

    def has_restarted() -> bool:
        [again] = component_pods(kubectl, installed, "operator")
        [container] = again["status"]["containerStatuses"]
        return bool(container["restartCount"] > 0 and container["ready"])

    wait_for("the operator to restart", has_restarted)
    job.check_goes_on(0)
    digits("delete", "pod", job.pods(0)[0]["metadata"]["name"], "--wait=false")
    job.wait_attempt_ended(0)
    # The end is recorded; the next attempt is up to the operator's successor.
    name = operator["metadata"]["name"]
    kubectl("-n", installed, "delete", "pod", name, "--force", "--grace-period=0")
    job.open_gate()
    status = job.wait_succeeded()
    assert job.outcomes() == INTERRUPTED
    assert (status["retries"], status["interruptions"]) == (0, 1)
    assert resumed_step(job, 1) >= DAMAGE_STEP
    assert job.weights() == undisturbed_weights


@gated("daemon-killed")
def test_a_job_does_not_notice_that_the_daemon_of_its_mount_is_killed(
    cluster: ClusterUnderTest, job: DigitsJob, undisturbed_weights: str
) -> None:
    for node in job.nodes(0):
        old = daemons(cluster, node)
        assert old
        cluster.on_node(node, "kill", "-9", *map(str, old))

        def has_successor(node: str = node, old: set[int] = old) -> bool:
            return bool(daemons(cluster, node) - old)

        wait_for(f"a new daemon on {node}", has_successor)
    ends_unharmed(job, undisturbed_weights)


@gated("driver-deleted")
def test_a_job_does_not_notice_that_the_pods_of_the_driver_are_replaced(
    cluster: ClusterUnderTest,
    kubectl: Kubectl,
    installed: str,
    job: DigitsJob,
    undisturbed_weights: str,
) -> None:
    replace_pods(kubectl, installed, "driver")
    ends_unharmed(job, undisturbed_weights)


@gated("mount-pods-deleted")
def test_a_job_does_not_notice_that_its_mount_pods_are_replaced(
    cluster: ClusterUnderTest,
    kubectl: Kubectl,
    installed: str,
    job: DigitsJob,
    undisturbed_weights: str,
) -> None:
    replace_pods(kubectl, installed, "mount")
    ends_unharmed(job, undisturbed_weights)


def ends_unharmed(job: DigitsJob, undisturbed_weights: str) -> None:
    """The first attempt goes on to a good end."""
    job.check_goes_on(0)
    job.open_gate()
    status = job.wait_succeeded()
    assert job.outcomes() == UNDISTURBED
    assert (status["retries"], status["interruptions"]) == (0, 0)
    assert job.weights() == undisturbed_weights


def resumed_step(job: DigitsJob, attempt: int) -> int:
    """The step from which an attempt went on, as its log says."""
    found = re.search(rf"attempt {attempt}: resumed at step (\d+)", job.log(attempt))
    assert found, job.log(attempt)
    return int(found[1])


def component_pods(kubectl: Kubectl, namespace: str, component: str) -> list[dict[str, Any]]:
    """The project's own pods of one component."""
    selector = f"app.kubernetes.io/component={component}"
    return kubectl.items("-n", namespace, "get", "pods", "-l", selector)


def replace_pods(kubectl: Kubectl, namespace: str, component: str) -> None:
    """Delete all pods of a component; return when others have taken their place."""
    old = {pod["metadata"]["name"] for pod in component_pods(kubectl, namespace, component)}
    assert len(old) == 2
    kubectl("-n", namespace, "delete", "pods", *old, "--wait=false")

    def are_replaced() -> bool:
        pods = component_pods(kubectl, namespace, component)
        ready = {
            pod["metadata"]["name"]
            for pod in pods
            for condition in pod["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        }
        return len(pods) == len(ready) == len(old) and not ready & old

    wait_for(f"new pods of the {component}", are_replaced, timeout_seconds=240)


def processes(cluster: ClusterUnderTest, node: str, pattern: str) -> set[int]:
    """The processes of a node whose command line matches."""
    lines = (
        line.split(None, 1) for line in cluster.on_node(node, "ps", "-eo", "pid,args").splitlines()
    )
    return {int(pid) for pid, command in lines if re.search(pattern, command)}


def daemons(cluster: ClusterUnderTest, node: str) -> set[int]:
    """The daemons of a node's mounts: forks of the processes that were started to serve them."""
    parents = dict(
        line.split() for line in cluster.on_node(node, "ps", "-eo", "pid,ppid").splitlines()
    )
    serving = processes(cluster, node, SERVE)
    return {pid for pid in serving if int(parents.get(str(pid), 0)) in serving}


def kill(cluster: ClusterUnderTest, node: str, pattern: str) -> set[int]:
    """`kill -9` of the processes of a node whose command line matches; their numbers."""
    pids = processes(cluster, node, pattern)
    assert pids
    cluster.on_node(node, "kill", "-9", *map(str, pids))
    return pids
