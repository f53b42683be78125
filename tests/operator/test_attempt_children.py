"""The objects of an attempt, and the names they go by."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainmount_operator import labels
from trainmount_operator.children import AttemptObjects, AttemptOptions, attempt_objects
from trainmount_operator.job import TrainingJob
from trainmount_operator.launch import RENDEZVOUS_EXIT_CODE, START_SCRIPT
from trainmount_operator.merge import strategic_merge
from trainmount_operator.spec import parse_job

OPTIONS = AttemptOptions(default_image="runtime:1")


def job(name: str = "digits", **spec: Any) -> TrainingJob:
    base = {
        "experimentName": "digits",
        "compute": {"numAccelerators": 4, "acceleratorsPerNode": 2},
        "command": "python train.py",
    }
    document = {
        "apiVersion": "trainmount.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team", "uid": "u-1"},
        "spec": base | spec,
    }
    return parse_job(document)


def objects(attempt: int = 0, name: str = "digits", **spec: Any) -> AttemptObjects:
    return attempt_objects(job(name, **spec), attempt, OPTIONS)


def pod(children: AttemptObjects) -> dict[str, Any]:
    spec: dict[str, Any] = children.job["spec"]["template"]["spec"]
    return spec


def variables(children: AttemptObjects) -> dict[str, Any]:
    (container,) = pod(children)["containers"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_the_job_is_a_gang_that_never_replaces_a_pod() -> None:
    spec = objects().job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimitPerIndex"] == 0
    assert "backoffLimit" not in spec
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_every_child_is_owned_named_and_labelled_alike() -> None:
    children = objects(attempt=3)
    for child in (children.job, children.service, children.config_map):
        metadata = child["metadata"]
        assert metadata["name"] == "digits-3"
        assert metadata["namespace"] == "team"
        assert metadata["labels"] == labels.attempt_labels("digits", "u-1", 3)
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("TrainingJob", "u-1", True)


def test_a_node_resolves_node_0_through_the_headless_service() -> None:
    children = objects(attempt=1)
    assert variables(children)["MASTER_ADDR"] == "digits-1-0.digits-1"
    assert pod(children)["subdomain"] == children.service["metadata"]["name"] == "digits-1"
    service = children.service["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    pod_labels = children.job["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= pod_labels.items()


def test_the_node_rank_is_the_pods_completion_index() -> None:
    assert variables(objects())["NODE_RANK"] == {
        "fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}
    }


def test_the_environment_holds_the_users_variables_and_secrets() -> None:
    found = variables(
        objects(envVariables={"NAME": "a $(HOME) b"}, secrets={"TOKEN": "databricks/token"})
    )
    assert found["NAME"] == "a $$(HOME) b"
    assert found["TOKEN"] == {"secretKeyRef": {"name": "databricks", "key": "token"}}
    assert (found["NUM_NODES"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("2", "4", "2")


def test_parameters_and_command_are_files_of_the_attempt() -> None:
    children = objects(parameters={"epochs": 3, "rate": 0.1})
    assert yaml.safe_load(children.config_map["data"]["parameters.yaml"]) == {
        "epochs": 3,
        "rate": 0.1,
    }
    assert children.config_map["data"]["command.sh"] == "python train.py"
    assert variables(children)["HYPERPARAMETERS_PATH"] == "/trainmount/job/parameters.yaml"
    assert "HYPERPARAMETERS_PATH" not in variables(objects())


def test_code_appears_under_its_paths() -> None:
    items = [{"key": "a", "path": "pkg/a.py"}]
    children = objects(codeSource={"configMap": {"name": "code", "items": items}})
    volume = next(v for v in pod(children)["volumes"] if v["name"] == "code")
    assert volume["configMap"]["name"] == "code"
    assert volume["configMap"]["items"] == items
    assert variables(children)["CODE_SOURCE_PATH"] == "/trainmount/code"


def test_accelerators_are_asked_for_by_their_resource() -> None:
    (container,) = pod(objects())["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert container["image"] == "runtime:1"


def test_volumes_are_inline_csi_volumes_or_claims() -> None:
    children = objects(
        volumes=[
            {
                "path": "/Volumes/main/default/digits",
                "secretRef": {"name": "databricks"},
                "cacheSize": "20Gi",
            },
            {"path": "/scratch", "claimName": "scratch", "readOnly": True},
        ]
    )
    by_name = {volume["name"]: volume for volume in pod(children)["volumes"]}
    assert by_name["volume-0"]["csi"] == {
        "driver": "csi.trainmount.dev",
        "readOnly": False,
        "volumeAttributes": {"source": "/Volumes/main/default/digits", "cacheSize": "20Gi"},
        "nodePublishSecretRef": {"name": "databricks"},
    }
    assert by_name["volume-1"]["persistentVolumeClaim"] == {
        "claimName": "scratch",
        "readOnly": True,
    }
    mounts = {m["name"]: m for m in pod(children)["containers"][0]["volumeMounts"]}
    assert mounts["volume-0"]["mountPath"] == "/Volumes/main/default/digits"
    assert mounts["volume-1"]["readOnly"] is True


def test_the_grace_period_is_what_a_checkpoint_may_take() -> None:
    assert pod(objects(checkpoint={"graceSeconds": 90}))["terminationGracePeriodSeconds"] == 90


def test_pods_prefer_nodes_of_their_own_and_accept_to_share_one() -> None:
    (constraint,) = pod(objects())["topologySpreadConstraints"]
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    assert constraint["topologyKey"] == "kubernetes.io/hostname"


def test_shared_memory_is_the_containers_and_may_be_bounded() -> None:
    def shared_memory(**spec: Any) -> dict[str, Any]:
        (volume,) = [v for v in pod(objects(**spec))["volumes"] if v["name"] == "shm"]
        return dict(volume["emptyDir"])

    mounts = {m["mountPath"]: m["name"] for m in pod(objects())["containers"][0]["volumeMounts"]}
    assert mounts["/dev/shm"] == "shm"
    assert shared_memory() == {"medium": "Memory"}
    bounded = {"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}}
    override = {"spec": {"volumes": [bounded]}}
    assert shared_memory(podTemplate=override) == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_overrides_merge_into_the_container_and_cannot_break_the_gang() -> None:
    override = {
        "metadata": {"labels": {"team": "a", labels.ATTEMPT: "9"}},
        "spec": {
            "restartPolicy": "Always",
            "subdomain": "x",
            "nodeSelector": {"pool": "gpu"},
            "containers": [
                {"name": "training", "resources": {"limits": {"memory": "8Gi"}}},
                {"name": "sidecar", "image": "s"},
            ],
        },
    }
    children = objects(podTemplate=override)
    spec = pod(children)
    assert spec["restartPolicy"] == "Never"
    assert spec["subdomain"] == "digits-0"
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert [c["name"] for c in spec["containers"]] == ["training", "sidecar"]
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2", "memory": "8Gi"}
    assert spec["containers"][0]["command"] == ["bash", "/trainmount/job/start.sh"]
    pod_labels = children.job["spec"]["template"]["metadata"]["labels"]
    assert (pod_labels["team"], pod_labels[labels.ATTEMPT]) == ("a", "0")


def test_on_the_hosts_network_every_attempt_has_a_port_of_its_own() -> None:
    template = {"spec": {"hostNetwork": True}}
    ports = {
        variables(objects(attempt=attempt, podTemplate=template))["MASTER_PORT"]
        for attempt in range(5)
    }
    assert len(ports) == 5
    children = objects(podTemplate=template)
    port = int(variables(children)["MASTER_PORT"])
    assert 20000 <= port < 30000
    assert pod(children)["containers"][0]["ports"] == [{"containerPort": port, "hostPort": port}]
    assert pod(children)["dnsPolicy"] == "ClusterFirstWithHostNet"


def test_building_twice_gives_the_same_objects() -> None:
    assert objects(parameters={"b": 1, "a": 2}) == objects(parameters={"b": 1, "a": 2})


@pytest.mark.parametrize(
    "name", ["user.model.1", "1abc", "a" * 63, "a" * 253, "x", "a-" * 30 + "b"]
)
@pytest.mark.parametrize("attempt", [0, 99, 99999])
def test_names_of_children_fit_and_agree_whatever_the_jobs_name(name: str, attempt: int) -> None:
    children = objects(attempt=attempt, name=name)
    host = labels.pod_host_name(name, attempt, 4095)
    assert len(host) <= 63
    assert host[0].isalpha()
    assert set(host) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert all(len(value) <= 63 for value in children.job["metadata"]["labels"].values())
    address = variables(children)["MASTER_ADDR"]
    assert address.split(".")[0] == f"{children.job['metadata']['name']}-0"
    assert children.job["spec"]["template"]["metadata"]["annotations"]["trainmount.dev/job"] == name


def test_different_long_names_have_different_children() -> None:
    assert labels.base_name("a" * 60 + "x") != labels.base_name("a" * 60 + "y")
    assert labels.base_name("digits") == "digits"


def test_null_removes_a_field_and_lists_without_identity_are_replaced() -> None:
    base = {
        "a": 1,
        "args": ["x"],
        "tolerations": [{"key": "k"}],
        "env": [{"name": "A", "value": "1"}],
    }
    override = {
        "a": None,
        "args": ["y"],
        "tolerations": [{"key": "l"}],
        "env": [{"name": "A", "value": "2"}, {"name": "B"}],
    }
    assert strategic_merge(base, override) == {
        "args": ["y"],
        "tolerations": [{"key": "k"}, {"key": "l"}],
        "env": [{"name": "A", "value": "2"}, {"name": "B"}],
    }
    assert base["args"] == ["x"]


def start(folder: Path, command: str, **environment: str) -> subprocess.Popen[str]:
    """The start script as in a pod, its folder and the kernel's termination log moved here."""
    (folder / "command.sh").write_text(command)
    script = START_SCRIPT.replace("/trainmount/job", str(folder))
    script = script.replace("/dev/termination-log", str(folder / "termination-log"))
    script = script.replace("/dev/shm", str(folder))
    (folder / "start.sh").write_text(script)
    return subprocess.Popen(
        ["bash", str(folder / "start.sh")],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "MASTER_ADDR": "localhost"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.parametrize("code", [0, 1, 7, 139])
def test_the_start_script_ends_with_the_commands_exit_code(tmp_path: Path, code: int) -> None:
    process = start(tmp_path, f"echo rank; exit {code}")
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("rank\n", code)


def test_the_command_stops_at_the_first_failing_line(tmp_path: Path) -> None:
    process = start(tmp_path, "false | true\necho not reached")
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 1


def test_sigterm_reaches_what_the_command_started_and_its_last_work_is_awaited(
    tmp_path: Path,
) -> None:
    child = (
        "trap 'sleep 0.5; echo saved > saved; exit 0' TERM; echo ready; "
        "while :; do sleep 0.05; done"
    )
    (tmp_path / "child.sh").write_text(child)
    process = start(tmp_path, f"cd {tmp_path}\nbash child.sh\necho after")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=30)
    assert (tmp_path / "saved").read_text() == "saved\n"
    assert process.returncode in (0, 143)


