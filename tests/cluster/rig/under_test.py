"""The cluster that the tests use: a rig of their own, one that runs already, or a user's.

`conftest.py` makes one for a session. Which one it is only matters to tests that kill a node: a
user's cluster can do that when its nodes are containers, as kind's are.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from rig.cluster import Rig
from rig.errors import RigError
from rig.images import project_image, runtime_image
from rig.kubectl import Kubectl
from rig.locations import RIGS, Progress, cache_folder
from rig.waiting import wait_for

__all__ = ["GPU", "GPUS_PER_NODE", "ClusterUnderTest"]

GPU = "nvidia.com/gpu"
GPUS_PER_NODE = 4


class ClusterUnderTest:
    """A running cluster with the project's images on its nodes and GPUs to ask for."""

    def __init__(self, kubeconfig: Path, *, rig: Rig | None) -> None:
        self.kubeconfig = kubeconfig
        self.rig = rig
        self.kubectl = rig.kubectl if rig else Kubectl(["kubectl"], kubeconfig)
        self.project_image = project_image()
        self.runtime_image = runtime_image()

    @classmethod
    def attach(cls, kubeconfig: Path, progress: Progress) -> ClusterUnderTest:
        """Use a cluster that runs already.

        A rig gets the code as it is now. A user's cluster has been given the images; its nodes get
        GPUs in name if they have none.
        """
        if kubeconfig.is_relative_to(RIGS):
            rig = Rig(kubeconfig.parent.name)
            rig.load_images(progress=progress)
            return cls(kubeconfig, rig=rig)
        cluster = cls(kubeconfig, rig=None)
        for node in cluster.nodes():
            cluster._announce_gpus(node)
        return cluster

    def _announce_gpus(self, node: str) -> None:
        # The kubelet keeps a resource that it does not manage.
        if GPU not in self.kubectl.json("get", "node", node)["status"]["allocatable"]:
            gpus = {GPU: str(GPUS_PER_NODE)}
            patch = json.dumps({"status": {"capacity": gpus, "allocatable": gpus}})
            self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)

    def nodes(self) -> list[str]:
        """Names of the nodes that take pods, sorted."""
        nodes = self.kubectl.items("get", "nodes")
        return sorted(
            node["metadata"]["name"]
            for node in nodes
            if not any(taint["effect"] == "NoSchedule" for taint in node["spec"].get("taints", []))
        )

    def is_ready(self, node: str) -> bool:
        """Whether the API server believes that the node is Ready."""
        conditions = self.kubectl.json("get", "node", node)["status"]["conditions"]
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def kill_node(self, node: str) -> None:
        """Cut the node's power: `kill -9` of its first process."""
        if self.rig:
            self.rig.kill_node(node)
        else:
            self._docker("kill", node)

    def start_node(self, node: str, *, timeout_seconds: float = 180) -> None:
        """Start a killed node on its old disk and wait until it is Ready."""
        if self.rig:
            self.rig.start_node(node)
            self.rig.wait_ready(timeout_seconds=timeout_seconds)
        else:
            self._docker("start", node)
            what = f"{node} to be Ready"
            wait_for(what, lambda: self.is_ready(node), timeout_seconds=timeout_seconds)

    def on_node(self, node: str, *command: str) -> str:
        """Run a command among the processes of a node, as root; returns what it prints.

        Raises:
            RigError: its status is not 0.
        """
        if self.rig:
            return _run(self.rig.machine(node).inside(*command), f"{command[0]} on {node}")
        return self._docker("exec", node, *command)

    def _docker(self, verb: str, node: str, *command: str) -> str:
        if shutil.which("docker") is None:
            raise RigError(f"cannot {verb} {node}: it is no node of a rig, and docker is missing")
        return _run(["docker", verb, node, *command], f"{verb} {node}")

    def report(self, name: str) -> str:
        """What a person wants to see after a failure; the logs are copied, the text says where."""
        sections = [
            self.kubectl.run("get", "nodes,pods", "-A", "-o", "wide").stdout,
            self.kubectl.run("get", "events", "-A", "--sort-by=.lastTimestamp").stdout[-6000:],
        ]
        if self.rig:
            sections.append(f"logs: {self.rig.keep_logs(name)}")
        else:
            folder = cache_folder() / "logs" / name
            dump = ("cluster-info", "dump", "-A", f"--output-directory={folder}")
            self.kubectl.run(*dump)
            sections.append(f"logs: {folder}")
        return "\n".join(sections)


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RigError(f"cannot {what}: {done.stderr.strip()}")
    return done.stdout
