"""A gang on real kubelets: how it starts together, and how it is stopped with all it had to say."""

from __future__ import annotations

import json
from typing import Any

from rig.kubectl import Kubectl
from rig.under_test import GPU
from rig.waiting import wait_for

Document = dict[str, Any]

GATE = "trainmount.dev/test"
PATIENT = "trap 'echo saved; exit 1' TERM; echo started; sleep 100000 & wait"
# Node 0 answers once and both end. Node 1 is started only when every name server knows node 0.
MEETING = """\
if [ "$NODE_RANK" = 0 ]; then
  python3 -c 'import os, socket
with socket.create_server(("", int(os.environ["MASTER_PORT"]))) as server: server.accept()'
else
  python3 -c 'import os, socket
for _ in range(20): socket.getaddrinfo(os.environ["MASTER_ADDR"], None)'
  until (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null; do sleep 0.2; done
fi
"""


def job(name: str, command: str, **spec: Any) -> Document:
    base: Document = {
        "experimentName": "gang",
        "compute": {"numAccelerators": 2, "acceleratorsPerNode": 1, "resourceName": GPU},
        "command": command,
        "maxRetries": 0,
    }
    return {
        "apiVersion": "trainmount.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": base | spec,
    }


class Gang:
    """One job of two nodes."""

    def __init__(self, kubectl: Kubectl, namespace: str, document: Document) -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.name: str = document["metadata"]["name"]
        kubectl.apply(document, namespace=namespace)

    def __call__(self, *arguments: str) -> str:
        return self.kubectl("-n", self.namespace, *arguments)

    def status(self) -> Document:
        found = self.kubectl.json("-n", self.namespace, "get", "tj", self.name)
        status: Document = found.get("status", {})
        return status

    def state(self) -> str:
        for condition in self.status().get("conditions", []):
            if condition["type"] == "Succeeded":
                return str(condition["reason"])
        return ""

    def wait(self, state: str, attempt: int) -> None:
        def is_there() -> bool:
            return self.state() == state and self.status()["attempt"] == attempt

        wait_for(lambda: f"{state}, it is {self.status()}", is_there, timeout_seconds=120)

    def pods(self, attempt: int) -> dict[int, Document]:
        """By node."""
        labels = f"trainmount.dev/job-name={self.name},trainmount.dev/attempt={attempt}"
        pods = self.kubectl.items("-n", self.namespace, "get", "pods", "-l", labels)
        index = "batch.kubernetes.io/job-completion-index"
        return {int(pod["metadata"]["labels"][index]): pod for pod in pods}

    def log(self, pod: Document) -> str:
        return self("logs", pod["metadata"]["name"])

    def wait_said(self, word: str, attempt: int) -> None:
        def is_said() -> bool:
            pods = self.pods(attempt).values()
            return len(pods) == 2 and all(word in self.log(pod) for pod in pods)

        wait_for(f"both nodes of attempt {attempt} to say {word}", is_said, period_seconds=1)

    def release(self, pod: Document) -> None:
        """Let the scheduler have the pod."""
        change = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
        self("patch", "pod", pod["metadata"]["name"], "--type=json", "-p", change)


def test_a_node_that_starts_before_node_0_exists_waits_for_its_name(
    kubectl: Kubectl, installed: str, namespace: str
) -> None:
    gated = {"spec": {"schedulingGates": [{"name": GATE}]}}
    gang = Gang(kubectl, namespace, job("late", MEETING, podTemplate=gated))
    pods = wait_for("two pods", lambda: p if len(p := gang.pods(0)) == 2 else None)
    gang.release(pods[1])
    wait_for("node 1 to run", lambda: gang.status().get("runningNodes") == 1)
    gang.release(pods[0])
    gang.wait("Completed", 0)
    assert len(gang.status()["attempts"]) == 1


def test_a_suspended_job_gets_its_grace_keeps_its_logs_and_spends_nothing(
    kubectl: Kubectl, installed: str, namespace: str
) -> None:
    gang = Gang(kubectl, namespace, job("patient", PATIENT))
    gang.wait("Running", 0)
    gang.wait_said("started", 0)
    gang("patch", "tj", "patient", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    gang.wait("Suspended", 0)
    for pod in gang.pods(0).values():
        [container] = pod["status"]["containerStatuses"]
        assert container["state"]["terminated"]["exitCode"] == 1
        assert gang.log(pod) == "started\nsaved\n"
    gang("patch", "tj", "patient", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    gang.wait("Running", 1)
    status = gang.status()
    assert (status["retries"], status["interruptions"]) == (0, 0)
    assert status["attempts"][0]["outcome"] == "Suspended"
    assert len(gang.pods(0)) == 2


def test_a_deleted_pod_is_an_interruption_whatever_its_exit_code_and_its_peers_log_stays(
    kubectl: Kubectl, installed: str, namespace: str
) -> None:
    gang = Gang(kubectl, namespace, job("patient", PATIENT))
    gang.wait("Running", 0)
    gang.wait_said("started", 0)
    gang("delete", "pod", gang.pods(0)[1]["metadata"]["name"], "--wait=false")
    gang.wait("Running", 1)
    status = gang.status()
    assert (status["retries"], status["interruptions"]) == (0, 1)
    first = status["attempts"][0]
    assert (first["outcome"], first["reason"], first["nodeRank"]) == (
        "Interrupted",
        "PodDeleted",
        1,
    )
    [peer] = gang.pods(0).values()
    assert gang.log(peer) == "started\nsaved\n"
