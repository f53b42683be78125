"""The environment in which a job's command runs on one node.

Called by `children` for pods and by the command line for processes of this machine, so that a
program sees the same variables wherever it runs. Pure. RANK and LOCAL_RANK are not among them: they
are the launcher's (torchrun).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

__all__ = [
    "DEFAULT_MASTER_PORT",
    "RESERVED",
    "NodePlacement",
    "mlflow_run_id",
    "node_environment",
    "parameters_file",
]

# torchrun's own default, free in a pod, which has a network of its own.
DEFAULT_MASTER_PORT: Final = 29500

RESERVED: Final = frozenset(
    {
        "CODE_SOURCE_PATH",
        "HYPERPARAMETERS_PATH",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "MLFLOW_RUN_ID",
        "NODE_RANK",
        "NUM_NODES",
        "TRAINMOUNT_ATTEMPT",
        "TRAINMOUNT_JOB",
        "WORLD_SIZE",
    }
)


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """Where one node stands in one attempt of a job."""

    job_name: str
    attempt: int
    """From 0; a new number for every restart of the gang."""

    num_nodes: int
    accelerators_per_node: int
    """Processes of one node."""

    master_addr: str
    """Host name of node 0, the same on every node."""

    master_port: int = DEFAULT_MASTER_PORT
    node_rank: int | None = None
    """From 0. None where something else sets NODE_RANK, as the pod's completion index does."""

    run_id: str
    """The MLflow run of this attempt: `mlflow_run_id()`."""

    code_source_path: str | None = None
    """Folder with the program; None if the job has none."""

    hyperparameters_path: str | None = None
    """File with `parameters`; None if the job has none."""


def node_environment(placement: NodePlacement, variables: Mapping[str, str]) -> dict[str, str]:
    """What the command finds in its environment: the user's variables and the job's, sorted by
    name.
    """
    result = dict(variables)
    result |= {
        "LOCAL_WORLD_SIZE": str(placement.accelerators_per_node),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
        "MLFLOW_RUN_ID": placement.run_id,
        "NUM_NODES": str(placement.num_nodes),
        "TRAINMOUNT_ATTEMPT": str(placement.attempt),
        "TRAINMOUNT_JOB": placement.job_name,
        "WORLD_SIZE": str(placement.num_nodes * placement.accelerators_per_node),
    }
    if placement.node_rank is not None:
        result["NODE_RANK"] = str(placement.node_rank)
    if placement.code_source_path is not None:
        result["CODE_SOURCE_PATH"] = placement.code_source_path
    if placement.hyperparameters_path is not None:
        result["HYPERPARAMETERS_PATH"] = placement.hyperparameters_path
    return dict(sorted(result.items()))


def mlflow_run_id(uid: str, attempt: int) -> str:
    """The run of one attempt: 32 hexadecimal digits as MLflow's own, the same each time it is asked
    for.
    """
    return hashlib.sha256(f"{uid}/{attempt}".encode()).hexdigest()[:32]


def parameters_file(parameters: Mapping[str, Any]) -> str:
    """The text of the file at HYPERPARAMETERS_PATH, in the order the user wrote."""
    return yaml.safe_dump(dict(parameters), sort_keys=False, allow_unicode=True)
