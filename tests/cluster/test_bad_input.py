"""What a person did wrong, each with one clear line and nothing lost.

All wrong jobs are applied at once and the operator is killed while it looks at them; each test
then waits for its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from rig.kubectl import Kubectl
from rig.under_test import GPU, ClusterUnderTest
from rig.waiting import wait_for

Document = dict[str, Any]

TOKEN = "right-token"
VOLUME = "/Volumes/main/default/data"
NO_IMAGE = "localhost/no-such-image:1"

# Node 1 fails once node 0 can be reached; node 0 would run for ever.
FAILING = """\
echo "node $NODE_RANK starts"
if [ "$NODE_RANK" = 0 ]; then
  trap 'echo "node 0 stops"; exit 7' TERM
  python3 -m http.server "$MASTER_PORT" > /dev/null 2>&1 &
  wait
fi
until (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null; do sleep 0.2; done
echo "ValueError: bad sample 17" >&2
echo ======== >&2
exit 1
"""
FAILING_LINES = {0: ["node 0 starts", "node 0 stops"]} | {
    1: ["node 1 starts", "ValueError: bad sample 17", "========"]
}


def job(name: str, command: str = "true", **spec: Any) -> Document:
    base: Document = {
        "experimentName": "bad-input",
        "compute": {"numAccelerators": 1, "acceleratorsPerNode": 1, "resourceName": GPU},
        "command": command,
        "checkpoint": {"graceSeconds": 10},
    }
    return {
        "apiVersion": "trainmount.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": base | spec,
    }


def volume(path: str = VOLUME, secret: str = "databricks") -> list[Document]:
    return [{"path": path, "secretRef": {"name": secret}}]


def gang(num_nodes: int, per_node: int = 1) -> Document:
    num = num_nodes * per_node
    return {"numAccelerators": num, "acceleratorsPerNode": per_node, "resourceName": GPU}


def secret(name: str, namespace: str, token: str) -> Document:
    host = f"http://files-api.{namespace}.svc.cluster.local:8080"
    data = {"DATABRICKS_HOST": host, "DATABRICKS_TOKEN": token}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}


def files_api(image: str) -> list[Document]:
    """A server with one volume, which holds one file."""
    command = (
        f"mkdir -p /data{VOLUME.removeprefix('/Volumes')}; "
        f"echo precious > /data{VOLUME.removeprefix('/Volumes')}/kept; "
        "exec python -m trainmount_files.server /data --host 0.0.0.0 --port 8080"
    )
    container = {
        "name": "server",
        "image": image,
        "command": ["bash", "-c", command],
        "env": [{"name": "TRAINMOUNT_SERVE_TOKEN", "value": TOKEN}],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    metadata = {"name": "files-api", "labels": {"app": "files-api"}}
    spec = {
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsUser": 65534, "runAsGroup": 65534, "fsGroup": 65534},
        "containers": [container],
        "volumes": [{"name": "data", "emptyDir": {}}],
    }
    service = {"selector": {"app": "files-api"}, "ports": [{"port": 8080}]}
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
    ]


READ = f"cat {VOLUME}/kept"
LONG_NAME = "a" * 200
WRONG_JOBS = [
    job("wrong-token", READ, volumes=volume(secret="wrong")),
    job("missing-volume", "ls", volumes=volume("/Volumes/main/default/nothing")),
    job("missing-secret", READ, volumes=volume(secret="nothing")),
    job("missing-variable", 'echo "$PASSWORD"', secrets={"PASSWORD": "other/password"}),
    job("missing-code", 'cat "$CODE_SOURCE_PATH/a"', codeSource={"configMap": {"name": "code"}}),
    job("missing-image", environment={"image": NO_IMAGE}),
    job("too-many", compute=gang(2, per_node=1000)),
    job("exits", FAILING, compute=gang(2), maxRetries=1),
    job("user.model.1"),
    job("1abc"),
    job(LONG_NAME),
]


class Jobs:
    """The jobs of one namespace."""

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        self.kubectl = kubectl
        self.namespace = namespace

    def __call__(self, *arguments: str) -> str:
        return self.kubectl("-n", self.namespace, *arguments)

    def status(self, name: str) -> Document:
        status: Document = self.kubectl.json("-n", self.namespace, "get", "tj", name).get(
            "status", {}
        )
        return status

    def standing(self, name: str) -> tuple[str, str, str]:
        """Status, reason and message of the condition Succeeded."""
        for condition in self.status(name).get("conditions", []):
            if condition["type"] == "Succeeded":
                return condition["status"], condition["reason"], condition["message"]
        return "", "", ""

    def wait(self, name: str, *wanted: str) -> str:
        """Wait until the job's state says all of this (reason and parts of the message); its
        message."""
        seen = ("", "", "")

        def is_there() -> bool:
            nonlocal seen
            seen = self.standing(name)
            return all(part in " ".join(seen) for part in wanted)

        wait_for(
            lambda: f"{name} to be {wanted}, it is {seen}",
            is_there,
            timeout_seconds=240,
            period_seconds=1,
        )
        assert "\n" not in seen[2]
        return seen[2]

    def pods(self, name: str) -> list[Document]:
        selector = f"trainmount.dev/job-name={name}"
        return self.kubectl.items("-n", self.namespace, "get", "pods", "-l", selector)

    def assert_nothing_spent(self, name: str) -> None:
        status = self.status(name)
        assert (status["retries"], status.get("interruptions", 0)) == (0, 0)
        assert len(status["attempts"]) == 1


@pytest.fixture(scope="module")
def jobs(cluster: ClusterUnderTest, installed: str) -> Iterator[Jobs]:
    """All wrong jobs, applied at once; the operator is killed while it looks at them."""
    namespace = f"bad-input-{uuid4().hex[:6]}"
    kubectl = cluster.kubectl
    kubectl("create", "namespace", namespace)
    kubectl.apply(files_api(cluster.project_image), namespace=namespace)
    secrets = [secret("databricks", namespace, TOKEN), secret("wrong", namespace, "a-guess")]
    kubectl.apply(secrets, namespace=namespace)
    kubectl("-n", namespace, "wait", "pod/files-api", "--for=condition=Ready", "--timeout=120s")
    kubectl.apply(WRONG_JOBS, namespace=namespace)
    operator = ("-n", installed, "delete", "pod", "-l", "app.kubernetes.io/component=operator")
    kubectl(*operator, "--force", "--grace-period=0")
    yield Jobs(kubectl, namespace)
    kubectl("delete", "namespace", namespace, "--timeout=180s", timeout_seconds=200)


def change(path: str, value: Any) -> Document:
    """A job that would be right but for this field."""
    document = job("refused", volumes=volume(), maxRetries=1)
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


REFUSALS = [
    ("spec.maxRetires", 3, 'unknown field "spec.maxRetires"'),
    ("spec.command", None, "spec.command: Required value"),
    ("spec.command", "", "spec.command: Invalid value"),
    ("spec.maxRetries", -1, "spec.maxRetries: Invalid value: -1"),
    ("spec.maxRetries", "many", "spec.maxRetries: Invalid value"),
    (
        "spec.compute",
        {"numAccelerators": 3, "acceleratorsPerNode": 2},
        "spec.compute.numAccelerators: Invalid value",
    ),
    ("spec.compute.acceleratorType", "GPU_9xZ9", "spec.compute.acceleratorType: Unsupported value"),
    ("spec.volumes.0.path", "relative", "spec.volumes[0].path: Invalid value"),
    ("spec.secrets", {"TOKEN": "databricks"}, "spec.secrets.TOKEN: Invalid value"),
    ("spec.envVariables", {"WORLD_SIZE": "3"}, "spec.envVariables: Invalid value"),
    ("metadata.name", "Upper_Case", "metadata.name: Invalid value"),
]


@pytest.mark.parametrize(("path", "value", "line"), REFUSALS, ids=[r[2] for r in REFUSALS])
def test_a_wrong_field_is_refused_at_apply_by_its_name(
    jobs: Jobs, path: str, value: Any, line: str
) -> None:
    document = change(path, value)
    document["metadata"]["namespace"] = jobs.namespace
    command = jobs.kubectl.command("create", "-f", "-")
    done = subprocess.run(command, input=json.dumps(document), capture_output=True, text=True)
    assert done.returncode == 1
    assert line in done.stderr
    names = [item["metadata"]["name"] for item in jobs.kubectl.items("get", "tj", "-A")]
    assert document["metadata"]["name"] not in names


WAITING = [
    ("wrong-token", "VolumeUnavailable", [VOLUME, "the host does not take the token (HTTP 401)"]),
    (
        "missing-volume",
        "VolumeUnavailable",
        ["/Volumes/main/default/nothing", "does not exist, or this identity may not see it"],
    ),
    ("missing-secret", "VolumeUnavailable", [f"volume {VOLUME}: ", 'secrets "nothing" not found']),
    ("missing-variable", "ConfigurationMissing", ['secret "other" not found']),
    ("missing-code", "ConfigurationMissing", ['configmap "code" not found']),
    ("missing-image", "ImageUnavailable", [NO_IMAGE]),
    ("too-many", "Unschedulable", ["2 of 2 nodes wait for room: ", f"Insufficient {GPU}"]),
]


@pytest.mark.parametrize(("name", "reason", "parts"), WAITING, ids=[w[0] for w in WAITING])
def test_a_job_that_cannot_start_says_what_it_waits_for_and_spends_nothing(
    jobs: Jobs, name: str, reason: str, parts: list[str]
) -> None:
    message = jobs.wait(name, "Unknown", reason, *parts)
    jobs.assert_nothing_spent(name)
    assert reason in jobs("get", "tj", name)
    described = jobs("describe", "tj", name)
    assert message in described
    # The event names the job and the reason too.
    events = jobs.kubectl.items(
        "-n",
        jobs.namespace,
        "get",
        "events",
        f"--field-selector=involvedObject.name={name},reason={reason}",
    )
    assert events


def test_jobs_start_by_themselves_once_what_they_lack_is_there(jobs: Jobs) -> None:
    for name, reason, _ in WAITING[:5]:
        jobs.wait(name, reason)
    other = secret("other", jobs.namespace, "") | {"stringData": {"password": "sesame"}}
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}}
    jobs.kubectl.apply(
        [
            secret("wrong", jobs.namespace, TOKEN),
            secret("nothing", jobs.namespace, TOKEN),
            other,
            code | {"data": {"a": "contents"}},
        ],
        namespace=jobs.namespace,
    )
    jobs("exec", "files-api", "--", "mkdir", "/data/main/default/nothing")
    printed = {
        "wrong-token": "precious\n",
        "missing-secret": "precious\n",
        "missing-volume": "",
        "missing-variable": "sesame\n",
        "missing-code": "contents",
    }
    for name, output in printed.items():
        jobs.wait(name, "True", "Completed")
        jobs.assert_nothing_spent(name)
        [pod] = jobs.pods(name)
        assert jobs("logs", pod["metadata"]["name"]) == output


def test_a_program_that_fails_ends_the_job_with_its_code_and_its_error(jobs: Jobs) -> None:
    message = jobs.wait("exits", "False", "ProgramFailed")
    status = jobs.status("exits")
    assert status["retries"] == 1
    expected = {"outcome": "Failed", "reason": "ProgramFailed", "exitCode": 1, "nodeRank": 1}
    for number, attempt in enumerate(status["attempts"]):
        assert attempt["number"] == number
        assert attempt.items() >= expected.items()
        assert attempt["message"].endswith("failed (exit code 1): ValueError: bad sample 17")
    assert len(status["attempts"]) == 2
    assert message == f"attempt 1: {status['attempts'][1]['message']} (retries spent: 1)"


def test_every_node_of_a_failed_job_keeps_its_log_and_its_exit_code(
    jobs: Jobs, cluster: ClusterUnderTest
) -> None:
    jobs.wait("exits", "False", "ProgramFailed")

    def ended_pods() -> dict[tuple[int, int], Document] | None:
        pods = jobs.pods("exits")
        if any(pod["status"]["phase"] not in ("Failed", "Succeeded") for pod in pods):
            return None
        return {_place(pod): pod for pod in pods}

    pods = wait_for("the pods of exits to end", ended_pods)
    assert sorted(pods) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for (_, node), pod in pods.items():
        [container] = pod["status"]["containerStatuses"]
        assert container["state"]["terminated"]["exitCode"] == {0: 7, 1: 1}[node]
        assert jobs("logs", pod["metadata"]["name"]).splitlines() == FAILING_LINES[node]

    command = [sys.executable, "-m", "trainmount_cli", "logs", "exits", "-n", jobs.namespace]
    environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        *_told(0, 7),
        *_told(1, 1),
        "-- attempt 1",
        *_told(0, 7),
        *_told(1, 1),
    ]


def _place(pod: Document) -> tuple[int, int]:
    """Attempt and node."""
    labels = pod["metadata"]["labels"]
    index = labels["batch.kubernetes.io/job-completion-index"]
    return int(labels["trainmount.dev/attempt"]), int(index)


def _told(node: int, code: int) -> list[str]:
    lines = [f"[node {node}] {line}" for line in FAILING_LINES[node]]
    return [*lines, f"-- node {node} ended with exit code {code}"]


@pytest.mark.parametrize(
    "name", ["user.model.1", "1abc", LONG_NAME], ids=["dotted", "digit", "long"]
)
def test_a_name_that_no_host_can_have_is_shortened(jobs: Jobs, name: str) -> None:
    assert jobs.wait(name, "True", "Completed") == "all nodes ended with 0 in attempt 0"
    jobs.assert_nothing_spent(name)


def test_a_job_that_waits_for_ever_can_be_deleted(jobs: Jobs) -> None:
    def is_gone(name: str) -> bool:
        return not jobs.pods(name)

    jobs("delete", "tj", "too-many", "missing-image", "--timeout=120s")
    for name in ("too-many", "missing-image"):
        wait_for(f"the pods of {name} to go", partial(is_gone, name))
