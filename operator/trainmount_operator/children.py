"""The Kubernetes objects of one attempt: a headless Service, a ConfigMap and an Indexed Job.

Called by `plan`. Pure: the same job, attempt and options give the same objects, so creating them a
second time is a conflict that means success. The Job never replaces a pod and deletes none
(`backoffLimitPerIndex: 0`): a gang ends and restarts as a whole, which is the planner's decision.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from trainmount_operator import labels
from trainmount_operator.environment import (
    DEFAULT_MASTER_PORT,
    NodePlacement,
    mlflow_run_id,
    node_environment,
    parameters_file,
)
from trainmount_operator.job import CodeSource, TrainingJob, VolumeMount
from trainmount_operator.launch import START_SCRIPT
from trainmount_operator.merge import strategic_merge
from trainmount_operator.spec import API_VERSION, KIND

__all__ = ["AttemptObjects", "AttemptOptions", "attempt_objects"]

_JOB_FOLDER: Final = "/trainmount/job"
_CODE_FOLDER: Final = "/trainmount/code"
_WORK_FOLDER: Final = "/trainmount/work"

# Pods on the host's network share its ports: each attempt gets one of its own out of this range.
_HOST_PORTS: Final = range(20000, 30000)


@dataclass(frozen=True, kw_only=True)
class AttemptOptions:
    """What the installation decides for every job."""

    default_image: str
    """Image of jobs that name none."""

    rendezvous_timeout_seconds: int = 300
    """How long a node waits for the name of node 0 to resolve. Long enough for an image pull on
    node 0.
    """


@dataclass(frozen=True, kw_only=True)
class AttemptObjects:
    """Manifests in the order in which they are created: the Job last, so that its pods find
    everything.
    """

    config_map: dict[str, Any]
    service: dict[str, Any]
    job: dict[str, Any]


def attempt_objects(job: TrainingJob, attempt: int, options: AttemptOptions) -> AttemptObjects:
    """Everything that one attempt consists of; `job` has a namespace and a uid."""
    return AttemptObjects(
        config_map=_config_map(job, attempt),
        service=_service(job, attempt),
        job=_indexed_job(job, attempt, options),
    )


def _metadata(job: TrainingJob, attempt: int) -> dict[str, Any]:
    assert job.uid is not None
    return {
        "name": labels.attempt_name(job.name, attempt),
        "namespace": job.namespace,
        "labels": labels.attempt_labels(job.name, job.uid, attempt),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def _config_map(job: TrainingJob, attempt: int) -> dict[str, Any]:
    data = {"command.sh": job.spec.command, "start.sh": START_SCRIPT}
    if job.spec.parameters is not None:
        data["parameters.yaml"] = parameters_file(job.spec.parameters)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, attempt),
        "immutable": True,
        "data": data,
    }


def _service(job: TrainingJob, attempt: int) -> dict[str, Any]:
    assert job.uid is not None
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, attempt),
        "spec": {
            "clusterIP": "None",
            "selector": labels.attempt_labels(job.name, job.uid, attempt),
            # Nodes look for each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "rendezvous", "port": _master_port(job, attempt)}],
        },
    }


def _indexed_job(job: TrainingJob, attempt: int, options: AttemptOptions) -> dict[str, Any]:
    num_nodes = job.spec.compute.num_nodes
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, attempt),
        "spec": {
            "completionMode": "Indexed",
            "completions": num_nodes,
            "parallelism": num_nodes,
            # A plain backoffLimit would delete the peers of a pod that failed, and their logs.
            "backoffLimitPerIndex": 0,
            "template": _pod_template(job, attempt, options),
        },
    }


def _pod_template(job: TrainingJob, attempt: int, options: AttemptOptions) -> dict[str, Any]:
    assert job.uid is not None
    own_labels = labels.attempt_labels(job.name, job.uid, attempt)
    metadata = {"labels": own_labels, "annotations": {labels.JOB_ANNOTATION: job.name}}
    base = {"metadata": metadata, "spec": _pod_spec(job, attempt, options)}
    result = strategic_merge(base, job.spec.pod_template)
    # What the operator relies on is not the user's to change.
    result["metadata"]["labels"] |= own_labels
    result["metadata"]["annotations"][labels.JOB_ANNOTATION] = job.name
    result["spec"]["restartPolicy"] = "Never"
    result["spec"]["subdomain"] = labels.attempt_name(job.name, attempt)
    return result


def _pod_spec(job: TrainingJob, attempt: int, options: AttemptOptions) -> dict[str, Any]:
    assert job.uid is not None
    pod_volumes, mounts = _pod_volumes(job, attempt)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.spec.grace_seconds,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        # One pod a node where there is room, two on one where there is only one left.
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels.attempt_labels(job.name, job.uid, attempt)},
            }
        ],
        "containers": [_container(job, attempt, options, mounts)],
        "volumes": pod_volumes,
    }
    if _on_host_network(job):
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    return spec


def _container(
    job: TrainingJob, attempt: int, options: AttemptOptions, mounts: list[dict[str, Any]]
) -> dict[str, Any]:
    compute = job.spec.compute
    resources = {compute.resource_name: str(compute.accelerators_per_node)}
    container: dict[str, Any] = {
        "name": labels.CONTAINER_NAME,
        "image": job.spec.image or options.default_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["bash", f"{_JOB_FOLDER}/start.sh"],
        "workingDir": _WORK_FOLDER,
        "env": _variables(job, attempt, options),
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False},
        # The last lines of a program that failed say why, better than its exit code.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if _on_host_network(job):
        # Declared, so that the scheduler keeps two such pods off one machine.
        port = _master_port(job, attempt)
        container["ports"] = [{"containerPort": port, "hostPort": port}]
    return container


def _variables(job: TrainingJob, attempt: int, options: AttemptOptions) -> list[dict[str, Any]]:
    assert job.uid is not None
    spec = job.spec
    placement = NodePlacement(
        job_name=job.name,
        attempt=attempt,
        num_nodes=spec.compute.num_nodes,
        accelerators_per_node=spec.compute.accelerators_per_node,
        master_addr=labels.master_address(job.name, attempt),
        master_port=_master_port(job, attempt),
        run_id=mlflow_run_id(job.uid, attempt),
        code_source_path=_CODE_FOLDER if spec.code_source else None,
        hyperparameters_path=None if spec.parameters is None else f"{_JOB_FOLDER}/parameters.yaml",
    )
    variables = node_environment(placement, spec.env_variables)
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{labels.COMPLETION_INDEX}']"}}
    return [
        {"name": "NODE_RANK", "valueFrom": index},
        {"name": "TRAINMOUNT_RENDEZVOUS_SECONDS", "value": str(options.rendezvous_timeout_seconds)},
        *({"name": name, "value": _literal(value)} for name, value in variables.items()),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": key.name, "key": key.key}}}
            for name, key in spec.secrets.items()
        ),
    ]


def _literal(value: str) -> str:
    """Kubernetes expands `$(NAME)` in values; a doubled dollar is one that it leaves alone."""
    return value.replace("$(", "$$(")


def _pod_volumes(
    job: TrainingJob, attempt: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    name = labels.attempt_name(job.name, attempt)
    volumes: list[dict[str, Any]] = [
        {"name": "job", "configMap": {"name": name}},
        {"name": "work", "emptyDir": {}},
        # Loader workers pass batches through shared memory, of which a container has 64 MiB. Its
        # use counts as the container's memory, whose limit bounds it; a bound of its own is
        # podTemplate: {spec: {volumes: [{name: shm, emptyDir: {sizeLimit: 8Gi}}]}}.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "job", "mountPath": _JOB_FOLDER, "readOnly": True},
        {"name": "work", "mountPath": _WORK_FOLDER},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the kernel's name for it
    ]
    if job.spec.code_source is not None:
        volumes.append({"name": "code", "configMap": _code_config_map(job.spec.code_source)})
        mounts.append({"name": "code", "mountPath": _CODE_FOLDER, "readOnly": True})
    for index, volume in enumerate(job.spec.volumes):
        volumes.append({"name": f"volume-{index}"} | _volume_source(volume))
        mount = {"name": f"volume-{index}", "mountPath": volume.path}
        # A daemon that is replaced mounts anew on the node; the pod follows.
        mount["mountPropagation"] = "HostToContainer"
        mounts.append(mount | ({"readOnly": True} if volume.read_only else {}))
    return volumes, mounts


def _code_config_map(code: CodeSource) -> dict[str, Any]:
    source: dict[str, Any] = {"name": code.config_map, "defaultMode": 0o555}
    if code.items:
        source["items"] = [{"key": item.key, "path": item.path} for item in code.items]
    return source


def _volume_source(volume: VolumeMount) -> dict[str, Any]:
    if volume.claim_name is not None:
        claim = {"claimName": volume.claim_name, "readOnly": volume.read_only}
        return {"persistentVolumeClaim": claim}
    attributes = {"source": volume.source}
    if volume.cache_size is not None:
        attributes["cacheSize"] = volume.cache_size
    csi: dict[str, Any] = {
        "driver": labels.DRIVER_NAME,
        "readOnly": volume.read_only,
        "volumeAttributes": attributes,
    }
    if volume.secret is not None:
        csi["nodePublishSecretRef"] = {"name": volume.secret}
    return {"csi": csi}


def _on_host_network(job: TrainingJob) -> bool:
    return bool(job.spec.pod_template.get("spec", {}).get("hostNetwork"))


def _master_port(job: TrainingJob, attempt: int) -> int:
    if not _on_host_network(job):
        return DEFAULT_MASTER_PORT
    digest = hashlib.sha256(f"{job.uid}/{attempt}".encode()).digest()
    return _HOST_PORTS[int.from_bytes(digest[:4]) % len(_HOST_PORTS)]
