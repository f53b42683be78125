"""A document becomes typed values, or one line that starts with the path of what is wrong."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from trainmount_operator import environment
from trainmount_operator.spec import SpecError, manifest_of, parse_job

TWICE = {"key": "a", "path": "x.py"}


def manifest(**spec: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "experimentName": "digits",
        "compute": {"numAccelerators": 4, "acceleratorsPerNode": 2},
        "command": "python train.py",
    }
    return {
        "apiVersion": "trainmount.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "digits"},
        "spec": {key: value for key, value in (base | spec).items() if value is not None},
    }


def refused(document: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_job(document)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_small_manifest_gets_the_documented_defaults() -> None:
    spec = parse_job(manifest()).spec
    assert spec.compute.num_nodes == 2
    assert spec.compute.resource_name == "nvidia.com/gpu"
    assert (spec.max_retries, spec.timeout_minutes, spec.grace_seconds) == (3, None, 30)
    assert (spec.suspend, spec.ttl_seconds_after_finished, spec.image) == (False, None, None)
    assert spec.parameters is None and spec.volumes == ()


def test_an_accelerator_type_says_how_many_a_node_has() -> None:
    compute = parse_job(
        manifest(compute={"numAccelerators": 16, "acceleratorType": "GPU_8xH100"})
    ).spec.compute
    assert (compute.accelerators_per_node, compute.num_nodes) == (8, 2)


def test_a_volume_defaults_to_its_own_path_as_the_source() -> None:
    spec = parse_job(
        manifest(
            volumes=[
                {"path": "/Volumes/main/default/digits", "secretRef": {"name": "databricks"}},
                {"path": "/data", "source": "s3://bucket/data", "readOnly": True},
                {"path": "/scratch", "claimName": "scratch"},
            ]
        )
    ).spec
    assert [(v.path, v.source, v.secret, v.read_only, v.claim_name) for v in spec.volumes] == [
        ("/Volumes/main/default/digits", "/Volumes/main/default/digits", "databricks", False, None),
        ("/data", "s3://bucket/data", None, True, None),
        ("/scratch", None, None, False, "scratch"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"compute": {"numAccelerators": 3, "acceleratorsPerNode": 2}},
            "spec.compute.numAccelerators: must be a multiple of acceleratorsPerNode (2), got 3",
        ),
        (
            {"compute": {"numAccelerators": 4, "acceleratorType": "GPU_8xH100"}},
            "spec.compute.numAccelerators: must be a multiple of GPU_8xH100 (8), got 4",
        ),
        (
            {"compute": {"numAccelerators": 0, "acceleratorsPerNode": 1}},
            "spec.compute.numAccelerators: must be at least 1, got 0",
        ),
        (
            {"compute": {"numAccelerators": True, "acceleratorsPerNode": 1}},
            "spec.compute.numAccelerators: must be an integer, got a boolean",
        ),
        (
            {"compute": {"numAccelerators": 1}},
            "spec.compute.acceleratorType: is required, or acceleratorsPerNode in its place",
        ),
        (
            {"compute": {"numAccelerators": 8, "acceleratorType": "GPU_8xh100"}},
            (
                "spec.compute.acceleratorType: must be one of GPU_1xA10, GPU_1xH100, GPU_8xH100, "
                "GPU_8xB300, got 'GPU_8xh100'"
            ),
        ),
        ({"compute": None}, "spec.compute: is required"),
        (
            {"compute": {"numAccelerator": 4, "acceleratorsPerNode": 2}},
            "spec.compute.numAccelerators: is required; did you mean it by 'numAccelerator'?",
        ),
        ({"command": "  \n"}, "spec.command: must not be empty"),
        (
            {"command": "x\n" * 1000},
            (
                "spec.command: must not be longer than 1000 lines, has 1001; "
                "put it into a script of codeSource"
            ),
        ),
        ({"maxRetries": -1}, "spec.maxRetries: must be at least 0, got -1"),
        ({"timeoutMinutes": 0}, "spec.timeoutMinutes: must be at least 1, got 0"),
        ({"maxRetry": 1}, "spec.maxRetry: unknown field; did you mean 'maxRetries'?"),
        (
            {"secrets": {"TOKEN": "a/b/c"}},
            "spec.secrets.TOKEN: must be SECRET/KEY, such as databricks/token, got 'a/b/c'",
        ),
        (
            {"secrets": {"A": "s/k"}, "envVariables": {"A": "1"}},
            "spec.envVariables.A: is also set in secrets; remove one of the two",
        ),
        (
            {"envVariables": {"NODE_RANK": "1"}},
            "spec.envVariables.NODE_RANK: must not be set: every node gets it from the job",
        ),
        (
            {"envVariables": {"A": 1}},
            "spec.envVariables.A: must be a string (quote the value), got the number 1",
        ),
        (
            {"secrets": {"TOKEN": "Databricks/token"}},
            (
                "spec.secrets.TOKEN: the name of the Secret must be lower-case letters, digits, "
                "'-' and '.', and start and end with a letter or digit, also around each '.', got "
                "'Databricks'"
            ),
        ),
        (
            {"secrets": {"TOKEN": "databricks/to ken"}},
            ("spec.secrets.TOKEN: the key must be letters, digits, '-', '_' and '.', got 'to ken'"),
        ),
        (
            {"envVariables": {"A": "1\0"}},
            "spec.envVariables.A: must not contain a NUL character",
        ),
        (
            {"envVariables": {"A\nB": "1"}},
            (
                "spec.envVariables.A\\nB: must be a variable name: letters, digits and '_', no "
                "leading digit"
            ),
        ),
        (
            {"parameters": {"data": {"from": date(2026, 1, 2)}}},
            (
                "spec.parameters.data.from: must be text, a number, true, false, a list or a "
                "mapping (quote the value), got the date 2026-01-02"
            ),
        ),
        (
            {"parameters": {"rates": [0.1, float("inf")]}},
            "spec.parameters.rates[1]: must be a finite number (quote the value), got inf",
        ),
        (
            {"parameters": {"steps": {30: 0.1}}},
            "spec.parameters.steps: keys must be strings (quote the key), got 30",
        ),
        (
            {"ttlSecondsAfterFinished": 1 << 31},
            "spec.ttlSecondsAfterFinished: must be at most 2147483647, got 2147483648",
        ),
        (
            {"codeSource": {"configMap": {"name": "c", "items": [TWICE, TWICE]}}},
            "spec.codeSource.configMap.items[1].path: must be unique, 'x.py' is taken",
        ),
        (
            {"volumes": [{"path": "/data//x", "source": "s3://b"}]},
            (
                "spec.volumes[0].path: must not contain '//', '/./' or control characters, got "
                "'/data//x'"
            ),
        ),
        (
            {"volumes": [{"path": "/proc/x", "source": "s3://b"}]},
            ("spec.volumes[0].path: must not be /proc or below it, which is the container's own"),
        ),
        (
            {"volumes": [{"path": "/data", "source": "/Volumes/a/b/../c"}]},
            ("spec.volumes[0].source: must not contain '.' or '..' names, got '/Volumes/a/b/../c'"),
        ),
        (
            {"volumes": [{"path": "/Volumes/a/b/c", "cacheSize": "0"}]},
            "spec.volumes[0].cacheSize: must be a size such as 20Gi, got '0'",
        ),
        (
            {"volumes": [{"path": "/data", "claimName": "my claim"}]},
            (
                "spec.volumes[0].claimName: must be lower-case letters, digits, '-' and '.', and "
                "start and end with a letter or digit, also around each '.', got 'my claim'"
            ),
        ),
        (
            {"volumes": [{"path": "data"}]},
            "spec.volumes[0].path: must be an absolute path without ':', got 'data'",
        ),
        (
            {"volumes": [{"path": "/data"}]},
            (
                "spec.volumes[0].path: must start with /Volumes/ or be the URL of a bucket, such "
                "as s3://bucket; or give source or claimName, got '/data'"
            ),
        ),
        (
            {"volumes": [{"path": "/d", "claimName": "c", "source": "s3://b"}]},
            "spec.volumes[0].source: must not be set together with claimName",
        ),
        (
            {"volumes": [{"path": "/d", "claimName": "c"}, {"path": "/d", "claimName": "e"}]},
            "spec.volumes[1].path: must be unique, '/d' is taken",
        ),
        (
            {"codeSource": {"rootPath": ".", "configMap": {"name": "c"}}},
            "spec.codeSource: must have one of rootPath and configMap, not both",
        ),
        (
            {"codeSource": {"rootPath": ".", "includePaths": ["../secret"]}},
            "spec.codeSource.includePaths[0]: must not contain '..', got '../secret'",
        ),
        ({"parameters": [1]}, "spec.parameters: must be a mapping"),
        (
            {"podTemplate": {"labels": {}}},
            "spec.podTemplate.labels: unknown field; known are metadata, spec",
        ),
    ],
)
def test_a_mistake_is_one_line_with_the_path(change: dict[str, Any], message: str) -> None:
    assert refused(manifest(**change)) == message


def test_another_kind_is_refused() -> None:
    assert refused({"kind": "Job", "apiVersion": "batch/v1"}) == (
        "kind: must be TrainingJob, got 'Job'"
    )


WORKLOAD: dict[str, Any] = {
    "experiment_name": "Digits_Run",
    "compute": {"num_accelerators": 8, "accelerator_type": "GPU_8xH100"},
    "environment": {"version": 4, "dependencies": ["einops"]},
    "command": "python train.py",
    "code_source": {
        "type": "snapshot",
        "snapshot": {"root_path": ".", "remote_volume": "/Volumes/a"},
    },
    "env_variables": {"max_retries": "kept"},
    "parameters": {"num_accelerators": 1, "learning_rate": 0.1},
    "max_retries": 1,
    "timeout_minutes": 5,
    "permissions": [{"user_name": "a", "level": "CAN_VIEW"}],
}


def test_a_workload_file_is_a_job_whose_free_maps_are_left_alone() -> None:
    job = parse_job(WORKLOAD)
    assert job.name == "digits-run"
    assert job.spec.experiment_name == "Digits_Run"
    assert job.spec.env_variables == {"max_retries": "kept"}
    assert job.spec.parameters == {"num_accelerators": 1, "learning_rate": 0.1}
    assert (job.spec.max_retries, job.spec.timeout_minutes) == (1, 5)
    assert job.spec.code_source is not None and job.spec.code_source.root_path == "."
    assert [notice.split(":")[0] for notice in job.notices] == [
        "permissions",
        "environment.version",
        "environment.dependencies",
        "code_source.snapshot.remote_volume",
    ]


def test_the_manifest_of_a_workload_describes_the_same_job() -> None:
    assert parse_job(manifest_of(WORKLOAD)).spec == parse_job(WORKLOAD).spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"compute": {"num_accelerators": 9, "accelerator_type": "GPU_8xH100"}},
            "compute.num_accelerators: must be a multiple of GPU_8xH100 (8), got 9",
        ),
        ({"max_retries": -1}, "max_retries: must be at least 0, got -1"),
        ({"maxRetries": 1}, "maxRetries: unknown field; did you mean 'max_retries'?"),
        ({"priority": 1}, "priority: unknown field"),
        ({"experiment_name": "a b"}, "experiment_name: must be letters, digits, '-' and '_'"),
        ({"code_source": {"root_path": ".", "git": {"branch": "m"}}}, "code_source.git: is not"),
        ({"secrets": {"max_retries": "x"}}, "secrets.max_retries: must be SECRET/KEY"),
    ],
)
def test_a_mistake_in_a_workload_is_named_as_the_workload_spells_it(
    change: dict[str, Any], message: str
) -> None:
    assert refused(WORKLOAD | change).startswith(message)


def test_a_node_finds_its_place_in_its_environment() -> None:
    placement = environment.NodePlacement(
        job_name="digits",
        attempt=1,
        num_nodes=2,
        accelerators_per_node=2,
        master_addr="digits-1-0.digits-1",
        node_rank=1,
        run_id=environment.mlflow_run_id("uid", 1),
        code_source_path="/code",
    )
    assert environment.node_environment(placement, {"NAME": "value"}) == {
        "CODE_SOURCE_PATH": "/code",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "digits-1-0.digits-1",
        "MASTER_PORT": "29500",
        "MLFLOW_RUN_ID": environment.mlflow_run_id("uid", 1),
        "NAME": "value",
        "NODE_RANK": "1",
        "NUM_NODES": "2",
        "TRAINMOUNT_ATTEMPT": "1",
        "TRAINMOUNT_JOB": "digits",
        "WORLD_SIZE": "4",
    }


def test_each_attempt_has_an_mlflow_run_of_its_own_that_is_the_same_when_asked_again() -> None:
    runs = [environment.mlflow_run_id("uid", attempt) for attempt in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert len(runs[0]) == 32
