"""A TrainingJob as typed values: identity and checked specification.

Built by `spec` alone; read by the operator's planner and builders and by the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmount_operator.accelerators import DEFAULT_RESOURCE_NAME

__all__ = [
    "CodeItem",
    "CodeSource",
    "Compute",
    "SecretKey",
    "TrainingJob",
    "TrainingJobSpec",
    "VolumeMount",
]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How many accelerators, and how they are spread over nodes."""

    num_accelerators: int
    """Accelerators of the whole job: the world size."""

    accelerators_per_node: int
    """Accelerators of one node: the local world size. Divides `num_accelerators`."""

    resource_name: str = DEFAULT_RESOURCE_NAME
    """The resource a pod asks for, `accelerators_per_node` of it. `cpu` trains without
    accelerators.
    """

    accelerator_type: str | None = None
    """The name that `accelerators_per_node` came from, if it came from one."""

    @property
    def num_nodes(self) -> int:
        """Pods of the gang, one a node."""
        return self.num_accelerators // self.accelerators_per_node


@dataclass(frozen=True, kw_only=True)
class CodeItem:
    """One file of a ConfigMap and where it appears."""

    key: str
    """Key in the ConfigMap."""

    path: str
    """Relative path below `CODE_SOURCE_PATH`; may have directories."""


@dataclass(frozen=True, kw_only=True)
class CodeSource:
    """Where the program comes from: a folder of this machine, or a ConfigMap of the cluster."""

    root_path: str | None = None
    """Folder to pack, as written (the caller resolves it). Only the command line can: the operator
    sees no folders.
    """

    include_paths: tuple[str, ...] = ()
    """Relative paths below `root_path` to take; everything if empty."""

    config_map: str | None = None
    """Name of a ConfigMap whose keys are the files."""

    items: tuple[CodeItem, ...] = ()
    """Files of the ConfigMap and their paths; every key as a file of that name if empty."""


@dataclass(frozen=True, kw_only=True)
class SecretKey:
    """One value of a Kubernetes Secret in the job's namespace."""

    name: str
    key: str


@dataclass(frozen=True, kw_only=True)
class VolumeMount:
    """One volume, mounted at the same path in every pod. Either `source` or `claim_name` is set."""

    path: str
    """Absolute mount path."""

    source: str | None = None
    """Volume URL: `/Volumes/<catalog>/<schema>/<volume>[/sub]` or a bucket."""

    secret: str | None = None
    """Secret with DATABRICKS_HOST and DATABRICKS_TOKEN."""

    read_only: bool = False
    cache_size: str | None = None
    """Bound of the node's disk cache as a Kubernetes quantity; the driver's default if None."""

    claim_name: str | None = None
    """An existing PersistentVolumeClaim to mount instead."""


@dataclass(frozen=True, kw_only=True)
class TrainingJobSpec:
    """What the user asked for, checked."""

    experiment_name: str
    compute: Compute
    command: str
    """Runs once a node under `bash -euo pipefail -c`."""

    image: str | None = None
    """Container image; the operator's default runtime image if None."""

    code_source: CodeSource | None = None
    env_variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, SecretKey] = field(default_factory=dict)
    parameters: Mapping[str, Any] | None = None
    """Free YAML; the file at HYPERPARAMETERS_PATH. None means no such file."""

    max_retries: int = 3
    """Attempts after the first that a failing program or a timeout may cost. Interruptions are not
    counted.
    """

    timeout_minutes: int | None = None
    """How long one attempt may run, counted from the moment all its nodes run. No limit if None."""

    volumes: tuple[VolumeMount, ...] = ()
    grace_seconds: int = 30
    """Between SIGTERM and SIGKILL of a pod: what a last checkpoint may take."""

    suspend: bool = False
    ttl_seconds_after_finished: int | None = None
    """The job deletes itself this long after its end; never if None."""

    pod_template: Mapping[str, Any] = field(default_factory=dict)
    """Strategic overrides: `metadata` (labels, annotations) and `spec` of every pod."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One job: its identity and its specification."""

    name: str
    namespace: str | None
    """None if the document leaves it to the caller."""

    uid: str | None
    """None for a document that was never in a cluster."""

    generation: int
    spec: TrainingJobSpec
    notices: tuple[str, ...] = ()
    """Sentences about fields of a `workload.yaml` that are accepted and have no effect here."""
