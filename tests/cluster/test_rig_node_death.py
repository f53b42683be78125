"""The cluster itself: a node that loses its power, and comes back with its disk."""

from __future__ import annotations

from rig.kubectl import Kubectl
from rig.manifests import pod
from rig.under_test import ClusterUnderTest
from rig.waiting import wait_for


def test_a_killed_node_is_seen_as_not_ready_and_comes_back(
    cluster: ClusterUnderTest, kubectl: Kubectl, namespace: str
) -> None:
    victim = cluster.nodes()[-1]
    command = ("sh", "-c", "sleep 600")
    kubectl.apply(
        pod("bound", cluster.project_image, *command, nodeName=victim), namespace=namespace
    )
    kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/bound", "--timeout=120s")
    cluster.kill_node(victim)
    try:
        wait_for(f"{victim} to be seen as dead", lambda: not cluster.is_ready(victim))
    finally:
        cluster.start_node(victim)
    assert cluster.is_ready(victim)

    def was_ended() -> bool:
        status = kubectl.json("-n", namespace, "get", "pod", "bound")["status"]
        return bool(status["phase"] == "Failed")

    wait_for("the pod that died with the node to be Failed", was_ended)
    # What starts on the node afterwards runs as before.
    kubectl.apply(pod("after", cluster.project_image, "true", nodeName=victim), namespace=namespace)
    done = "--for=jsonpath={.status.phase}=Succeeded"
    kubectl("-n", namespace, "wait", done, "pod/after", "--timeout=120s")