def test_errors_are_handed_on_and_the_telling_ones_are_kept(tmp_path: Path) -> None:
    report = "\n".join(f"W123 launcher line {number}" for number in range(2000))
    command = f"echo out; echo '[rank1]: ValueError: bad sample' >&2; echo '{report}' >&2; exit 3"
    process = start(tmp_path, command)
    output, errors = process.communicate(timeout=30)
    assert (output, process.returncode) == ("out\n", 3)
    assert errors == f"[rank1]: ValueError: bad sample\n{report}\n"
    message = (tmp_path / "termination-log").read_text()
    assert message == "[rank1]: ValueError: bad sample\n"


@pytest.mark.parametrize(
    "command", ["echo what now >&2; exit 3", "echo 'ValueError: handled' >&2", "exit 1"]
)
def test_without_an_error_to_tell_the_kubelet_keeps_the_end_of_the_log(
    tmp_path: Path, command: str
) -> None:
    start(tmp_path, command).communicate(timeout=30)
    assert not (tmp_path / "termination-log").exists()


def test_a_process_left_behind_does_not_keep_the_node(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep 20 & echo $! > pid; echo 'OSError: gone' >&2; exit 4")
    assert process.wait(timeout=15) == 4
    subprocess.run(["bash", "-c", 'kill "$(cat pid)"'], cwd=tmp_path, check=True)
    assert process.communicate(timeout=30) == ("", "OSError: gone\n")


def test_one_answer_of_one_name_server_is_not_enough(tmp_path: Path) -> None:
    # Every second question reaches a server that does not know the name yet, four times.
    asked = tmp_path / "asked"
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "getent").write_text(
        f"#!/bin/bash\necho x >> {asked}\nn=$(wc -l < {asked})\n(( n % 2 || n > 8 ))\n"
    )
    (tools / "getent").chmod(0o755)
    process = start(tmp_path, "echo started", PATH=f"{tools}:/usr/bin:/bin", NODE_RANK="1")
    output, _ = process.communicate(timeout=60)
    assert output == "started\n"
    assert len(asked.read_text().splitlines()) == 13


def test_a_name_that_never_resolves_ends_the_attempt_with_a_reason(tmp_path: Path) -> None:
    process = start(
        tmp_path, "echo no", MASTER_ADDR="nowhere.invalid", TRAINMOUNT_RENDEZVOUS_SECONDS="0"
    )
    output, errors = process.communicate(timeout=60)
    assert (output, process.returncode) == ("", RENDEZVOUS_EXIT_CODE)
    message = (tmp_path / "termination-log").read_text()
    assert message.startswith("trainmount: the name nowhere.invalid of node 0 did not resolve")
    assert errors.startswith("trainmount: ")


def test_a_job_without_the_users_image_gets_the_installations() -> None:
    (container,) = pod(attempt_objects(job(environment={"image": "mine:2"}), 0, replace(OPTIONS)))[
        "containers"
    ]
    assert container["image"] == "mine:2"
