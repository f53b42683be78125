"""The specification of a TrainingJob as typed values, read from a manifest or from a
`workload.yaml`.

Called by the operator for every reconcile and by the command line for every file it is given. Pure:
no file, cluster or clock is touched, and every mistake is a `SpecError` whose text starts with the
field's path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from trainmount_operator import environment, workload
from trainmount_operator.accelerators import ACCELERATOR_TYPES, DEFAULT_RESOURCE_NAME
from trainmount_operator.fields import Fields, SpecError
from trainmount_operator.job import (
    CodeItem,
    CodeSource,
    Compute,
    SecretKey,
    TrainingJob,
    TrainingJobSpec,
    VolumeMount,
)

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "CodeItem",
    "CodeSource",
    "Compute",
    "SecretKey",
    "SpecError",
    "TrainingJob",
    "TrainingJobSpec",
    "VolumeMount",
    "manifest_of",
    "parse_job",
]

GROUP: Final = "trainmount.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "TrainingJob"
PLURAL: Final = "trainingjobs"

MAXIMUM_NODES: Final = 4096
MAXIMUM_COMMAND_LINES: Final = 1000
# Linux takes 128 KiB as one argument of a program, and the command is one.
MAXIMUM_COMMAND_BYTES: Final = 100 * 1024
# A ConfigMap holds 1 MiB in all; the rest is room for its other keys and metadata.
MAXIMUM_PARAMETERS_BYTES: Final = 512 * 1024

_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME_PATTERN: Final = rf"{_LABEL}(\.{_LABEL})*"
_NAME_RULE: Final = (
    "must be lower-case letters, digits, '-' and '.', and start and end with a letter or digit, "
    "also around each '.'"
)
_KEY_PATTERN: Final = r"[-._a-zA-Z0-9]+"
_CONTAINERS_OWN: Final = ("dev", "proc", "sys", "trainmount")
"""Folders of `/` where a pod of ours has mounts already."""

_LONGEST_TTL_SECONDS: Final = (1 << 31) - 1
"""What a Job of Kubernetes takes."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SOURCE: Final = re.compile(r"(dbfs:)?/Volumes/[^/]+(/.*)?|(s3|gs|az|file)://.+")


