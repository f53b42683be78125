"""The example as it stands, on a cluster: what it does, what a person sees, what stays of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from rig.digits import DEADLINE_SECONDS, EXAMPLE, Digits, DigitsJob
from rig.inventory import mounts, namespace_objects
from rig.kubectl import Kubectl
from rig.under_test import ClusterUnderTest
from rig.waiting import wait_for

MANIFEST = EXAMPLE / "trainingjob.yaml"
MOUNT_PODS = "app.kubernetes.io/component=mount"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The example's run, and what was to be seen meanwhile."""

    job: DigitsJob
    before: set[str]
    """The objects of the namespace before it was applied."""

    while_running: list[str]
    """The fields of its line in `kubectl get tj`."""

    waited: str
    """What `kubectl wait` printed at its end."""


@pytest.fixture(scope="module")
def run(kubectl: Kubectl, digits: Digits) -> Iterator[Run]:
    """`kubectl apply -f trainingjob.yaml`, unchanged, until it has succeeded."""
    before = namespace_objects(kubectl, digits.namespace)
    kubectl.apply(MANIFEST, namespace=digits.namespace)
    job = DigitsJob(digits, "digits", output="digits", epochs=8)
    job.wait_step(1)
    while_running = digits("get", "tj", "digits", "--no-headers").split()
    timeout = f"--timeout={DEADLINE_SECONDS:.0f}s"
    wait = ("wait", "--for=condition=Succeeded", "trainingjob/digits", timeout)
    waited = digits(*wait, timeout_seconds=DEADLINE_SECONDS + 20)
    yield Run(job=job, before=before, while_running=while_running, waited=waited)
    digits("delete", "--ignore-not-found", "-f", str(MANIFEST))


def test_the_example_trains_on_two_nodes_and_consumes_every_sample_of_every_epoch_once(
    cluster: ClusterUnderTest, run: Run
) -> None:
    assert len(set(run.job.nodes(0))) == 2
    assert run.job.outcomes() == [("Succeeded", "Completed")]
    report = run.job.check()
    assert report["ranks"] == [0, 1, 2, 3]
    assert report["accuracy"] >= 0.95


def test_get_tells_where_the_job_stands_and_wait_ends_with_it(
    cluster: ClusterUnderTest, digits: Digits, run: Run
) -> None:
    # Name, state, succeeded, attempt, running nodes, nodes, retries.
    assert run.while_running[:7] == ["digits", "Running", "Unknown", "0", "2", "2", "0"]
    assert run.waited == "trainingjob.trainmount.dev/digits condition met\n"
    header, line = digits("get", "tj", "digits", "-o", "wide").splitlines()
    titles = ["NAME", "STATE", "SUCCEEDED", "ATTEMPT", "RUNNING", "NODES", "RETRIES", "AGE"]
    assert header.split() == [*titles, "MESSAGE"]
    assert line.split()[:7] == ["digits", "Completed", "True", "0", "0", "2", "0"]
    assert line.endswith("all nodes ended with 0 in attempt 0")


def test_describe_tells_the_story_and_logs_show_the_training(
    cluster: ClusterUnderTest, digits: Digits, run: Run
) -> None:
    text = digits("describe", "tj", "digits")
    for words in (
        "AttemptStarted",
        "attempt 0 starts on 2 nodes",
        "AttemptSucceeded",
        "all nodes ended with 0 in attempt 0",
    ):
        assert words in text
    selector = "trainmount.dev/job-name=digits,batch.kubernetes.io/job-completion-index=0"
    log = digits("logs", "-l", selector, "--tail=-1")
    assert "attempt 0: starts at step 0" in log
    assert "epoch 7 step 184 loss" in log
    assert "held-out accuracy" in log


def test_deleting_the_job_leaves_nothing_of_it_in_the_namespace_or_on_the_nodes(
    cluster: ClusterUnderTest, kubectl: Kubectl, installed: str, digits: Digits, run: Run
) -> None:
    digits("delete", "-f", str(MANIFEST))

    def left() -> set[str]:
        return namespace_objects(kubectl, digits.namespace) - run.before

    wait_for(lambda: f"the end of {left()}", lambda: not left())
    wait_for(lambda: f"the end of {mounts(cluster)}", lambda: not mounts(cluster))

    def mount_pods() -> str:
        return kubectl("-n", installed, "get", "pods", "-l", MOUNT_PODS, "-o", "name")

    wait_for(lambda: f"the end of {mount_pods()}", lambda: not mount_pods())
