"""The place of a process in its job, its parameters, and what imports cost and need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainmount.run
from trainmount.errors import LaunchError
from trainmount.run import World, heartbeat, parameters, world

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
        ({"RANK": "-1"}, "RANK must be a number from 0, but is '-1'"),
        ({"WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 2, but must not be greater than WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE is not set: start the program with torchrun"),
        ({"GROUP_RANK": "4"}, r"the rank of the node .* is 4, but must be less than .* which is 4"),
        ({"TRAINMOUNT_ATTEMPT": "two"}, "TRAINMOUNT_ATTEMPT must be a number from 0, but is 'two'"),
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


@pytest.fixture
def beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a heartbeat goes that is due."""
    path = tmp_path / "beat.json"
    monkeypatch.setenv("TRAINMOUNT_HEARTBEAT_PATH", str(path))
    monkeypatch.setattr(trainmount.run, "_next_beat", 0.0)
    return path


def test_a_heartbeat_says_when_which_step_was_done(
    beats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("TRAINMOUNT_ATTEMPT", "2")
    before = time.time()
    assert heartbeat(7)
    said = json.loads(beats.read_text())
    assert before <= said.pop("time") <= time.time()
    assert said == {"step": 7, "rank": 5, "attempt": 2}
    assert not heartbeat(8)  # within the same second
    assert json.loads(beats.read_text())["step"] == 7
    monkeypatch.setattr(trainmount.run, "_next_beat", 0.0)
    assert heartbeat(9)
    assert json.loads(beats.read_text())["step"] == 9
    assert list(beats.parent.iterdir()) == [beats]


def test_each_process_of_a_node_has_a_heartbeat_of_its_own(
    beats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert heartbeat(1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(trainmount.run, "_next_beat", 0.0)
    assert heartbeat(2)
    assert sorted(path.name for path in beats.parent.iterdir()) == ["beat.json", "beat.json.3"]


def test_a_heartbeat_that_cannot_be_written_ends_no_training(
    beats: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRAINMOUNT_HEARTBEAT_PATH", str(beats / "missing" / "beat.json"))
    assert not heartbeat(1)
    assert [one.message for one in caplog.records] == ["heartbeat not written"]
    monkeypatch.delenv("TRAINMOUNT_HEARTBEAT_PATH")
    monkeypatch.setattr(trainmount.run, "_next_beat", 0.0)
    assert not heartbeat(1)
    assert len(caplog.records) == 1


def test_importing_the_package_loads_no_torch_and_nothing_else_heavy() -> None:
    code = (
        "import sys, trainmount, trainmount.run;"
        "print(len(sys.modules), 'torch' in sys.modules, 'yaml' in sys.modules)"
    )
    num_modules, has_torch, has_yaml = _python(code).stdout.split()
    assert (has_torch, has_yaml) == ("False", "False")
    assert int(num_modules) < 150


@pytest.mark.parametrize(
    ("before", "statement", "limit_seconds"),
    [
        ("", "import trainmount", 0.05),
        ("", "import trainmount.run", 0.2),
        ("", "import trainmount.data, trainmount.checkpoint", 0.2),
        ("import torch.utils.data", "from trainmount.data import DataLoader, UCVolumeDataset", 1),
    ],
)
def test_what_an_import_costs(before: str, statement: str, limit_seconds: float) -> None:
    # By processor time, which other programs hardly change; a run that they did is repeated.
    code = f"""
import sys, time
{before}
began = time.process_time()
{statement}
print(time.process_time() - began, "mlflow" in sys.modules)
"""
    runs = (_python(code).stdout.split() for _ in range(3))
    assert any(
        float(seconds) < limit_seconds and has_mlflow == "False" for seconds, has_mlflow in runs
    )


@pytest.mark.parametrize("package", ["data", "checkpoint"])
def test_without_torch_the_error_says_what_to_install(package: str) -> None:
    finished = _python(f"import sys; sys.modules['torch'] = None; import trainmount.{package}")
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1] == (
        f"ImportError: trainmount.{package} needs torch: pip install 'trainmount[runtime]'"
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
