"""Jobs on a cluster, against a small API server: what is sent to it, and what a watcher sees."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

Document = dict[str, Any]

TOKEN = "token-of-the-cluster"


class FakeCluster:
    """Keeps objects by collection and name, and moves a job on each time it is looked at."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Document] = {}
        self.requests: list[tuple[str, str]] = []
        self.steps: list[Callable[[], None]] = []
        """What happens before each look at a TrainingJob, one at a time."""
        self.logs: dict[str, list[tuple[str, str]]] = {}
        """Lines of a pod with their times."""
        self.cuts: dict[str, int] = {}
        """After how many lines the first stream of a pod breaks."""
        self.log_queries: list[dict[str, list[str]]] = []
        self.url = ""

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(target)
        self.requests.append((method, parts.path))
        _, _, rest = parts.path.partition("/namespaces/")
        namespace, collection, *names = rest.split("/")
        assert namespace == "team"
        if method == "POST":
            return self._create(collection, body)
        if not names:
            wanted = [item for (kind, _), item in self.objects.items() if kind == collection]
            return 200, {"items": wanted, "metadata": {}}
        key = (collection, names[0])
        if method == "PATCH" and key not in self.objects:
            return self._create(collection, body)
        if key not in self.objects:
            return 404, {"message": f"{collection} {names[0]!r} not found"}
        if method == "PATCH":
            _merge(self.objects[key], body)
        elif method == "DELETE":
            del self.objects[key]
            return 200, {}
        elif collection == "trainingjobs" and self.steps:
            self.steps.pop(0)()
        return 200, self.objects[key]

    def _create(self, collection: str, body: Document) -> tuple[int, Document]:
        body["metadata"]["uid"] = f"uid-{len(self.requests)}"
        self.objects[collection, body["metadata"]["name"]] = body
        return 201, body

    def lines(self, target: str) -> tuple[list[str], bool]:
        """The log that was asked for, and whether the stream breaks after it."""
        parts = urlsplit(target)
        pod = parts.path.split("/")[-2]
        query = parse_qs(parts.query)
        self.log_queries.append(query)
        since = query.get("sinceTime", [""])[0].rstrip("Z")
        lines = [f"{when} {text}\n" for when, text in self.logs[pod] if when >= since]
        cut = self.cuts.pop(pod, None)
        return lines[:cut], cut is not None

    def set_status(self, succeeded: str, reason: str, message: str, attempt: int) -> None:
        job = self.objects["trainingjobs", "trial"]
        condition = {"type": "Succeeded", "status": succeeded, "reason": reason}
        job["status"] = {
            "conditions": [condition | {"message": message}],
            "attempts": [
                {"number": number, "startTime": "2026-01-01T00:00:00Z"}
                | ({"outcome": "Failed"} if number < attempt or succeeded != "Unknown" else {})
                for number in range(attempt + 1)
            ],
            "runningNodes": 1,
        }

    def add_pod(self, attempt: int, node: int, lines: list[tuple[str, str]]) -> None:
        name = f"trial-{attempt}-{node}"
        labels = {
            "trainmount.dev/attempt": str(attempt),
            "batch.kubernetes.io/job-completion-index": str(node),
        }
        state = {"name": "training", "state": {"running": {}}}
        self.logs[name] = lines
        self.objects["pods", name] = {
            "metadata": {"name": name, "uid": name, "labels": labels},
            "status": {"containerStatuses": [state]},
        }


def _merge(target: Document, change: Document) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    fake = FakeCluster()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._send(401, {"message": "Unauthorized"})
            elif urlsplit(self.path).path.endswith("/log"):
                self._stream()
            else:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length) or "null")
                self._send(*fake.answer(self.command, self.path, body))

        do_GET = do_POST = do_PATCH = do_DELETE = handle_request  # noqa: N815  the base's names

        def _send(self, status: int, document: Any) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self) -> None:
            lines, is_cut = fake.lines(self.path)
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in lines:
                data = line.encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            if is_cut:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def on_cluster(cluster: FakeCluster, in_process: Any, tmp_path: Path) -> Callable[..., Any]:
    """A command with a kubeconfig for the cluster and the namespace `team`."""
    path = tmp_path / "kubeconfig"

    def write(token: str) -> None:
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [
                {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}
            ],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(document))

    def call(*arguments: str, status: int = 0, token: str = TOKEN) -> Any:
        write(token)
        return in_process(*arguments, status=status, KUBECONFIG=str(path))

    return call


def test_a_folder_of_code_is_packed_and_goes_with_the_job(
    trainmount: Any, cluster: FakeCluster, on_cluster: Any
) -> None:
    source = trainmount.folder / "src"
    (source / "package/__pycache__").mkdir(parents=True)
    (source / "train.py").write_text("print('hi')\n")
    (source / "package/data.bin").write_bytes(bytes(range(256)))
    (source / "package/__pycache__/x.pyc").write_bytes(b"x")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}
    job = trainmount.write_job(
        "true", secret | {"stringData": {"k": "v"}}, codeSource={"rootPath": "./src"}
    )

    done = on_cluster("run", "-f", job)

    assert done.stdout.startswith("trial is submitted; follow it: trainmount logs trial -n team -f")
    created = cluster.objects["trainingjobs", "trial"]
    reference = created["spec"]["codeSource"]["configMap"]
    config_map = cluster.objects["configmaps", reference["name"]]
    files = {
        item["path"]: base64.b64decode(config_map["binaryData"][item["key"]])
        for item in reference["items"]
    }
    assert files == {"train.py": b"print('hi')\n", "package/data.bin": bytes(range(256))}
    assert config_map["metadata"]["ownerReferences"][0]["uid"] == created["metadata"]["uid"]
    assert cluster.objects["secrets", "s"]["stringData"] == {"k": "v"}


