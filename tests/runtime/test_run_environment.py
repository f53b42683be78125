"""The place of a process in its job, its parameters, and what imports cost and need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainmount.errors import LaunchError
from trainmount.run import World, parameters, world

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}


def test_the_world_is_what_torchrun_and_the_operator_say() -> None:
    environment = {
        **TORCHRUN,
        "NODE_RANK": "2",
        "NUM_NODES": "4",
        "TRAINMOUNT_ATTEMPT": "3",
        "TRAINMOUNT_JOB": "digits",
    }
    assert world(environment) == World(
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=2,
        node_rank=2,
        num_nodes=4,
        attempt=3,
        job_name="digits",
    )
    assert world(TORCHRUN).node_rank == 2
    assert not world(TORCHRUN).is_first


def test_without_torchrun_the_error_says_how_to_start() -> None:
    with pytest.raises(
        LaunchError,
        match="RANK is not set: start the program with torchrun, for example: torchrun --nnodes",
    ):
        world({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, "RANK must be a number from 0, but is 'x'"),
        ({"RANK": "8"}, "RANK is 8, but must be less than WORLD_SIZE, which is 8"),
        (
            {"LOCAL_RANK": "2"},
            "LOCAL_RANK is 2, but must be less than LOCAL_WORLD_SIZE, which is 2",
        ),
    ],
)
def test_wrong_variables_are_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        world({**TORCHRUN, **change})


def test_parameters_are_read_over_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "parameters.yaml"
    path.write_text("epochs: 3\noptimizer: {lr: 0.1}\n")
    monkeypatch.setenv("HYPERPARAMETERS_PATH", str(path))
    assert parameters() == {"epochs": 3, "optimizer": {"lr": 0.1}}
    assert parameters({"epochs": 1, "seed": 7}) == {
        "epochs": 3,
        "optimizer": {"lr": 0.1},
        "seed": 7,
    }
    path.write_text("")
    assert parameters() == {}


def test_parameters_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYPERPARAMETERS_PATH", raising=False)
    assert parameters({"epochs": 1}) == {"epochs": 1}
    with pytest.raises(
        LaunchError, match="HYPERPARAMETERS_PATH is not set: start the program as a TrainingJob"
    ):
        parameters()
    path = tmp_path / "parameters.yaml"
    monkeypatch.setenv("HYPERPARAMETERS_PATH", str(path))
    with pytest.raises(LaunchError, match=r"cannot read .*parameters.yaml: .*No such file"):
        parameters()
    path.write_text("a: [1")
    with pytest.raises(LaunchError, match=r"parameters.yaml is not YAML"):
        parameters()
    path.write_text("- 1\n")
    with pytest.raises(LaunchError, match="must hold a mapping, not list"):
        parameters()


def test_importing_the_package_loads_no_torch_and_nothing_else_heavy() -> None:
    code = (
        "import sys, trainmount, trainmount.run;"
        "print(len(sys.modules), 'torch' in sys.modules, 'yaml' in sys.modules)"
    )
    num_modules, has_torch, has_yaml = _python(code).stdout.split()
    assert (has_torch, has_yaml) == ("False", "False")
    assert int(num_modules) < 150


@pytest.mark.parametrize("package", ["data", "checkpoint"])
def test_without_torch_the_error_says_what_to_install(package: str) -> None:
    finished = _python(f"import sys; sys.modules['torch'] = None; import trainmount.{package}")
    assert (
        f"ImportError: trainmount.{package} needs torch: pip install 'trainmount[runtime]'"
        in finished.stderr
    )


def test_public_names_are_as_documented() -> None:
    import trainmount.checkpoint
    import trainmount.data

    assert trainmount.data.__all__ == [
        "Checkpointable",
        "DataLoader",
        "UCVolumeDataset",
        "UCVolumeReader",
        "UCVolumeWriter",
    ]
    for module in (trainmount.data, trainmount.checkpoint):
        assert all(getattr(module, name) is not None for name in module.__all__)
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            _ = module.Nothing


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
