"""`run --local` without volumes: attempts, signals, what is left behind, what can be resumed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Until = Callable[..., Any]

TWO_NODES = {"numAccelerators": 4, "acceleratorsPerNode": 2}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def all_pids(status: dict[str, Any]) -> list[int]:
    pids = status["pids"]
    nodes = [node["pid"] for node in pids["nodes"]]
    return [pids["supervisor"], pids["init"], pids["server"], *nodes]


def nodes_run(trainmount: Any) -> dict[str, Any] | None:
    """The status once the nodes have started their programs (each makes a file `up-<rank>`)."""
    status = trainmount.status()
    nodes = status.get("pids", {}).get("nodes") or []
    started = [trainmount.folder / f"up-{node['rank']}" for node in nodes]
    return status if nodes and all(path.exists() for path in started) else None


def test_every_node_gets_the_environment_of_a_cluster(trainmount: Any) -> None:
    script = 'cat "$HYPERPARAMETERS_PATH"; cd "$CODE_SOURCE_PATH"; python main.py'
    program = "import os\nfor n in sorted(os.environ): print(n + '=' + os.environ[n])\n"
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}}
    job = trainmount.write_job(
        script,
        code | {"data": {"main.py": program}},
        compute=TWO_NODES,
        parameters={"epochs": 3},
        envVariables={"MINE": "yes"},
        codeSource={"configMap": {"name": "code"}},
    )

    done = trainmount("run", "-f", job, "--local", "--watch")

    for rank in (0, 1):
        lines = [
            line.removeprefix(f"[node {rank}] ")
            for line in done.stdout.splitlines()
            if line.startswith(f"[node {rank}] ")
        ]
        assert lines[0] == "epochs: 3"
        variables = dict(line.split("=", 1) for line in lines[1:] if "=" in line)
        expected = {
            "NODE_RANK": str(rank),
            "NUM_NODES": "2",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TRAINMOUNT_ATTEMPT": "0",
            "TRAINMOUNT_JOB": "trial",
            "MINE": "yes",
        }
        assert expected.items() <= variables.items()
        assert "RANK" not in variables
        assert variables["DATABRICKS_HOST"].startswith("http://127.0.0.1:")


def test_one_failed_node_restarts_all_of_them(trainmount: Any) -> None:
    # Node 1 fails in the first attempt, node 0 would sleep for ever and ignores SIGTERM.
    script = """
    if [ "$TRAINMOUNT_ATTEMPT$NODE_RANK" = 01 ]; then exit 7; fi
    if [ "$TRAINMOUNT_ATTEMPT" = 0 ]; then trap '' TERM; sleep 1000; fi
    """
    job = trainmount.write_job(script, compute=TWO_NODES, checkpoint={"graceSeconds": 1})

    done = trainmount("run", "-f", job, "--local", "--watch")

    assert "node 1 ended with exit code 7" in done.stdout
    status = trainmount.status()
    first, second = status["attempts"]
    assert (first["outcome"], first["exitCode"], first["nodeRank"]) == ("Failed", 7, 1)
    assert first["nodes"] == [{"rank": 0, "exitCode": 137}, {"rank": 1, "exitCode": 7}]
    assert second["outcome"] == "Succeeded"
    assert (status["retries"], status["pids"]) == (1, {})


def test_a_job_that_keeps_failing_ends_with_its_exit_code(trainmount: Any) -> None:
    job = trainmount.write_job("echo attempt $TRAINMOUNT_ATTEMPT; exit 5", maxRetries=1)

    done = trainmount("run", "-f", job, "--local", "--watch", status=1)

    assert "FAILED: node 0 ended with exit code 5 after 1 retries" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("[node 0]")] == [
        "[node 0] attempt 0",
        "[node 0] attempt 1",
    ]
    described = trainmount.data("get", "trial", "--local")
    assert (described["status"], described["attempt_number"]) == ("FAILED", 1)
    assert trainmount("logs", "trial", "--local", "--attempt", "0").stdout == "[node 0] attempt 0\n"


def test_sigterm_comes_before_sigkill(trainmount: Any) -> None:
    script = """
    if [ "$NODE_RANK" = 0 ]; then
      trap 'echo saved; exit 0' TERM; touch ready
      while true; do sleep 0.1; done
    fi
    while [ ! -e ready ]; do sleep 0.1; done; exit 1
    """
    job = trainmount.write_job(script, compute=TWO_NODES, maxRetries=0)

    done = trainmount("run", "-f", job, "--local", "--watch", status=1)

    assert "[node 0] saved" in done.stdout


def test_a_killed_supervisor_leaves_nothing_and_the_run_can_be_resumed(
    trainmount: Any, until: Until
) -> None:
    script = f"""
    touch {trainmount.folder}/up-$NODE_RANK
    if [ "$TRAINMOUNT_ATTEMPT" = 1 ]; then echo second attempt; exit 0; fi
    setsid sleep 1000 & sleep 1000
    """
    job = trainmount.write_job(script, compute=TWO_NODES)
    trainmount("run", "-f", job, "--local")
    status = until(lambda: nodes_run(trainmount))
    pids = all_pids(status)
    assert all(is_running(pid) for pid in pids)

    os.kill(status["pids"]["supervisor"], signal.SIGKILL)

    until(lambda: not any(is_running(pid) for pid in pids), "the end of every process")
    assert trainmount.data("get", "--local")["status"] == "INTERRUPTED"
    assert trainmount.data("get", "--local")["pids"] == {}
    done = trainmount("run", "--local", "--resume", "trial", "--watch")
    assert "[node 1] second attempt" in done.stdout
    first, second = trainmount.status()["attempts"]
    assert (first["outcome"], first["reason"]) == ("Interrupted", "Interrupted")
    assert second["outcome"] == "Succeeded"
    assert trainmount.status()["retries"] == 0


def test_the_death_of_the_first_process_is_told(trainmount: Any, until: Until) -> None:
    job = trainmount.write_job(f"touch {trainmount.folder}/up-$NODE_RANK; sleep 1000")
    trainmount("run", "-f", job, "--local")
    status = until(lambda: nodes_run(trainmount))

    os.kill(status["pids"]["init"], signal.SIGKILL)

    until(lambda: trainmount.data("get", "--local")["status"] == "INTERRUPTED")
    until(lambda: not any(is_running(pid) for pid in all_pids(status)), "the end of all")


def test_a_watcher_can_leave_and_the_run_goes_on(trainmount: Any, until: Until) -> None:
    script = f"""
    touch {trainmount.folder}/up-$NODE_RANK; echo up
    while [ ! -e {trainmount.folder}/go ]; do sleep 0.1; done; echo done
    """
    job = trainmount.write_job(script)
    watcher = trainmount.start("run", "-f", job, "--local", "--watch")
    until(lambda: nodes_run(trainmount))

    for _ in range(3):
        watcher.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, errors = watcher.communicate(timeout=60)

    assert watcher.returncode == 130
    assert "Traceback" not in errors
    (folder,) = trainmount.run_folders()
    way_back = f"trainmount logs --local {folder.name} -f"
    assert errors == (f"\nrun {folder.name} goes on in the background; back to it: {way_back}\n")
    (trainmount.folder / "go").touch()
    done = trainmount(*way_back.split()[1:])
    assert [line for line in done.stdout.splitlines() if line.startswith("[node")] == [
        "[node 0] up",
        "[node 0] done",
    ]


def test_a_cancelled_run_keeps_its_output(trainmount: Any, until: Until) -> None:
    script = f"""
    trap 'echo last words; exit 0' TERM; touch {trainmount.folder}/up-$NODE_RANK
    while true; do sleep 0.1; done
    """
    job = trainmount.write_job(script, compute=TWO_NODES)
    trainmount("run", "-f", job, "--local")
    status = until(lambda: nodes_run(trainmount))

    trainmount("cancel", "trial", "--local")

    assert not any(is_running(pid) for pid in all_pids(status))
    described = trainmount.data("get", "trial", "--local")
    assert described["status"] == "CANCELED"
    logs = trainmount("logs", "trial", "--local", "--node", "1").stdout
    assert logs.endswith("[node 1] last words\n")
    again = trainmount("cancel", "trial", "--local", status=1)
    assert again.stderr.endswith("is not running\n")


def test_a_second_run_of_a_running_job_is_refused(trainmount: Any, until: Until) -> None:
    job = trainmount.write_job(f"touch {trainmount.folder}/up-$NODE_RANK; sleep 1000")
    trainmount("run", "-f", job, "--local")
    until(lambda: nodes_run(trainmount))

    again = trainmount("run", "-f", job, "--local", status=1)

    assert "trial is running already as trial-" in again.stderr
    assert len(trainmount.run_folders()) == 1


def test_what_a_node_leaves_running_ends_with_the_attempt(trainmount: Any) -> None:
    marker = trainmount.folder / "left"
    script = f"setsid bash -c 'echo $$ > /dev/null; sleep 2; touch {marker}' & disown; exit 0"
    job = trainmount.write_job(script)

    trainmount("run", "-f", job, "--local", "--watch")

    time.sleep(2.5)
    assert not marker.exists()


def test_a_file_of_the_ai_runtime_runs_as_it_is(trainmount: Any) -> None:
    (trainmount.folder / "src").mkdir()
    (trainmount.folder / "src/train.py").write_text("print('trained')\n")
    path = trainmount.folder / "workload.yaml"
    path.write_text(
        "experiment_name: Flat_One\n"
        "compute: {num_accelerators: 1, accelerator_type: GPU_1xA10}\n"
        "code_source: {root_path: ./src}\n"
        "command: python $CODE_SOURCE_PATH/train.py\n"
        "secrets: {API_KEY: scope/key}\n"
    )

    missing = trainmount("run", "-f", str(path), "--local", "--watch", status=2)
    done = trainmount("run", "-f", str(path), "--local", "--watch", API_KEY="hidden-value")

    assert "API_KEY" in missing.stderr
    assert "[node 0] trained" in done.stdout
    for file in trainmount.run_folders()[0].rglob("*"):
        assert not file.is_file() or b"hidden-value" not in file.read_bytes()


def test_json_lines_tell_the_same_story(trainmount: Any) -> None:
    import json

    job = trainmount.write_job("echo hello")

    done = trainmount("run", "-f", job, "--local", "--watch", "-o", "json")

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["type"] == "SUBMITTED"
    logs = [line for line in lines if line.get("type") == "LOG"]
    assert [(line["node"], line["attempt"], line["line"]) for line in logs] == [(0, 0, "hello")]
    assert lines[-1]["data"]["status"] == "SUCCESS"
    listed = trainmount.data("list", "--local")["runs"]
    assert [run["run_id"] for run in listed] == [lines[0]["run_id"]]