def test_code_that_is_too_large_is_refused_before_anything_is_sent(
    trainmount: Any, cluster: FakeCluster, on_cluster: Any
) -> None:
    (trainmount.folder / "src").mkdir()
    (trainmount.folder / "src/model.bin").write_bytes(bytes(1_500_000))
    job = trainmount.write_job("true", codeSource={"rootPath": "./src"})

    done = on_cluster("run", "-f", job, status=2)

    assert "a ConfigMap holds 1000000" in done.stderr
    assert "put the code into a volume" in done.stderr
    assert cluster.requests == []


def test_a_watcher_sees_every_line_once_through_a_broken_stream_and_an_attempt(
    trainmount: Any, cluster: FakeCluster, on_cluster: Any
) -> None:
    def first() -> None:
        lines = [(f"2026-01-01T00:00:0{n}.5", f"first {n}") for n in range(6)]
        cluster.add_pod(0, 0, lines)
        cluster.cuts["trial-0-0"] = 3
        cluster.set_status("Unknown", "Running", "attempt 0 runs", 0)

    def second() -> None:
        cluster.set_status("Unknown", "WaitingToRetry", "node 0 ended with exit code 1", 0)

    def third() -> None:
        cluster.add_pod(1, 0, [("2026-01-01T00:01:00.5", "second 0")])
        cluster.set_status("Unknown", "Running", "attempt 1 runs", 1)

    def last() -> None:
        cluster.set_status("True", "Completed", "every node ended with 0", 1)

    # The first look is whether the name is free.
    cluster.steps = [first, second, second, third, third, last]
    job = trainmount.write_job("true")

    done = on_cluster("run", "-f", job, "--watch")

    lines = [line for line in done.stdout.splitlines() if line.startswith("[node 0]")]
    expected = [f"[node 0] first {n}" for n in range(6)]
    assert lines == [*expected, "[node 0] second 0"]
    assert "-- WAITING_FOR_RETRY: node 0 ended with exit code 1" in done.stdout
    assert done.stdout.endswith("trial: SUCCESS: every node ended with 0\n")
    assert cluster.log_queries[1]["sinceTime"] == ["2026-01-01T00:00:02Z"]


def test_a_failed_job_is_a_failed_watch(
    trainmount: Any, cluster: FakeCluster, on_cluster: Any
) -> None:
    cluster.steps = [lambda: cluster.set_status("False", "ProgramFailed", "exit code 3", 0)]
    job = trainmount.write_job("true")

    done = on_cluster("run", "-f", job, "--watch", "-o", "json", status=1)

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("type") for line in lines[:-1]] == ["SUBMITTED", "STATUS"]
    assert lines[-1]["data"]["status"] == "FAILED"


def test_a_job_that_is_not_over_is_in_the_way_and_an_ended_one_makes_room(
    trainmount: Any, cluster: FakeCluster, on_cluster: Any
) -> None:
    job = trainmount.write_job("true")
    on_cluster("run", "-f", job)
    uid = cluster.objects["trainingjobs", "trial"]["metadata"]["uid"]

    refused = on_cluster("run", "-f", job, status=1)
    on_cluster("cancel", "trial")
    described = json.loads(on_cluster("get", "trial", "-o", "json").stdout)["data"]
    on_cluster("cancel", "trial", status=1)
    on_cluster("run", "-f", job)

    assert "trial exists in the namespace team and is PENDING" in refused.stderr
    assert described["status"] == "CANCELED"
    assert cluster.objects["trainingjobs", "trial"]["metadata"]["uid"] != uid
    assert "suspend" not in cluster.objects["trainingjobs", "trial"]["spec"]


def test_where_there_is_no_output_the_reason_is_told(
    trainmount: Any, cluster: FakeCluster, on_cluster: Any
) -> None:
    on_cluster("run", "-f", trainmount.write_job("true"))
    cluster.add_pod(0, 0, [])
    waiting = {"reason": "ErrImagePull", "message": "no such image"}
    pod = cluster.objects["pods", "trial-0-0"]
    pod["status"]["containerStatuses"][0]["state"] = {"waiting": waiting}
    cluster.set_status("Unknown", "Starting", "", 0)

    done = on_cluster("logs", "trial", status=2)

    assert done.stderr == (
        "trainmount: no output: the container waits: ErrImagePull no such image\n"
    )


def test_a_wrong_token_and_a_missing_job_are_one_line(on_cluster: Any) -> None:
    assert on_cluster("list", status=1, token="wrong").stderr == "trainmount: Unauthorized\n"
    assert on_cluster("get", "gone", status=2).stderr == (
        "trainmount: there is no TrainingJob 'gone' in the namespace team\n"
    )
