"""`python -m trainmount_csi`: the driver's process. Started by the DaemonSet of the chart, or by
hand.

What the container needs, for `--daemons pod`:

- `securityContext: {privileged: true, runAsUser: 0, runAsGroup: 0}`: for mount(2), because only
  privileged containers may have Bidirectional propagation, and because the image's own user is not
  root;
- hostPath `/var/lib/kubelet` at the same path, `mountPropagation: Bidirectional`, and no second
  mount of any folder in it: a copy of a FUSE mount that is seen there keeps that mount from ever
  going away. So the CSI socket is `/var/lib/kubelet/plugins/csi.trainmount.dev/csi.sock`, and the
  registration socket `/var/lib/kubelet/plugins_registry/csi.trainmount.dev-reg.sock`;
- hostPath `/dev` at `/dev`, for `/dev/fuse`;
- environment `NODE_NAME` (fieldRef spec.nodeName), `POD_NAME` (metadata.name), `POD_NAMESPACE`
  (metadata.namespace);
- arguments `--image IMAGE` (its own); the rest has these values as defaults: `--endpoint
  unix:///var/lib/kubelet/plugins/csi.trainmount.dev/csi.sock --node-id $(NODE_NAME) --root
  /var/lib/kubelet/plugins/csi.trainmount.dev --daemons pod --namespace $(POD_NAMESPACE)`;
- a Role in its own namespace: pods `create get list watch delete`. Nothing in other namespaces and
  no Secrets: credentials come with the kubelet's calls. An external-provisioner sidecar needs its
  own ClusterRole;
- DaemonSet selector labels other than the mount pods' `app.kubernetes.io/name: trainmount`,
  `app.kubernetes.io/component: mount`, or the DaemonSet would take those for its own;
- tolerations `operator: Exists`, priorityClassName `system-node-critical`, a grace period of
  30 s. `updateStrategy` RollingUpdate is safe: mounts live on in the mount pods.

The CSIDriver object: `attachRequired: false`, `podInfoOnMount: true`, `fsGroupPolicy: None`,
`volumeLifecycleModes: [Persistent, Ephemeral]`. With `--daemons process` the supervisors are plain
processes beside the plugin; they outlive its process but not its container, and no API server is
asked. `--controller` serves the Controller alone, for a Deployment with an external-provisioner.

Exit codes: 0 after SIGTERM or SIGINT, 1 where the kubelet refused the driver, 2 for wrong arguments
or an environment that lacks something.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainmount_csi.controller import ControllerService
from trainmount_csi.daemons import Daemons
from trainmount_csi.identity import DRIVER_NAME, IdentityService
from trainmount_csi.launchers import Launcher, ProcessLauncher
from trainmount_csi.mounts import LinuxMounter
from trainmount_csi.node import NodeService
from trainmount_csi.registration import RegistrationService
from trainmount_csi.server import EndpointError, Server, socket_path
from trainmount_files.wording import OneLineParser, printable
from trainmount_fuse.logs import configure_logging

__all__ = ["main"]

logger = logging.getLogger(__name__)

DEFAULT_ROOT: Final = f"/var/lib/kubelet/plugins/{DRIVER_NAME}"
DEFAULT_REGISTRATION: Final = f"/var/lib/kubelet/plugins_registry/{DRIVER_NAME}-reg.sock"

_QUANTITY: Final = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")

GRACE_SECONDS: Final = 20.0
"""For calls in progress at the end; the kubelet repeats what is cut off."""

EXIT_REFUSED: Final = 1
EXIT_USAGE: Final = 2


class UsageError(Exception):
    """An argument or the environment lacks something; `str()` is one line for a person."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    options = _parser().parse_args(arguments)
    configure_logging(verbose=options.verbose)
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.getLogger("trainmount_csi").setLevel(level)
    try:
        return _serve(options)
    except (UsageError, EndpointError) as error:
        print(f"trainmount-csi: {printable(str(error))}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="trainmount-csi", description="CSI driver for volumes: csi.trainmount.dev"
    )
    add = parser.add_argument
    add("--endpoint", default=f"unix://{DEFAULT_ROOT}/csi.sock", help="where to serve CSI")
    add(
        "--node-id",
        default=os.environ.get("NODE_NAME") or socket.gethostname(),
        help="name of the node",
    )
    add("--root", type=Path, default=Path(DEFAULT_ROOT), help="folder of mounts, sockets, caches")
    add("--daemons", choices=("pod", "process"), default="pod", help="what serves a mount")
    add("--controller", action="store_true", help="serve the Controller alone, on no node")
    add("--image", default="", help="image of mount pods: the driver's own")
    policies = ("Always", "IfNotPresent", "Never")
    add("--image-pull-policy", choices=policies, default="IfNotPresent", help="of mount pods")
    add("--image-pull-secret", action="append", default=[], help="of mount pods; may be repeated")
    add("--namespace", default=os.environ.get("POD_NAMESPACE", ""), help="namespace of mount pods")
    add("--mount-pod-priority-class", default="system-node-critical", help="empty for none")
    for kind in ("cpu-request", "memory-request", "cpu-limit", "memory-limit"):
        text = "of mount pods; none by default"
        add(f"--mount-pod-{kind}", type=_quantity, default="", help=text)
    add(
        "--registration-socket",
        default="",
        help=f"where the kubelet finds the driver, such as {DEFAULT_REGISTRATION}; "
        "empty where nobody is to find it (default with --daemons process)",
    )
    add("--kubelet-endpoint", default="", help="path of the CSI socket as the kubelet sees it")
    add("--verbose", "-v", action="store_true", help="log every call")
    return parser


