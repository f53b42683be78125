"""Mount pods against a small API server: made once, replaced when they go, gone after a stop."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client

from trainmount_csi.daemon_spec import DaemonFolder
from trainmount_csi.errors import Unavailable
from trainmount_csi.mount_pods import MountPodOptions, PodLauncher, mount_pod, owner_of

WAIT_SECONDS = 20


class PodServer(ThreadingHTTPServer):
    """Pods of one namespace: list, watch, create, delete. A deleted pod ends when the test says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), PodHandler)
        self.changed = threading.Condition()
        self.pods: dict[str, dict[str, Any]] = {}  # guarded by changed, as the rest
        self.events: list[dict[str, Any]] = []
        self.forbidden_priority_class = ""
        self.num_created = 0
        self.is_open = True
        self.is_broken = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def change(self, kind: str, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a pod, drop it where `kind` is DELETED, and tell the watchers."""
        with self.changed:
            pod = self.pods[name]
            change(pod)
            if kind == "DELETED":
                del self.pods[name]
            self.events.append({"type": kind, "object": json.loads(json.dumps(pod))})
            self.changed.notify_all()

    def wait_event(self, index: int) -> dict[str, Any] | None:
        """The event with this number, when it happens; None when the server closes."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.events) > index or not self.is_open)
            return self.events[index] if self.is_open else None

    def vanish(self, name: str) -> None:
        self.change("DELETED", name, lambda pod: None)

    def fail(self, name: str) -> None:
        self.change(
            "MODIFIED", name, lambda pod: pod["status"].update(phase="Failed", reason="OOM")
        )

    def close(self) -> None:
        with self.changed:
            self.is_open = False
            self.changed.notify_all()
        self.shutdown()
        self.server_close()


class PodHandler(BaseHTTPRequestHandler):
    server: PodServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:  # type: ignore[override]
        pass

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.server.is_broken:
            self._answer(500, {"message": "broken"})
            return
        query = parse_qs(urlsplit(self.path).query)
        wanted = dict(
            pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair
        )
        if query.get("watch") == ["True"]:
            self._stream()
            return
        name = urlsplit(self.path).path.partition("/pods/")[2]
        if name:
            self._answer(200, self.server.pods[name])
            return
        with self.server.changed:
            pods = [
                pod
                for pod in self.server.pods.values()
                if wanted.items() <= pod["metadata"]["labels"].items()
            ]
            self._answer(
                200, {"kind": "PodList", "apiVersion": "v1", "items": pods, "metadata": {}}
            )

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        for sent in itertools.count():
            event = self.server.wait_event(sent)
            if event is None:
                return
            self.wfile.write(json.dumps(event).encode() + b"\n")
            self.wfile.flush()

    def do_POST(self) -> None:
        pod = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refused = self.server.forbidden_priority_class
        if refused and pod["spec"].get("priorityClassName") == refused:
            self._answer(403, {"message": f"pods with {refused} priorityClass is not permitted"})
            return
        with self.server.changed:
            self.server.num_created += 1
            name = f"{pod['metadata']['generateName']}{self.server.num_created}"
            pod["metadata"].update(
                name=name,
                uid=name,
                resourceVersion=str(self.server.num_created),
                creationTimestamp=f"2026-01-01T00:00:{self.server.num_created:02}Z",
            )
            pod["status"] = {"phase": "Pending"}
            self.server.pods[name] = pod
        self._answer(201, pod)

    def do_DELETE(self) -> None:
        name = urlsplit(self.path).path.rpartition("/")[2]
        if name not in self.server.pods:
            self._answer(404, {"message": "not found"})
            return
        self.server.change("MODIFIED", name, _mark_deleted)
        self._answer(200, {"kind": "Status", "apiVersion": "v1", "metadata": {}})


def _mark_deleted(pod: dict[str, Any]) -> None:
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T01:00:00Z"


OPTIONS = MountPodOptions(namespace="trainmount-system", node_name="node-1", image="image:1")


@pytest.fixture
def api() -> Iterator[PodServer]:
    server = PodServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.close()
    thread.join()


@pytest.fixture
def core(api: PodServer) -> Iterator[client.CoreV1Api]:
    configuration = client.Configuration(host=api.url)
    configuration.retries = False
    with client.ApiClient(configuration) as connection:
        yield client.CoreV1Api(connection)


@pytest.fixture
def launcher(core: client.CoreV1Api) -> Iterator[PodLauncher]:
    launcher = PodLauncher(OPTIONS, core)
    yield launcher
    launcher.close()


@pytest.fixture
def folder(tmp_path: Path) -> DaemonFolder:
    return DaemonFolder(tmp_path / ("0123456789" * 2))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_pod_serves_a_daemon_however_often_it_is_asked_for(
    api: PodServer, launcher: PodLauncher, folder: DaemonFolder
) -> None:
    for _ in range(3):
        launcher.ensure(folder)
    assert len(api.pods) == 1
    assert launcher.is_running(folder)
    (name,) = api.pods
    assert launcher.describe(folder) == f"mount pod trainmount-system/{name} is Pending"


def test_a_failed_pod_is_replaced_and_removed(
    api: PodServer, launcher: PodLauncher, folder: DaemonFolder
) -> None:
    launcher.ensure(folder)
    (first,) = api.pods
    launcher.changed.clear()
    api.fail(first)
    assert launcher.changed.wait(WAIT_SECONDS)
    assert not launcher.is_running(folder)
    assert "OOM" in launcher.describe(folder)
    launcher.ensure(folder)
    assert len(api.pods) == 2
    assert "deletionTimestamp" in api.pods[first]["metadata"]


def test_a_pod_that_is_deleted_by_hand_has_a_successor_before_it_ends(
    api: PodServer, core: client.CoreV1Api, launcher: PodLauncher, folder: DaemonFolder
) -> None:
    launcher.ensure(folder)
    (first,) = api.pods
    launcher.changed.clear()
    core.delete_namespaced_pod(first, "trainmount-system")
    assert launcher.changed.wait(WAIT_SECONDS)
    assert launcher.is_running(folder)
    launcher.ensure(folder)
    launcher.ensure(folder)
    assert len(api.pods) == 2
    api.vanish(first)
    launcher.ensure(folder)
    assert len(api.pods) == 1


def test_a_stop_is_over_when_every_pod_is_gone(
    api: PodServer, launcher: PodLauncher, folder: DaemonFolder
) -> None:
    launcher.ensure(folder)
    (name,) = api.pods
    # It still uploads.
    assert not launcher.stop(folder, 0)
    assert "deletionTimestamp" in api.pods[name]["metadata"]
    api.vanish(name)
    assert launcher.stop(folder, WAIT_SECONDS)
    assert launcher.stop(folder, 0)


def test_a_cluster_without_the_priority_class_gets_pods_without_it(
    api: PodServer, launcher: PodLauncher, folder: DaemonFolder
) -> None:
    api.forbidden_priority_class = "system-node-critical"
    launcher.ensure(folder)
    (pod,) = api.pods.values()
    assert "priorityClassName" not in pod["spec"]


def test_pods_of_other_nodes_are_not_ours(
    api: PodServer, core: client.CoreV1Api, launcher: PodLauncher, folder: DaemonFolder
) -> None:
    elsewhere = MountPodOptions(namespace="trainmount-system", node_name="node-2", image="image:1")
    pod: Any = mount_pod(elsewhere, folder, priority_class="")
    core.create_namespaced_pod("trainmount-system", pod)
    assert not launcher.is_running(folder)


def test_an_api_server_that_refuses_is_one_line(
    api: PodServer, launcher: PodLauncher, folder: DaemonFolder
) -> None:
    api.is_broken = True
    with pytest.raises(Unavailable, match=r"cannot list mount pods \(API server: 500"):
        launcher.ensure(folder)


def test_the_pod_has_no_privilege_no_token_and_not_the_mount(folder: DaemonFolder) -> None:
    pod = mount_pod(OPTIONS, folder, priority_class="system-node-critical")
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert spec["nodeName"] == "node-1"
    assert spec["securityContext"]["runAsUser"] == 65534
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["priorityClassName"] == "system-node-critical"
    paths = [volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume]
    assert paths == [str(folder.serve_path)]
    assert not folder.mount_path.is_relative_to(folder.serve_path)
    assert "DATABRICKS" not in json.dumps(pod)
    assert container["command"][:4] == ["python", "-m", "trainmount_fuse", "serve"]


def test_the_owner_is_the_controller_of_the_driver_s_pod_and_does_not_control(
    api: PodServer, core: client.CoreV1Api, folder: DaemonFolder
) -> None:
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "driver", "uid": "u"}
    pod: Any = mount_pod(OPTIONS, folder, priority_class="")
    pod["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    created: Any = core.create_namespaced_pod("trainmount-system", pod)
    found = owner_of(core, "trainmount-system", created.metadata.name)
    assert found == owner
    owned = MountPodOptions(
        namespace="trainmount-system", node_name="node-1", image="image:1", owner=found
    )
    made = mount_pod(owned, folder, priority_class="")
    assert made["metadata"]["ownerReferences"] == [owner]
