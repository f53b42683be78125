"""A node: containerd, kubelet, kube-proxy and device plugin in a machine with its own disk.

The disk survives the machine's death, /run does not, as on a real one. Paths are those of a real
node, so that what a chart mounts from its host is what it expects; nothing is written outside of
the rig's folder.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rig.addresses import (
    API_PORT,
    CONTROL_PLANE,
    DNS_SERVICE,
    PODS,
    node_address,
    node_name,
    pods_of,
)
from rig.binaries import Binaries
from rig.cgroups import create_groups, mounts_of
from rig.images import HOST_PACKAGES_PATH, PAUSE_IMAGE
from rig.locations import HERE
from rig.machine import Machine, start_machine
from rig.network import PRELUDE, connect_node
from rig.python_files import host_site_packages

__all__ = [
    "NodeSettings",
    "boot_id",
    "images_are_imported",
    "import_command",
    "start_node",
    "write_container_spec",
]

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"

_KERNEL_SETTINGS = {
    # What the kubelet would set for the whole machine: it finds these files instead and is content.
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}

_BOOT_ID = "kernel/random/boot_id"

_SCRIPT = """
{prelude}
export PATH="{binaries}:$PATH"
{mounts}
mount -t tmpfs -o mode=755 run /run
mount --make-rshared /
containerd --config {home}/containerd.toml >> {home}/containerd.log 2>&1 &
import_images() {{
  [ -e {home}/imported-"$(basename "$1")" ] && return
  {import_command} "$1" >> {home}/images.log 2>&1
  touch {home}/imported-"$(basename "$1")"
}}
until ctr --address {socket} version > {home}/ctr.log 2>&1; do sleep 0.1; done
import_images {system_images}
until (: > /dev/tcp/{api}) 2> {home}/api.log; do sleep 0.2; done
{proxy} >> {home}/kube-proxy.log 2>&1 &
{kubelet} >> {home}/kubelet.log 2>&1 &
{device_plugin} >> {home}/device-plugin.log 2>&1 &
import_images {project_images}
wait
"""

_CONTAINERD = """\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{socket}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.runtime']
  # Lowering the score needs CAP_SYS_RESOURCE, which a container that runs the tests may lack.
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{container_spec}"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{binaries}/cni"]
    conf_dir = "{home}/cni"
"""


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What all nodes of a rig have in common."""

    rig: str
    root: Path
    """The rig's folder."""

    binaries: Binaries
    images: tuple[Path, ...]
    """Archives to import: the first before the node becomes ready, the second after."""

    num_nodes: int
    gpus_per_node: int


def write_container_spec(path: Path, binaries: Binaries) -> None:
    """Write the specification from which containerd makes every container: its own default and
    torch.

    torch and its libraries take 5 GB; mounted, they cost no import and no disk, and manifests stay
    as they are for a cluster whose images have it.
    """
    done = subprocess.run(
        [binaries.folder / "ctr", "oci", "spec"], capture_output=True, text=True, check=True
    )
    spec: dict[str, Any] = json.loads(done.stdout)
    spec["mounts"].append(
        {
            "destination": HOST_PACKAGES_PATH,
            "type": "bind",
            "source": str(host_site_packages()),
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }
    )
    path.write_text(json.dumps(spec))


def start_node(settings: NodeSettings, control_plane: Machine, number: int) -> Machine:
    """Start a node, on the disk that it had before if it had one. It is not ready yet on return."""
    name = node_name(number)
    home = settings.root / name
    home.mkdir(exist_ok=True)
    # The script mounts the machine's groups, so they must exist before it.
    groups = create_groups(settings.rig, name)
    script = home / "start.sh"
    script.write_text(_script(settings, home, number, groups))
    _write_configuration(settings, home, number)
    machine = start_machine(settings.rig, name, home, script)
    connect_node(control_plane, machine, number, num_nodes=settings.num_nodes)
    (home / "network-ready").touch()
    return machine


def boot_id(settings: NodeSettings, number: int) -> str:
    """What the node's status shows when the kubelet of its last start has reported."""
    file = settings.root / node_name(number) / "kernel" / _BOOT_ID.replace("/", ".")
    return file.read_text().strip()


def images_are_imported(settings: NodeSettings, number: int) -> bool:
    """Whether the node has all images."""
    home = settings.root / node_name(number)
    return all((home / f"imported-{archive.name}").exists() for archive in settings.images)


def import_command(archive: Path) -> list[str]:
    """The command line, run inside a node, that gives it the images of an archive."""
    client = ["ctr", "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io"]
    return [*client, "images", "import", "--local", str(archive)]