def _quantity(text: str) -> str:
    if text and _QUANTITY.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a quantity; write 250m or 256Mi")
    return text


def _serve(options: argparse.Namespace) -> int:
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stopped.set())
    path = socket_path("--endpoint", options.endpoint)
    kubelet_path = path
    if options.kubelet_endpoint:
        kubelet_path = socket_path("--kubelet-endpoint", options.kubelet_endpoint)
    registration_path = _registration_path(options)
    services: dict[str, object] = {"csi.v1.Identity": IdentityService()}
    daemons: Daemons | None = None
    on_node_directories = options.daemons == "process"
    services["csi.v1.Controller"] = ControllerService(allow_node_directory=on_node_directories)
    launcher: Launcher | None = None
    if not options.controller:
        mounter = LinuxMounter()
        launcher = ProcessLauncher() if on_node_directories else _pod_launcher(options)
        _make_root(options.root)
        daemons = Daemons(options.root, launcher, mounter)
        # Before anybody can call: a mount that is not known yet would be made a second time.
        daemons.start()
        services["csi.v1.Node"] = NodeService(options.node_id, daemons, mounter)
    servers = [Server(path, services)]
    refused = None
    if registration_path is not None and not options.controller:
        registration = RegistrationService(kubelet_path)
        refused = registration.refused
        servers.append(Server(registration_path, {"pluginregistration.Registration": registration}))
    try:
        for server in servers:
            server.start()
        logger.info("serving", extra={"endpoint": str(path), "node": options.node_id})
        while not stopped.wait(1.0):
            if refused is not None and refused.is_set():
                return EXIT_REFUSED
        return 0
    finally:
        for server in reversed(servers):
            server.stop(GRACE_SECONDS)
        if daemons is not None:
            daemons.close()
        if launcher is not None:
            launcher.close()


def _registration_path(options: argparse.Namespace) -> Path | None:
    text = options.registration_socket
    if not text:
        text = "" if options.daemons == "process" else DEFAULT_REGISTRATION
    return socket_path("--registration-socket", text) if text else None


def _make_root(root: Path) -> None:
    try:
        root.mkdir(mode=0o711, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--root {root}: {error.strerror}; name a folder that this process may make or write"
        ) from error


def _pod_launcher(options: argparse.Namespace) -> Launcher:
    # Imported late: without mount pods nobody needs the API server's client.
    from trainmount_csi.mount_pods import MountPodOptions, PodLauncher, connect, owner_of

    for name in ("image", "namespace"):
        if not getattr(options, name):
            raise UsageError(f"--{name} must be set with --daemons pod")
    pod_name = os.environ.get("POD_NAME", "")
    try:
        core = connect()
        owner = owner_of(core, options.namespace, pod_name) if pod_name else None
    except ConnectionError as error:
        raise UsageError(f"{error}; --daemons pod needs the API server") from error
    pod_options = MountPodOptions(
        namespace=options.namespace,
        node_name=options.node_id,
        image=options.image,
        image_pull_policy=options.image_pull_policy,
        image_pull_secrets=tuple(options.image_pull_secret),
        priority_class=options.mount_pod_priority_class,
        resources=_resources(options),
        owner=owner,
    )
    return PodLauncher(pod_options, core)


def _resources(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    resources: dict[str, dict[str, str]] = {}
    for kind in ("request", "limit"):
        values = {
            resource: getattr(options, f"mount_pod_{resource}_{kind}")
            for resource in ("cpu", "memory")
        }
        given = {resource: value for resource, value in values.items() if value}
        if given:
            resources[f"{kind}s"] = given
    return resources
