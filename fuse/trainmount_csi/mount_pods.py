"""Mount pods: the supervisor of a mount as an unprivileged pod on this node. Called by the daemons
through `Launcher`.

A pod is found by its labels, never by its name, so that a new one can start while the old one still
ends. The driver's DaemonSet owns it: uninstalling the driver collects it, restarting the plugin
does not touch it. Mount pods never restart in place, since the kubelet would wait longer each time;
a pod that ended is replaced by a new one, which takes the mount over.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final

import urllib3
from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from trainmount_csi.daemon_spec import DaemonFolder
from trainmount_csi.errors import Unavailable
from trainmount_csi.launchers import serve_command

__all__ = [
    "DAEMON_LABEL",
    "NODE_LABEL",
    "MountPodOptions",
    "PodLauncher",
    "connect",
    "mount_pod",
    "node_label",
    "owner_of",
]

logger = logging.getLogger(__name__)

DAEMON_LABEL: Final = "trainmount.dev/daemon"
NODE_LABEL: Final = "trainmount.dev/node"

UNPRIVILEGED_UID: Final = 65534
"""`nobody`: owns nothing else on the node."""

GRACE_SECONDS: Final = 150
"""Between SIGTERM and SIGKILL: above the time that the supervisor gives its daemon for uploads."""

REQUEST_TIMEOUT_SECONDS: Final = 30

WATCH_SECONDS: Final = 300
"""The API server ends a watch after this; then everything is looked at once more."""

_POLL_SECONDS: Final = 0.25

_NODE_LABEL_MAX: Final = 63

_SCRATCH: Final = "/tmp"  # noqa: S108 - inside the pod, of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class MountPodOptions:
    """What every mount pod of this node has in common."""

    namespace: str
    """Of the driver."""

    node_name: str

    image: str

    image_pull_policy: str = "IfNotPresent"

    image_pull_secrets: tuple[str, ...] = ()

    priority_class: str = "system-node-critical"
    """A job must not lose its mount to a pod that is less important; empty for none.

    Where the cluster does not allow it, pods start without.
    """

    resources: dict[str, dict[str, str]] = field(default_factory=dict)
    """`requests` and `limits` as in a container; none by default, so that a full node admits the
    pod."""

    owner: dict[str, Any] | None = None
    """Owner reference to the driver's DaemonSet; None where the driver has no owner."""


