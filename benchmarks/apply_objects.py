"""The objects of `apply_to_pods`, and its few calls to the API server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import kubernetes.client
import kubernetes.config
import kubernetes.utils

__all__ = [
    "NAMESPACE",
    "Cluster",
    "PodTemplate",
    "bare_job",
    "files_api_objects",
    "training_job",
]

NAMESPACE: Final = "trainmount-system"
"""Where the chart is installed."""

_SERVER_IMAGE: Final = "localhost/trainmount:0.1.0"
_TRAINING_IMAGE: Final = "localhost/trainmount-runtime:0.1.0"
_VOLUME: Final = "/Volumes/main/default/benchmark"
_GROUP: Final = "trainmount.dev"
_VERSION: Final = "v1alpha1"
_PLURAL: Final = "trainingjobs"
_POLL_SECONDS: Final = 0.1

# The client's annotations are too incomplete to be checked against.
client: Any = kubernetes.client
config: Any = kubernetes.config
utils: Any = kubernetes.utils


def training_job(name: str, *, with_volume: bool) -> dict[str, Any]:
    """Two nodes with one accelerator each, which do nothing."""
    spec: dict[str, Any] = {
        "experimentName": "benchmark",
        "compute": {
            "numAccelerators": 2,
            "acceleratorsPerNode": 1,
            "resourceName": "nvidia.com/gpu",
        },
        "environment": {"image": _TRAINING_IMAGE},
        "command": "true",
        "checkpoint": {"graceSeconds": 1},
    }
    if with_volume:
        spec["volumes"] = [{"path": _VOLUME, "secretRef": {"name": "databricks"}}]
    return {
        "apiVersion": f"{_GROUP}/{_VERSION}",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": spec,
    }


@dataclass(frozen=True)
class PodTemplate:
    """The pod of a TrainingJob, as a Job of nobody's can have it."""

    template: dict[str, Any]
    needed: tuple[dict[str, Any], ...]
    """ConfigMaps that it mounts."""


