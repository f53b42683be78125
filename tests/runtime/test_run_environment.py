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
from trainmount.run import World, heartbeat, main, parameters, world

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


NOW = 1796065995.0


def write_beat(path: Path, age_seconds: float, **changes: int) -> None:
    beat = {"time": time.time() - age_seconds, "step": 7, "rank": 4, "attempt": 1, **changes}
    path.write_text(json.dumps(beat))


def check(*arguments: str | Path) -> int:
    return main(["--check-heartbeat", *map(str, arguments)])


def test_a_heartbeat_that_is_new_enough_is_a_sign_of_life(
    beats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    assert heartbeat(7)
    monkeypatch.setattr(time, "time", lambda: NOW + 3600)
    assert check(beats, "--older-than", "3600") == 0
    assert check("--older-than", "3600") == 0  # at the place that the variable names
    said, errors = capsys.readouterr()
    assert said.splitlines() == [f"{beats}: step 7 of rank 0 was done 3600 s ago"] * 2
    assert errors == ""


def test_the_process_of_a_node_that_waited_longest_decides(
    beats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    write_beat(beats, 1)
    write_beat(beats.with_name("beat.json.1"), 700, step=6, rank=5)
    write_beat(beats.with_name("beat.json.2"), 9000, attempt=0)  # of an attempt that is over
    beats.with_name("beat.json.1.999.tmp").write_text("{")
    beats.with_name("other.1").write_text("{")
    assert check(beats, "--older-than", "3600") == 0
    assert check(beats, "--older-than", "600") == 1
    said = f"{beats}.1: step 6 of rank 5 was done 700 s ago"
    assert capsys.readouterr() == (f"{said}\n", f"{said}, more than 600 s: it hangs\n")


def test_where_no_heartbeat_can_be_read_the_line_says_why(
    beats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(beats, "--older-than", "600") == 1
    for text in ("{", "[]", '{"time": 1.0, "step": 3}'):
        beats.write_text(text)
        assert check(beats, "--older-than", "600") == 1
    assert check(beats / "beat.json", "--older-than", "600") == 1
    none, *broken, no_folder = capsys.readouterr().err.splitlines()
    assert none == (
        f"{beats} is not there: no step was done yet, or the program's TRAINMOUNT_HEARTBEAT_PATH "
        "is another one"
    )
    assert [line.startswith(f"{beats} is no heartbeat: ") for line in broken] == [True] * 3
    assert "Not a directory" in no_folder


def test_a_check_without_a_path_or_with_no_time_at_all_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRAINMOUNT_HEARTBEAT_PATH", raising=False)
    for arguments in (["--older-than", "600"], ["beat.json", "--older-than", "0"], ["beat.json"]):
        with pytest.raises(SystemExit, match="2"):
            check(*arguments)
    mistakes = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert [line.partition(": error: ")[2] for line in mistakes] == [
        "name a PATH, or set TRAINMOUNT_HEARTBEAT_PATH",
        "--older-than must be at least 1, got 0",
        "the following arguments are required: --older-than",
    ]


def test_a_probe_is_one_command(beats: Path) -> None:
    write_beat(beats, 700)
    command = [sys.executable, "-m", "trainmount.run", "--check-heartbeat", "--older-than", "600"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{beats}: step 7 of rank 4 was done 7")
    assert done.stderr.endswith(" s ago, more than 600 s: it hangs\n")


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
