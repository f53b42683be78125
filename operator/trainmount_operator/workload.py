"""The AI Runtime's `workload.yaml` (snake case) as a TrainingJob manifest.

Called by `spec` for a document without `kind`. Field names are translated by one table; what has no
meaning outside the AI Runtime is accepted and reported as a notice, what would change how the job
runs is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

from trainmount_operator.fields import Fields, SpecError

__all__ = ["path_in_workload", "to_manifest"]

# Names in a workload that differ from the manifest's, by the last segment of their path.
_NAMES: Final = {
    "experiment_name": "experimentName",
    "num_accelerators": "numAccelerators",
    "accelerator_type": "acceleratorType",
    "accelerators_per_node": "acceleratorsPerNode",
    "resource_name": "resourceName",
    "code_source": "codeSource",
    "root_path": "rootPath",
    "include_paths": "includePaths",
    "config_map": "configMap",
    "env_variables": "envVariables",
    "max_retries": "maxRetries",
    "timeout_minutes": "timeoutMinutes",
    "secret_ref": "secretRef",
    "read_only": "readOnly",
    "cache_size": "cacheSize",
    "claim_name": "claimName",
    "grace_seconds": "graceSeconds",
    "ttl_seconds_after_finished": "ttlSecondsAfterFinished",
    "pod_template": "podTemplate",
}
_INVERSE: Final = {camel: snake for snake, camel in _NAMES.items()}

# The user's own keys stand below these: they are never translated.
_FREE: Final = frozenset({"env_variables", "secrets", "parameters", "pod_template"})

_WITHOUT_EFFECT: Final = {
    "idempotency_token": "use --idempotency-key",
    "mlflow_run_name": "set it in the program",
    "mlflow_experiment_directory": "set it in the program",
    "mlflow_artifact_location": "set it in the program",
    "permissions": "access is the cluster's RBAC",
    "usage_policy_name": "there is no budget policy here",
    "usage_policy_id": "there is no budget policy here",
}
_LONGEST_NAME: Final = 46


def to_manifest(
    document: Mapping[str, Any], *, api_version: str, kind: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The manifest, and a sentence for every field that is accepted without effect.

    Raises:
        SpecError: an unknown field, or one that cannot be carried out here; the path is the
            workload's.
    """
    workload = dict(document)
    notices = [
        f"{name}: has no effect here, {way_out}"
        for name, way_out in _WITHOUT_EFFECT.items()
        if workload.pop(name, None) is not None
    ]
    name = workload.get("experiment_name")
    if not isinstance(name, str) or not name.strip():
        raise SpecError("experiment_name", "is required and must be a string that is not empty")
    if "containers" in workload:
        raise SpecError("containers", "is not supported; use command")
    if isinstance(workload.get("environment"), dict):
        workload["environment"] = _environment(
            Fields(workload["environment"], "environment"), notices
        )
    if isinstance(workload.get("code_source"), dict):
        workload["code_source"] = _code_source(workload["code_source"], notices)
    spec = _translated(workload, "")
    manifest = {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": _object_name(name)},
        "spec": spec,
    }
    return manifest, tuple(notices)


def path_in_workload(path: str) -> str:
    """A manifest's path as the workload spells it: `spec.maxRetries` is `max_retries`."""
    segments = path.split(".")
    if segments[0] == "metadata":
        return "experiment_name"
    if segments[0] == "spec":
        segments = segments[1:] or ["document"]
    result: list[str] = []
    for index, segment in enumerate(segments):
        if index and result[0] in _FREE:
            result += segments[index:]
            break
        name, bracket, rest = segment.partition("[")
        result.append(_INVERSE.get(name, name) + bracket + rest)
    return ".".join(result)


def _translated(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_translated(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, inner in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key in _INVERSE:
            raise SpecError(where, f"unknown field; did you mean {_INVERSE[key]!r}?")
        # Free maps stand at the top; a field of that name elsewhere is an unknown one anyway.
        result[_NAMES.get(key, key)] = (
            inner if not path and key in _FREE else _translated(inner, where)
        )
    return result


def _environment(fields: Fields, notices: list[str]) -> dict[str, Any]:
    image = fields.raw("image")
    if fields.has("version"):
        notices.append("environment.version: has no effect here, the image says what is installed")
    if fields.items("dependencies"):
        notices.append("environment.dependencies: are not installed here, the image must have them")
    for name in ("docker_image", "unity_catalog_image"):
        if fields.has(name):
            raise SpecError(fields.at(name), "is not supported; give environment.image")
    fields.finish()
    return {} if image is None else {"image": image}


def _code_source(value: dict[str, Any], notices: list[str]) -> dict[str, Any]:
    """The flat spelling, out of either of the two that exist."""
    path, flat = "code_source", dict(value)
    if "snapshot" in flat or "type" in flat:
        outer = Fields(value, path)
        if outer.raw("type") not in (None, "snapshot"):
            raise SpecError(outer.at("type"), f"must be snapshot, got {outer.raw('type')!r}")
        outer.required("snapshot")
        outer.finish()
        path = outer.at("snapshot")
        flat = dict(Fields(value["snapshot"], path)._value)
    if flat.pop("remote_volume", None) is not None:
        notices.append(f"{path}.remote_volume: has no effect here, the code travels with the job")
    if flat.pop("git", None) is not None:
        raise SpecError(f"{path}.git", "is not supported; check the commit out and leave git away")
    return flat


def _object_name(experiment_name: str) -> str:
    """A Kubernetes name for the experiment: the name itself in lower case where it can be one."""
    name = re.sub(r"[^a-z0-9-]+", "-", experiment_name.lower()).strip("-")
    if name and len(name) <= _LONGEST_NAME and name[0].isalpha():
        return name
    digest = hashlib.sha256(experiment_name.encode()).hexdigest()[:8]
    return f"job-{name[: _LONGEST_NAME - 13].strip('-')}-{digest}".replace("--", "-")