def manifest_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document as a TrainingJob manifest that can be applied; a manifest is returned as it is.

    Raises:
        SpecError: neither a TrainingJob nor a workload.
    """
    manifest, _ = _normalise(document)
    return manifest


def parse_job(document: Mapping[str, Any]) -> TrainingJob:
    """Read a TrainingJob manifest, or a `workload.yaml` in snake case.

    Raises:
        SpecError: the first mistake, its path spelled as in the document.
    """
    manifest, notices = _normalise(document)
    try:
        return _parse_manifest(manifest, notices)
    except SpecError as error:
        if manifest is document:
            raise
        raise SpecError(workload.path_in_workload(error.path), error.problem) from None


def _normalise(document: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    if not isinstance(document, dict):
        raise SpecError("document", "must be a mapping: a TrainingJob manifest or a workload")
    if "kind" in document or "apiVersion" in document or "spec" in document:
        return document, ()
    return workload.to_manifest(document, api_version=API_VERSION, kind=KIND)


def _parse_manifest(manifest: dict[str, Any], notices: tuple[str, ...]) -> TrainingJob:
    top = Fields(manifest, "")
    if top.raw("kind") != KIND:
        raise SpecError("kind", f"must be {KIND}, got {top.raw('kind')!r}")
    if top.raw("apiVersion") != API_VERSION:
        raise SpecError("apiVersion", f"must be {API_VERSION}, got {top.raw('apiVersion')!r}")
    top.required("metadata")
    top.required("spec")
    top.raw("status")
    metadata, spec = top.fields("metadata"), top.fields("spec")
    assert metadata is not None and spec is not None
    top.finish()
    metadata.required("name")
    name = metadata.string("name", pattern=_NAME_PATTERN, rule=_NAME_RULE, maximum_length=253)
    assert name is not None
    uid, generation = metadata.raw("uid"), metadata.raw("generation")
    return TrainingJob(
        name=name,
        namespace=metadata.string("namespace"),
        uid=uid if isinstance(uid, str) else None,
        generation=generation if isinstance(generation, int) else 0,
        spec=_parse_spec(spec),
        notices=notices,
    )


def _parse_spec(spec: Fields) -> TrainingJobSpec:
    for name in ("experimentName", "compute", "command"):
        spec.required(name)
    experiment_name = spec.string(
        "experimentName",
        pattern=r"[A-Za-z0-9_-]+",
        rule="must be letters, digits, '-' and '_'",
        maximum_length=100,
    )
    compute = _parse_compute(spec.fields("compute"))
    image = _parse_environment(spec.fields("environment"))
    command = _parse_command(spec)
    secrets = _parse_secrets(spec)
    env_variables = _parse_env_variables(spec, secrets)
    code_source = _parse_code_source(spec.fields("codeSource"))
    parameters = _parse_parameters(spec)
    volumes = _parse_volumes(spec)
    max_retries = spec.integer("maxRetries", minimum=0, maximum=1000)
    assert experiment_name is not None
    result = TrainingJobSpec(
        experiment_name=experiment_name,
        compute=compute,
        image=image,
        command=command,
        secrets=secrets,
        env_variables=env_variables,
        code_source=code_source,
        parameters=parameters,
        volumes=volumes,
        max_retries=3 if max_retries is None else max_retries,
        timeout_minutes=spec.integer("timeoutMinutes", minimum=1, maximum=1_000_000),
        grace_seconds=_parse_checkpoint(spec.fields("checkpoint")),
        suspend=spec.boolean("suspend", False),
        ttl_seconds_after_finished=spec.integer(
            "ttlSecondsAfterFinished", minimum=0, maximum=_LONGEST_TTL_SECONDS
        ),
        pod_template=_parse_pod_template(spec.fields("podTemplate")),
    )
    spec.finish()
    return result


def _parse_compute(fields: Fields | None) -> Compute:
    assert fields is not None
    fields.required("numAccelerators")
    num = fields.integer("numAccelerators", minimum=1)
    type_name = fields.string("acceleratorType")
    per_node = fields.integer("acceleratorsPerNode", minimum=1)
    resource = fields.string(
        "resourceName",
        pattern=r"([a-z0-9.-]+/)?[A-Za-z0-9._-]+",
        rule="must be a resource name such as nvidia.com/gpu",
    )
    fields.finish()
    assert num is not None
    default_resource, origin = DEFAULT_RESOURCE_NAME, "acceleratorsPerNode"
    if type_name is not None:
        kind = ACCELERATOR_TYPES.get(type_name)
        if kind is None:
            names = ", ".join(ACCELERATOR_TYPES)
            raise SpecError(
                fields.at("acceleratorType"), f"must be one of {names}, got {type_name!r}"
            )
        if per_node not in (None, kind.per_node):
            raise SpecError(
                fields.at("acceleratorsPerNode"),
                f"must be {kind.per_node} or absent for {type_name}, got {per_node}",
            )
        per_node, default_resource, origin = kind.per_node, kind.resource_name, type_name
    if per_node is None:
        raise SpecError(
            fields.at("acceleratorType"), "is required, or acceleratorsPerNode in its place"
        )
    if num % per_node:
        raise SpecError(
            fields.at("numAccelerators"), f"must be a multiple of {origin} ({per_node}), got {num}"
        )
    if num // per_node > MAXIMUM_NODES:
        raise SpecError(
            fields.at("numAccelerators"), f"must not need more than {MAXIMUM_NODES} nodes"
        )
    return Compute(
        num_accelerators=num,
        accelerators_per_node=per_node,
        resource_name=resource or default_resource,
        accelerator_type=type_name,
    )


def _parse_environment(fields: Fields | None) -> str | None:
    if fields is None:
        return None
    image = fields.string("image", pattern=r"\S+", rule="must not contain white space")
    fields.finish()
    return image


def _parse_command(spec: Fields) -> str:
    command = spec.string("command")
    assert command is not None
    path = spec.at("command")
    num_lines = command.count("\n") + 1
    if num_lines > MAXIMUM_COMMAND_LINES:
        raise SpecError(
            path,
            f"must not be longer than {MAXIMUM_COMMAND_LINES} lines, has {num_lines}; "
            "put it into a script of codeSource",
        )
    if len(command.encode()) > MAXIMUM_COMMAND_BYTES:
        raise SpecError(path, f"must not be larger than {MAXIMUM_COMMAND_BYTES} bytes")
    if "\0" in command:
        raise SpecError(path, "must not contain a NUL character")
    return command


def _parse_secrets(spec: Fields) -> dict[str, SecretKey]:
    secrets = {}
    for name, value in sorted(spec.strings("secrets").items()):
        path = f"{spec.at('secrets')}.{name}"
        _check_variable(name, path)
        secret, slash, key = value.partition("/")
        if not slash or not secret or not key or "/" in key:
            raise SpecError(path, f"must be SECRET/KEY, such as databricks/token, got {value!r}")
        if not re.fullmatch(_NAME_PATTERN, secret):
            raise SpecError(path, f"the name of the Secret {_NAME_RULE}, got {secret!r}")
        if not re.fullmatch(_KEY_PATTERN, key):
            raise SpecError(path, f"the key must be letters, digits, '-', '_' and '.', got {key!r}")
        secrets[name] = SecretKey(name=secret, key=key)
    return secrets


def _parse_env_variables(spec: Fields, secrets: Mapping[str, SecretKey]) -> dict[str, str]:
    variables = spec.strings("envVariables")
    for name in sorted(variables):
        path = f"{spec.at('envVariables')}.{name}"
        _check_variable(name, path)
        if name in secrets:
            raise SpecError(path, "is also set in secrets; remove one of the two")
        if "\0" in variables[name]:
            raise SpecError(path, "must not contain a NUL character")
    return variables


def _check_variable(name: str, path: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise SpecError(path, "must be a variable name: letters, digits and '_', no leading digit")
    if name in environment.RESERVED:
        raise SpecError(path, "must not be set: every node gets it from the job")


def _parse_code_source(fields: Fields | None) -> CodeSource | None:
    if fields is None:
        return None
    root_path = fields.string("rootPath")
    include_paths = [
        _relative_path(path, f"{fields.at('includePaths')}[{index}]")
        for index, path in enumerate(fields.items("includePaths"))
    ]
    if fields.has("includePaths") and not include_paths:
        raise SpecError(
            fields.at("includePaths"), "must not be empty; leave it out to take everything"
        )
    config_map, items = _parse_config_map(fields.fields("configMap"))
    fields.finish()
    if (root_path is None) == (config_map is None):
        problem = "must have one of rootPath and configMap"
        raise SpecError(fields.path, problem if root_path is None else f"{problem}, not both")
    if include_paths and root_path is None:
        raise SpecError(fields.at("includePaths"), "must not be set without rootPath")
    return CodeSource(
        root_path=root_path,
        include_paths=tuple(include_paths),
        config_map=config_map,
        items=tuple(items),
    )


def _parse_config_map(fields: Fields | None) -> tuple[str | None, list[CodeItem]]:
    if fields is None:
        return None, []
    fields.required("name")
    name = fields.string("name", pattern=_NAME_PATTERN, rule=_NAME_RULE)
    items = []
    for index, value in enumerate(fields.items("items")):
        item = Fields(value, f"{fields.at('items')}[{index}]")
        item.required("key")
        item.required("path")
        key = item.string("key", pattern=_KEY_PATTERN, rule="must be a ConfigMap key")
        assert key is not None
        items.append(CodeItem(key=key, path=_relative_path(item.raw("path"), item.at("path"))))
        item.finish()
        if any(other.path == items[-1].path for other in items[:-1]):
            raise SpecError(item.at("path"), f"must be unique, {items[-1].path!r} is taken")
    fields.finish()
    return name, items


def _relative_path(value: object, path: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SpecError(path, "must be a path that is not empty")
    if value.startswith("/"):
        raise SpecError(path, f"must be a relative path, got {value!r}")
    if ".." in value.split("/"):
        raise SpecError(path, f"must not contain '..', got {value!r}")
    return value


def _parse_parameters(spec: Fields) -> dict[str, Any] | None:
    if not spec.has("parameters"):
        return None
    parameters = spec.raw("parameters")
    if not isinstance(parameters, dict):
        raise SpecError(spec.at("parameters"), "must be a mapping")
    _check_parameter(parameters, spec.at("parameters"))
    size = len(environment.parameters_file(parameters).encode())
    if size > MAXIMUM_PARAMETERS_BYTES:
        raise SpecError(
            spec.at("parameters"),
            f"must not be larger than {MAXIMUM_PARAMETERS_BYTES} bytes, has {size}; "
            "put the file into a volume",
        )
    return parameters


def _check_parameter(value: object, path: str) -> None:
    """A manifest is JSON: it has no dates, and no keys but strings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise SpecError(path, f"keys must be strings (quote the key), got {key!r}")
            _check_parameter(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_parameter(inner, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise SpecError(path, f"must be a finite number (quote the value), got {value}")
    elif value is not None and not isinstance(value, (str, bool, int, float)):
        raise SpecError(
            path,
            "must be text, a number, true, false, a list or a mapping (quote the value), got "
            f"the {type(value).__name__} {value}",
        )


def _parse_volumes(spec: Fields) -> tuple[VolumeMount, ...]:
    volumes: list[VolumeMount] = []
    for index, value in enumerate(spec.items("volumes")):
        volume = _parse_volume(Fields(value, f"{spec.at('volumes')}[{index}]"))
        if any(other.path == volume.path for other in volumes):
            raise SpecError(
                f"{spec.at('volumes')}[{index}].path", f"must be unique, {volume.path!r} is taken"
            )
        volumes.append(volume)
    return tuple(volumes)


def _mount_path(fields: Fields) -> str:
    fields.required("path")
    path = fields.string(
        "path", pattern=r"/[^:]*[^/:]", rule="must be an absolute path without ':'"
    )
    assert path is not None
    names = path.split("/")[1:]
    if ".." in names:
        raise SpecError(fields.at("path"), f"must not contain '..', got {path!r}")
    if "" in names or "." in names or not path.isprintable():
        raise SpecError(
            fields.at("path"), f"must not contain '//', '/./' or control characters, got {path!r}"
        )
    if names[0] in _CONTAINERS_OWN:
        raise SpecError(
            fields.at("path"), f"must not be /{names[0]} or below it, which is the container's own"
        )
    return path


def _parse_volume(fields: Fields) -> VolumeMount:
    path = _mount_path(fields)
    claim_name = fields.string("claimName", pattern=_NAME_PATTERN, rule=_NAME_RULE)
    source = fields.string("source")
    secret = None
    if reference := fields.fields("secretRef"):
        reference.required("name")
        secret = reference.string("name", pattern=_NAME_PATTERN, rule=_NAME_RULE)
        reference.finish()
    cache_size = fields.string(
        "cacheSize", pattern=r"0*[1-9][0-9]*([KMGTP]i|[kMGTP])?", rule="must be a size such as 20Gi"
    )
    read_only = fields.boolean("readOnly", False)
    fields.finish()
    if claim_name is not None:
        for name, setting in (("source", source), ("secretRef", secret), ("cacheSize", cache_size)):
            if setting is not None:
                raise SpecError(fields.at(name), "must not be set together with claimName")
        return VolumeMount(path=path, claim_name=claim_name, read_only=read_only)
    wanted = source or path
    if not _SOURCE.fullmatch(wanted):
        name = "source" if source else "path"
        raise SpecError(
            fields.at(name),
            "must start with /Volumes/ or be the URL of a bucket, such as s3://bucket"
            f"{'' if source else '; or give source or claimName'}, got {wanted!r}",
        )
    if any(name in (".", "..") for name in wanted.split("/")):
        raise SpecError(fields.at("source"), f"must not contain '.' or '..' names, got {wanted!r}")
    return VolumeMount(
        path=path, source=wanted, secret=secret, read_only=read_only, cache_size=cache_size
    )


def _parse_checkpoint(fields: Fields | None) -> int:
    if fields is None:
        return TrainingJobSpec.grace_seconds
    grace_seconds = fields.integer("graceSeconds", minimum=0, maximum=86400)
    fields.finish()
    return TrainingJobSpec.grace_seconds if grace_seconds is None else grace_seconds


def _parse_pod_template(fields: Fields | None) -> dict[str, Any]:
    if fields is None:
        return {}
    template: dict[str, Any] = {}
    if metadata := fields.fields("metadata"):
        template["metadata"] = {
            name: metadata.strings(name) for name in ("labels", "annotations") if metadata.has(name)
        }
        metadata.finish()
    if fields.has("spec"):
        if not isinstance(fields.raw("spec"), dict):
            raise SpecError(fields.at("spec"), "must be a mapping")
        template["spec"] = fields.raw("spec")
    fields.finish()
    return template