def bare_job(name: str, pod: PodTemplate) -> dict[str, Any]:
    """An Indexed Job with two of these pods."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimit": 0,
            "template": pod.template,
        },
    }


def files_api_objects() -> tuple[dict[str, Any], ...]:
    """A Files API server in the cluster, with an empty volume, and the Secret that leads there."""
    labels = {"app": "files-api"}
    server = {
        "name": "server",
        "image": _SERVER_IMAGE,
        "command": ["python", "-m", "trainmount_files.server", "/data", "--host", "0.0.0.0"],
        "args": ["--port", "8080", "--volume", "main.default.benchmark"],
        "env": [
            {
                "name": "TRAINMOUNT_SERVE_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "databricks", "key": "DATABRICKS_TOKEN"}},
            }
        ],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {"containers": [server], "volumes": [{"name": "data", "emptyDir": {}}]}
    return (
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "databricks"},
            # The host is filled in by the cluster, which knows the namespace.
            "stringData": {"DATABRICKS_HOST": "", "DATABRICKS_TOKEN": uuid4().hex},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "files-api"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "files-api"},
            "spec": {"selector": labels, "ports": [{"port": 8080}]},
        },
    )


class Cluster:
    """A namespace of a cluster."""

    def __init__(self, api: Any, name: str) -> None:
        self._api = api
        self._name = name
        self._core = client.CoreV1Api(api)
        self._batch = client.BatchV1Api(api)
        self._apps = client.AppsV1Api(api)
        self._objects = client.CustomObjectsApi(api)

    @classmethod
    @contextmanager
    def namespace(cls, kubeconfig: Path) -> Iterator[Cluster]:
        """A new namespace; it and what is in it are gone afterwards."""
        name = f"benchmark-{uuid4().hex[:6]}"
        api = config.new_client_from_config(str(kubeconfig))
        core = client.CoreV1Api(api)
        core.create_namespace({"metadata": {"name": name}})
        try:
            yield cls(api, name)
        finally:
            core.delete_namespace(name)
            _wait_gone(lambda: _names(core.list_namespace(), name), 300.0)

    def create(self, *manifests: dict[str, Any]) -> None:
        for manifest in manifests:
            if manifest["kind"] == "TrainingJob":
                self._objects.create_namespaced_custom_object(
                    _GROUP, _VERSION, self._name, _PLURAL, manifest
                )
                continue
            if manifest["kind"] == "Secret":
                host = f"http://files-api.{self._name}.svc.cluster.local:8080"
                data = manifest["stringData"] | {"DATABRICKS_HOST": host}
                manifest = manifest | {"stringData": data}
            utils.create_from_dict(self._api, manifest, namespace=self._name)

    def wait_for_deployment(self, name: str, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not self._apps.read_namespaced_deployment(name, self._name).status.ready_replicas:
            if time.monotonic() > deadline:
                raise RuntimeError(f"deployment {name} is not ready")
            time.sleep(_POLL_SECONDS)

    def pod_phases(self, job_name: str) -> list[str]:
        return [pod.status.phase for pod in self._pods(job_name)]

    def describe(self, job_name: str) -> str:
        """What a person needs to see why pods do not run."""
        states = [(pod.metadata.name, pod.status.to_str()) for pod in self._pods(job_name)]
        events = self._core.list_namespaced_event(self._name).items
        return f"{states}\n" + "\n".join(f"{one.reason}: {one.message}" for one in events[-20:])

    def pod_template(self, job_name: str) -> PodTemplate:
        """The pod of an attempt's Job, with labels of its own, a copy of its ConfigMap, and `true`
        in the place of the operator's start script, which waits for its peers by name."""
        job = self._batch.read_namespaced_job(job_name, self._name)
        template = self._api.sanitize_for_serialization(job.spec.template)
        own = ("batch.kubernetes.io/", "controller-uid", "job-name")
        labels = template["metadata"]["labels"]
        template["metadata"]["labels"] = {
            key: value for key, value in labels.items() if not key.startswith(own)
        }
        # The operator must not take them for its job's, the scheduler has to spread them alike.
        renamed = json.loads(json.dumps(template).replace('"trainmount.dev/', '"bare.example/'))
        renamed["spec"]["containers"][0]["command"] = ["true"]
        needed = []
        for volume in renamed["spec"]["volumes"]:
            if "configMap" in volume:
                name = volume["configMap"]["name"]
                data = self._core.read_namespaced_config_map(name, self._name).data
                volume["configMap"]["name"] = f"{name}-copy"
                metadata = {"name": f"{name}-copy"}
                needed.append(
                    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
                )
        return PodTemplate(renamed, tuple(needed))

    def delete_training_job(self, name: str, timeout_seconds: float) -> None:
        """Returns when its pods are gone."""
        self._objects.delete_namespaced_custom_object(
            _GROUP, _VERSION, self._name, _PLURAL, name, propagation_policy="Foreground"
        )
        _wait_gone(lambda: self.pod_phases(f"{name}-0"), timeout_seconds)

    def delete_job(self, name: str, timeout_seconds: float) -> None:
        """Returns when its pods are gone."""
        self._batch.delete_namespaced_job(name, self._name, propagation_policy="Foreground")
        _wait_gone(lambda: self.pod_phases(name), timeout_seconds)

    def _pods(self, job_name: str) -> list[Any]:
        selector = f"batch.kubernetes.io/job-name={job_name}"
        pods: list[Any] = self._core.list_namespaced_pod(self._name, label_selector=selector).items
        return pods


def _names(listed: Any, name: str) -> list[str]:
    return [item.metadata.name for item in listed.items if item.metadata.name == name]


def _wait_gone(what_is_left: Any, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while left := what_is_left():
        if time.monotonic() > deadline:
            raise RuntimeError(f"still there: {left}")
        time.sleep(_POLL_SECONDS)
