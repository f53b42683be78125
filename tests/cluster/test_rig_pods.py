"""The cluster itself: what pods can do on it that the project's own tests rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rig.kubectl import Kubectl
from rig.manifests import configmap, headless_service, pod
from rig.under_test import GPU, GPUS_PER_NODE, ClusterUnderTest
from rig.waiting import wait_for

PROGRAMS = Path(__file__).parent / "programs"


def phase(kubectl: Kubectl, namespace: str, name: str) -> str:
    status = kubectl.json("-n", namespace, "get", "pod", name)["status"]
    return str(status["phase"])


def wait_for_phase(kubectl: Kubectl, namespace: str, name: str, wanted: str) -> None:
    wait_for(
        lambda: f"pod {name} to be {wanted}, it is {phase(kubectl, namespace, name)}",
        lambda: phase(kubectl, namespace, name) == wanted,
    )


def test_two_nodes_are_ready_and_announce_gpus(cluster: ClusterUnderTest) -> None:
    nodes = cluster.nodes()
    assert len(nodes) >= 2
    for node in nodes:
        assert cluster.is_ready(node)
        status = cluster.kubectl.json("get", "node", node)["status"]
        assert status["allocatable"][GPU] == str(GPUS_PER_NODE)


def test_a_pod_gets_the_gpus_it_asks_for_and_no_more_than_there_are(
    cluster: ClusterUnderTest, kubectl: Kubectl, namespace: str
) -> None:
    hold = ("sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait")
    image = cluster.project_image
    node = cluster.nodes()[0]
    selector = {"kubernetes.io/hostname": node}
    kubectl.apply(pod("three", image, *hold, gpus=3, nodeSelector=selector), namespace=namespace)
    wait_for_phase(kubectl, namespace, "three", "Running")
    kubectl.apply(pod("two", image, *hold, gpus=2, nodeSelector=selector), namespace=namespace)
    scheduled = wait_for(
        "the scheduler to look at the pod", lambda: condition(kubectl, namespace, "two")
    )
    assert scheduled["reason"] == "Unschedulable"
    assert f"Insufficient {GPU}" in scheduled["message"]
    if cluster.rig:
        show = ("exec", "three", "--", "sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES")
        devices = kubectl("-n", namespace, *show)
        assert len(set(devices.strip().split(","))) == 3


def condition(kubectl: Kubectl, namespace: str, name: str) -> dict[str, Any] | None:
    status = kubectl.json("-n", namespace, "get", "pod", name)["status"]
    found = [c for c in status.get("conditions", []) if c["type"] == "PodScheduled"]
    return found[0] if found else None


def test_pods_on_two_nodes_find_each_other_by_name_and_reduce_a_tensor(
    cluster: ClusterUnderTest, kubectl: Kubectl, namespace: str
) -> None:
    name = "all-reduce"
    node = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    index = {
        "fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}
    }
    environment = [
        {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
        {"name": "MASTER_PORT", "value": "29500"},
        {"name": "WORLD_SIZE", "value": "2"},
        {"name": "RANK", "valueFrom": index},
        {"name": "NODE", "valueFrom": node},
    ]
    apart = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"job-name": name}},
    }
    template = pod(
        name,
        cluster.runtime_image,
        *("python", "/code/all_reduce.py"),
        gpus=1,
        container={
            "env": environment,
            "volumeMounts": [{"name": "code", "mountPath": "/code"}],
        },
        volumes=[{"name": "code", "configMap": {"name": "code"}}],
        subdomain=name,
        affinity={
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]},
        },
    )
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimit": 0,
            "template": {"spec": template["spec"]},
        },
    }
    service = headless_service(name, **{"job-name": name})
    code = configmap("code", PROGRAMS / "all_reduce.py")
    kubectl.apply([code, service, job], namespace=namespace)

    def finished() -> dict[str, Any] | None:
        status = kubectl.json("-n", namespace, "get", "job", name)["status"]
        done: list[dict[str, Any]] = [
            c
            for c in status.get("conditions", [])
            if c["type"] in ("Complete", "Failed") and c["status"] == "True"
        ]
        return done[0] if done else None

    assert wait_for("the job's end", finished, timeout_seconds=240)["type"] == "Complete"
    logs = kubectl("-n", namespace, "logs", "-l", f"job-name={name}")
    assert logs.count(": 3.0") == 2
    pods = kubectl.items("-n", namespace, "get", "pods")
    assert len({item["spec"]["nodeName"] for item in pods}) == 2


def test_a_process_above_its_memory_limit_is_oom_killed(
    cluster: ClusterUnderTest, kubectl: Kubectl, namespace: str
) -> None:
    limits = {"resources": {"limits": {"memory": "64Mi"}}}
    grow = pod(
        "grow",
        cluster.project_image,
        *("python", "-c", "x = bytearray(512 << 20); print(len(x))"),
        container=limits,
    )
    kubectl.apply(grow, namespace=namespace)
    wait_for_phase(kubectl, namespace, "grow", "Failed")
    [status] = kubectl.json("-n", namespace, "get", "pod", "grow")["status"]["containerStatuses"]
    assert status["state"]["terminated"]["reason"] == "OOMKilled"
    assert status["state"]["terminated"]["exitCode"] == 137


def test_a_privileged_pod_mounts_a_filesystem_that_another_pod_reads(
    cluster: ClusterUnderTest, kubectl: Kubectl, namespace: str
) -> None:
    node = cluster.nodes()[0]
    folder = f"/var/lib/kubelet/plugins/{namespace}"
    host = {"name": "host", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    code = {"name": "code", "configMap": {"name": "code"}}
    serve = f"mkdir -p {folder}/mnt && exec python /code/hello_fuse.py {folder}/mnt"
    mounter = pod(
        "mounter",
        cluster.project_image,
        *("bash", "-ec", serve),
        container={
            "securityContext": {"privileged": True, "runAsUser": 0},
            "volumeMounts": [
                {"name": "code", "mountPath": "/code"},
                {"name": "host", "mountPath": folder, "mountPropagation": "Bidirectional"},
            ],
        },
        volumes=[host, code],
        nodeName=node,
    )
    reader = pod(
        "reader",
        cluster.project_image,
        *("bash", "-ec", "until [ -e /seen/mnt/hello ]; do sleep 0.2; done; cat /seen/mnt/hello"),
        container={
            "securityContext": {"runAsUser": 65534, "allowPrivilegeEscalation": False},
            "volumeMounts": [
                {"name": "host", "mountPath": "/seen", "mountPropagation": "HostToContainer"}
            ],
        },
        volumes=[host],
        nodeName=node,
    )
    code_map = configmap("code", PROGRAMS / "hello_fuse.py")
    kubectl.apply([code_map, mounter, reader], namespace=namespace)
    wait_for_phase(kubectl, namespace, "reader", "Succeeded")
    assert kubectl("-n", namespace, "logs", "reader") == "hello from a pod\n"
