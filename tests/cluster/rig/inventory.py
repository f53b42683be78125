"""What there is in a cluster and on its nodes, to compare before and after."""

from __future__ import annotations

from rig.kubectl import Kubectl
from rig.under_test import ClusterUnderTest

__all__ = ["cluster_objects", "mounts", "namespace_objects"]

# Each object as `kind name` or `kind namespace/name`.
_EACH = (
    "{{range .items}}{{.kind}} "
    "{{with .metadata.namespace}}{{.}}/{{end}}{{.metadata.name}}{{println}}{{end}}"
)

# Events stay for an hour whatever they are about; component statuses are no objects.
_IGNORED = ("events", "events.events.k8s.io", "componentstatuses")


def namespace_objects(kubectl: Kubectl, namespace: str) -> set[str]:
    """Every object of every kind in a namespace but its events."""
    return _list(kubectl, "true", "-n", namespace)


def cluster_objects(kubectl: Kubectl) -> set[str]:
    """Every object that is in no namespace."""
    return _list(kubectl, "false")


def _list(kubectl: Kubectl, namespaced: str, *where: str) -> set[str]:
    names = kubectl("api-resources", "--verbs=list", f"--namespaced={namespaced}", "-o", "name")
    kinds = ",".join(name for name in names.split() if name not in _IGNORED)
    return set(kubectl("get", kinds, *where, "-o", f"go-template={_EACH}").splitlines())


def mounts(cluster: ClusterUnderTest) -> list[str]:
    """The volumes that are mounted on the nodes, a line of mountinfo each."""
    return [
        f"{node}: {line}"
        for node in cluster.nodes()
        for line in cluster.on_node(node, "cat", "/proc/1/mountinfo").splitlines()
        # Other folders belong to the machine that a node of processes shares.
        if " - fuse.trainmount " in line and " /var/lib/kubelet/" in line
    ]
