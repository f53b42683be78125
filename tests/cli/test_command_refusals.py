"""Bad input: one clear line with the file or field, the right exit status, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

JOB: dict[str, Any] = {
    "apiVersion": "trainmount.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "trial"},
    "spec": {
        "experimentName": "trial",
        "compute": {"numAccelerators": 2, "acceleratorsPerNode": 1},
        "command": "true",
    },
}


def spec_with(**fields: Any) -> dict[str, Any]:
    return JOB | {"spec": JOB["spec"] | fields}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (spec_with(commnad="x"), "spec.commnad"),
        (spec_with(compute={"numAccelerators": 3, "acceleratorsPerNode": 2}), "numAccelerators"),
        (spec_with(volumes=[{"path": "/v", "claimName": "claim"}]), "spec.volumes[0].claimName"),
        (spec_with(volumes=[{"path": "/Volumes/../etc"}]), "spec.volumes[0].path"),
        (
            spec_with(volumes=[{"path": "/v", "source": "/Volumes/a/../../../x"}]),
            "must not contain '.' or '..'",
        ),
        (spec_with(codeSource={"configMap": {"name": "gone"}}), "no ConfigMap 'gone'"),
        (spec_with(codeSource={"rootPath": "./gone"}), "spec.codeSource.rootPath"),
        (spec_with(secrets={"KEY": "secret/key"}), "spec.secrets.KEY"),
        (spec_with(suspend=True), "spec.suspend"),
        ({"kind": "Pod"}, "must hold one TrainingJob, holds 0"),
    ],
)
def test_a_mistake_in_the_file_is_named(
    trainmount: Any, in_process: Any, document: dict[str, Any], words: str
) -> None:
    path = trainmount.folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))

    done = in_process("run", "-f", str(path), "--local", status=2)

    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert trainmount.run_folders() == []


def test_text_that_is_not_yaml_is_told_with_its_line(trainmount: Any, in_process: Any) -> None:
    path = trainmount.folder / "job.yaml"
    path.write_text("a: 1\nb: [\n")

    done = in_process("run", "-f", str(path), "--local", status=2)

    assert done.stderr.startswith(f"trainmount: {path}: line 3, column 1: ")
    missing = in_process("run", "-f", "gone.yaml", "--local", status=2)
    assert missing.stderr == "trainmount: gone.yaml: No such file or directory\n"


def test_an_error_is_an_envelope_where_json_was_asked_for(trainmount: Any, in_process: Any) -> None:
    done = in_process("get", "gone", "--local", "-o", "json", status=2)

    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["kind"], error["retryable"]) == ("NOT_FOUND", "NOT_FOUND", False)
    assert "'gone'" in error["message"]


def test_a_dry_run_and_an_override_check_only(trainmount: Any, in_process: Any) -> None:
    path = trainmount.folder / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))

    in_process("run", "-f", str(path), "--local", "--dry-run", "--override", "maxRetries=7")
    wrong = in_process(
        "run", "-f", str(path), "--local", "--dry-run", "--override", "maxRetries=-1", status=2
    )

    assert "spec.maxRetries" in wrong.stderr
    assert trainmount.run_folders() == []


def kubeconfig(**changes: Any) -> str:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"token": "secret-token"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    return yaml.safe_dump(document | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        kubeconfig(contexts=None),
        kubeconfig(**{"current-context": None}),
        kubeconfig(**{"current-context": "removed"}),
        kubeconfig(clusters=[]),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(
    trainmount: Any, in_process: Any, text: str
) -> None:
    path = trainmount.folder / "kubeconfig"
    path.write_text(text)

    done = in_process("list", status=2, KUBECONFIG=str(path))

    assert done.stderr.startswith(f"trainmount: kubeconfig {path}: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_cluster_that_does_not_answer_is_told_without_the_token(
    trainmount: Any, in_process: Any
) -> None:
    path = trainmount.folder / "kubeconfig"
    path.write_text(kubeconfig())

    done = in_process("list", status=1, KUBECONFIG=str(path))

    assert done.stderr.startswith("trainmount: the cluster at http://127.0.0.1:9 does not answer")
    assert "secret-token" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_local_commands_and_help_read_no_kubeconfig(trainmount: Any, in_process: Any) -> None:
    folder = trainmount.folder / "kubeconfig"
    folder.mkdir()  # reading it would fail

    assert in_process("list", "--local", KUBECONFIG=str(folder)).returncode == 0
    assert "run" in in_process("--help", KUBECONFIG=str(folder)).stdout
    done = in_process("list", status=2, KUBECONFIG=str(folder))
    assert done.stderr == f"trainmount: kubeconfig {folder}: Is a directory\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nonsense"], "no such command 'nonsense'; see trainmount --help"),
        (["--nope"], "no such option: --nope; see trainmount --help"),
        (["status", "--nope"], "no such option: --nope; see trainmount status --help"),
        (["logs"], "missing argument 'RUN'; see trainmount logs --help"),
        (["cp", "a"], "cp needs a source and a destination"),
        (
            ["mount", "/Volumes/x"],
            "arguments are required: MOUNTPOINT; see trainmount mount --help",
        ),
        (["serve"], "arguments are required: DIR; see trainmount serve --help"),
        (["ls", "/", "-o", "\x1b[2J"], "'\\x1b[2J' is not one of 'text', 'json'"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line_that_says_where_to_look(
    in_process: Any, arguments: list[str], line: str
) -> None:
    done = in_process(*arguments, status=2)

    assert line in done.stderr
    assert done.stderr.startswith("trainmount: ")
    assert (len(done.stderr.splitlines()), done.stdout) == (1, "")


def test_no_arguments_at_all_are_told_the_commands(in_process: Any) -> None:
    done = in_process(status=2)

    assert "Commands:" in done.stdout + done.stderr
    assert "trainmount: " not in done.stdout + done.stderr


def in_machine_without_fuse(trainmount: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run in a mount namespace whose /dev has no fuse."""
    hide = """
    mkdir -p "$1/dev"; mount -t tmpfs none "$1/dev"
    for name in null zero urandom random; do
      touch "$1/dev/$name"; mount --bind "/dev/$name" "$1/dev/$name"
    done
    mount --rbind "$1/dev" /dev; shift; exec "$@"
    """
    own_users = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *own_users, "--mount", "bash", "-ec", hide, "bash"]
    command += [str(trainmount.folder), sys.executable, "-m", "trainmount_cli", *arguments]
    return subprocess.run(
        command, env=trainmount.environment, capture_output=True, text=True, timeout=60
    )


def test_a_missing_fuse_device_is_one_line_with_the_way_out(trainmount: Any) -> None:
    path = Path(trainmount.write_job("true", volumes=[{"path": "/Volumes/a/b/c"}]))

    done = in_machine_without_fuse(trainmount, "run", "-f", str(path), "--local")

    assert done.returncode == 1
    assert done.stderr.startswith("trainmount: /dev/fuse: is missing")
    assert "sudo modprobe fuse" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert trainmount.run_folders() == []
    doctor = in_machine_without_fuse(trainmount, "doctor")
    assert doctor.returncode == 1
    assert "MISS  /dev/fuse: is missing" in doctor.stdout