class PodLauncher:
    """Supervisors as pods. Any thread may call it."""

    owner_uid = UNPRIVILEGED_UID
    serves_node_directories = False

    def __init__(self, options: MountPodOptions, core: client.CoreV1Api) -> None:
        self._options = options
        # The client's annotations call every field of an answer optional.
        self._core: Any = core
        self._stream: Any = watch.Watch
        self._priority_class = options.priority_class
        self.changed = threading.Event()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="mount-pods", daemon=True)
        self._watcher.start()

    def ensure(self, folder: DaemonFolder) -> None:
        ended = []
        for pod in self._pods(folder):
            if pod.metadata.deletion_timestamp is None and not _has_ended(pod):
                return
            if pod.metadata.deletion_timestamp is None:
                ended.append(pod)
        self._create(folder)
        for pod in ended:
            logger.warning(
                "a mount pod ended and was replaced",
                extra={"pod": pod.metadata.name, "reason": _state(pod)},
            )
            self._delete(pod.metadata.name)

    def is_running(self, folder: DaemonFolder) -> bool:
        # One that is being deleted may still serve.
        return any(not _has_ended(pod) for pod in self._pods(folder))

    def stop(self, folder: DaemonFolder, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while True:
            pods = self._pods(folder)
            for pod in pods:
                if pod.metadata.deletion_timestamp is None:
                    self._delete(pod.metadata.name)
            if all(_has_ended(pod) for pod in pods):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def describe(self, folder: DaemonFolder) -> str:
        pods = self._pods(folder)
        if not pods:
            return "its mount pod is gone"
        newest = max(pods, key=lambda pod: pod.metadata.creation_timestamp)
        return f"mount pod {self._options.namespace}/{newest.metadata.name} is {_state(newest)}"

    def close(self) -> None:
        self._closed.set()

    def _pods(self, folder: DaemonFolder) -> list[Any]:
        selector = f"{DAEMON_LABEL}={folder.daemon_id},{NODE_LABEL}={self._node_label}"
        try:
            found = self._core.list_namespaced_pod(
                self._options.namespace,
                label_selector=selector,
                _request_timeout=REQUEST_TIMEOUT_SECONDS,
            )
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            raise _unavailable("list mount pods", error) from error
        pods: list[Any] = found.items
        return pods

    @property
    def _node_label(self) -> str:
        return node_label(self._options.node_name)

    def _create(self, folder: DaemonFolder) -> None:
        try:
            self._post(folder)
        except ApiException as error:
            if error.status != 403 or not self._priority_class:
                raise _unavailable("create a mount pod", error) from error
            logger.warning(
                "mount pods start without a priority class",
                extra={"priority_class": self._priority_class, "reason": _message(error)},
            )
            self._priority_class = ""
            self._create(folder)
        except urllib3.exceptions.HTTPError as error:
            raise _unavailable("create a mount pod", error) from error

    def _post(self, folder: DaemonFolder) -> None:
        pod = mount_pod(self._options, folder, priority_class=self._priority_class)
        created = self._core.create_namespaced_pod(
            self._options.namespace, pod, _request_timeout=REQUEST_TIMEOUT_SECONDS
        )
        logger.info(
            "mount pod created", extra={"daemon": folder.daemon_id, "pod": created.metadata.name}
        )

    def _delete(self, name: str) -> None:
        try:
            self._core.delete_namespaced_pod(
                name, self._options.namespace, _request_timeout=REQUEST_TIMEOUT_SECONDS
            )
        except ApiException as error:
            if error.status != 404:
                raise _unavailable("delete a mount pod", error) from error
        except urllib3.exceptions.HTTPError as error:
            raise _unavailable("delete a mount pod", error) from error

    def _watch(self) -> None:
        """Wake the daemons' thread for every pod of ours that goes or ends."""
        while not self._closed.is_set():
            stream = self._stream()
            try:
                for event in stream.stream(
                    self._core.list_namespaced_pod,
                    self._options.namespace,
                    label_selector=f"{NODE_LABEL}={self._node_label}",
                    timeout_seconds=WATCH_SECONDS,
                    _request_timeout=(REQUEST_TIMEOUT_SECONDS, WATCH_SECONDS + 60),
                ):
                    pod = event["object"]
                    going = pod.metadata.deletion_timestamp is not None or _has_ended(pod)
                    if event["type"] == "DELETED" or going:
                        self.changed.set()
            except (ApiException, urllib3.exceptions.HTTPError) as error:
                logger.info("the watch of mount pods broke", extra={"reason": _message(error)})
            except Exception:
                logger.exception("the watch of mount pods failed")
            # A change may have been missed.
            self.changed.set()
            self._closed.wait(1.0)


def connect() -> client.CoreV1Api:
    """The API server, as the pod's service account or by KUBECONFIG.

    Raises:
        ConnectionError: neither is there.
    """
    # The client's own `load_config` asks in the other order, and prints.
    in_cluster: Any = config.load_incluster_config
    by_file: Any = config.load_kube_config
    try:
        in_cluster()
    except ConfigException:
        file = os.environ.get("KUBECONFIG") or "~/.kube/config"
        try:
            by_file(config_file=file)
        except Exception as error:
            # Whatever a malformed file makes the client stumble over: it checks little itself.
            problem = " ".join(str(error).split()) or type(error).__name__
            raise ConnectionError(
                f"no way to the API server: not in a pod, and kubeconfig {file}: {problem}"
            ) from error
    return client.CoreV1Api()


def owner_of(core: client.CoreV1Api, namespace: str, pod_name: str) -> dict[str, Any] | None:
    """An owner reference to the controller of a pod: the driver's DaemonSet for the driver's pod.

    Raises:
        ConnectionError: the pod cannot be read.
    """
    try:
        pod: Any = core.read_namespaced_pod(
            pod_name, namespace, _request_timeout=REQUEST_TIMEOUT_SECONDS
        )
    except (ApiException, urllib3.exceptions.HTTPError) as error:
        reason = _message(error)
        raise ConnectionError(f"cannot read the pod {namespace}/{pod_name}: {reason}") from error
    for owner in pod.metadata.owner_references or []:
        if owner.controller:
            # Not as their controller: the DaemonSet would count mount pods as its own.
            return {
                "apiVersion": owner.api_version,
                "kind": owner.kind,
                "name": owner.name,
                "uid": owner.uid,
            }
    return None


def node_label(node_name: str) -> str:
    """A node's name as a label value; names may be longer than labels."""
    return node_name[:_NODE_LABEL_MAX].rstrip("-.")


def mount_pod(
    options: MountPodOptions, folder: DaemonFolder, *, priority_class: str
) -> dict[str, Any]:
    """The pod that serves the mount of `folder`. It holds no credential and needs no privilege.

    Only the daemon's own `serve` folder is shown to it, at the path that it has on the node, never
    the mount: a daemon that held its own mount could not let go of it.
    """
    serve_path = str(folder.serve_path)
    spec: dict[str, Any] = {
        # Straight to the node: a scheduler that finds no room would leave the job's pod waiting.
        "nodeName": options.node_name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "tolerations": [{"operator": "Exists"}],
        "securityContext": {
            "runAsUser": UNPRIVILEGED_UID,
            "runAsGroup": UNPRIVILEGED_UID,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "mount",
                "image": options.image,
                "imagePullPolicy": options.image_pull_policy,
                "command": ["python", *serve_command(folder)],
                "env": [
                    {"name": "HOME", "value": _SCRATCH},
                    {"name": "PYTHONUNBUFFERED", "value": "1"},
                ],
                "resources": options.resources,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [
                    {"name": "serve", "mountPath": serve_path},
                    {"name": "tmp", "mountPath": _SCRATCH},
                ],
            }
        ],
        "volumes": [
            {"name": "serve", "hostPath": {"path": serve_path, "type": "Directory"}},
            {"name": "tmp", "emptyDir": {}},
        ],
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
    }
    if priority_class:
        spec["priorityClassName"] = priority_class
    metadata: dict[str, Any] = {
        "generateName": f"mount-{folder.daemon_id[:8]}-",
        "labels": {
            "app.kubernetes.io/name": "trainmount",
            "app.kubernetes.io/component": "mount",
            DAEMON_LABEL: folder.daemon_id,
            NODE_LABEL: node_label(options.node_name),
        },
    }
    if options.owner is not None:
        metadata["ownerReferences"] = [options.owner]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _has_ended(pod: Any) -> bool:
    return pod.status.phase in ("Succeeded", "Failed")


def _state(pod: Any) -> str:
    """Phase and reason of a pod, with the container's where there is one."""
    words = [pod.status.phase or "Unknown", pod.status.reason, pod.status.message]
    for status in pod.status.container_statuses or []:
        for state in (status.state.waiting, status.state.terminated):
            if state is not None:
                words += [state.reason, state.message]
                if getattr(state, "exit_code", None) is not None:
                    words.append(f"exit code {state.exit_code}")
    return ", ".join(word.strip() for word in words if word)


def _message(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}"
    return type(error).__name__


def _unavailable(what: str, error: Exception) -> Unavailable:
    return Unavailable(f"cannot {what} (API server: {_message(error)})")