def _script(settings: NodeSettings, home: Path, number: int, groups: list[Path]) -> str:
    kube, name = settings.binaries.kube, node_name(number)
    system_images, project_images = settings.images
    pki = settings.root / "pki"
    kubelet = [kube, "kubelet", f"--config={home}/kubelet.json", f"--hostname-override={name}"]
    kubelet += [f"--kubeconfig={pki}/{name}.kubeconfig", f"--node-ip={node_address(number)}"]
    proxy = [kube, "proxy", f"--config={home}/proxy.json", f"--hostname-override={name}"]
    plugin = [sys.executable, str(HERE / "device_plugin.py"), str(settings.gpus_per_node)]
    return _SCRIPT.format(
        prelude=PRELUDE.format(home=home, hostname=name),
        binaries=settings.binaries.folder,
        mounts="\n".join([*_group_mounts(groups), *_disk_mounts(home), *_kernel_mounts(home)]),
        home=home,
        socket=CONTAINERD_SOCKET,
        import_command=shlex.join(import_command(Path())[:-1]),
        api=f"{CONTROL_PLANE}/{API_PORT}",
        system_images=system_images,
        project_images=project_images,
        proxy=shlex.join(proxy),
        kubelet=shlex.join(kubelet),
        device_plugin=shlex.join(plugin),
    )


def _group_mounts(groups: list[Path]) -> list[str]:
    """The machine's groups where it looks for the roots of the hierarchies."""
    lines = []
    for group, mount_point in mounts_of(groups):
        lines.append(f"mount --bind {group} {mount_point}")
        if (group / "cgroup.subtree_control").exists():
            # Version 2: the processes step aside, so that controllers can be handed on.
            lines.append(
                f"mkdir -p {mount_point}/system; echo 0 > {mount_point}/system/cgroup.procs"
            )
            enable = f"echo +$controller > {mount_point}/cgroup.subtree_control || true"
            names = f"$(cat {mount_point}/cgroup.controllers)"
            lines.append(f"for controller in {names}; do {enable}; done")
    return lines


def _disk_mounts(home: Path) -> list[str]:
    """A disk of the node's own over the host's /var/lib and /var/log."""
    disk = home / "disk"
    lines = []
    for folder in ("/var/lib", "/var/log"):
        own = disk / folder.replace("/", "-")[1:]
        for part in ("upper", "work"):
            (own / part).mkdir(parents=True, exist_ok=True)
        options = f"lowerdir={folder},upperdir={own}/upper,workdir={own}/work"
        lines.append(f"mount -t overlay -o {options} overlay {folder}")
    # An overlay can't lie on an overlay: containerd needs a plain folder.
    for name in ("kubelet", "containerd"):
        (disk / name).mkdir(exist_ok=True)
        lines.append(f"mkdir -p /var/lib/{name}; mount --bind {disk / name} /var/lib/{name}")
    return lines


def _kernel_mounts(home: Path) -> list[str]:
    folder = home / "kernel"
    folder.mkdir(exist_ok=True)
    lines = []
    # A start is a boot of its own, by which the kubelet tells that the node was down.
    for name, value in {**_KERNEL_SETTINGS, _BOOT_ID: uuid.uuid4()}.items():
        file = folder / name.replace("/", ".")
        file.write_text(f"{value}\n")
        lines.append(f"mount --bind {file} /proc/sys/{name}")
    return lines


def _write_configuration(settings: NodeSettings, home: Path, number: int) -> None:
    (home / "containerd.toml").write_text(
        _CONTAINERD.format(
            socket=CONTAINERD_SOCKET,
            pause=PAUSE_IMAGE,
            container_spec=settings.root / "container-spec.json",
            binaries=settings.binaries.folder,
            home=home,
        )
    )
    (home / "cni").mkdir(exist_ok=True)
    (home / "cni" / "10-bridge.conflist").write_text(json.dumps(_pod_network(number)))
    (home / "resolv.conf").write_text("")  # no name server but the cluster's own
    (home / "kubelet.json").write_text(json.dumps(_kubelet(settings, home, number)))
    (home / "proxy.json").write_text(json.dumps(_proxy(settings.root / "pki")))


def _pod_network(number: int) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": "/run/cni-addresses",  # pods do not survive the node, nor do their addresses
        "ranges": [[{"subnet": pods_of(number)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipam": addresses}
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {**bridge, "ipMasq": False, "hairpinMode": True},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _kubelet(settings: NodeSettings, home: Path, number: int) -> dict[str, Any]:
    pki, name = settings.root / "pki", node_name(number)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
            "webhook": {"enabled": True},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/{name}.crt",
        "tlsPrivateKeyFile": f"{pki}/{name}.key",
        "cgroupDriver": "cgroupfs",
        # Pods go directly below the machine's own group.
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{home}/resolv.conf",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "evictionHard": {"memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,  # there is no registry to get an image back from
        "serializeImagePulls": False,
        "maxPods": 200,
        # Heartbeats and answers to a dead node faster than a real cluster's.
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 8,
    }


def _proxy(pki: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": f"{pki}/proxy.kubeconfig"},
        "clusterCIDR": PODS,
        "oomScoreAdj": 0,
        # Zero leaves the kernel's settings as they are.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }
