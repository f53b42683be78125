"""The chart on a real cluster: it comes up, and uninstalling leaves the kind alone."""

from __future__ import annotations

from functools import partial

from rig.kubectl import Kubectl
from rig.under_test import ClusterUnderTest
from rig.waiting import wait_for

DRIVER = "csi.trainmount.dev"


def test_operator_and_driver_run_on_an_installed_chart(
    cluster: ClusterUnderTest, kubectl: Kubectl, installed: str
) -> None:
    for deployment in kubectl.items("-n", installed, "get", "deployments"):
        assert deployment["status"]["readyReplicas"] == deployment["spec"]["replicas"]
    [driver] = kubectl.items("-n", installed, "get", "daemonsets")
    assert driver["status"]["numberReady"] == len(cluster.nodes())
    assert kubectl("get", "crd", "trainingjobs.trainmount.dev")


def test_the_driver_registers_itself_with_each_kubelet(
    cluster: ClusterUnderTest, kubectl: Kubectl, installed: str
) -> None:
    def is_registered(node: str) -> bool:
        drivers = kubectl.json("get", "csinode", node)["spec"]["drivers"] or []
        return any(driver["name"] == DRIVER for driver in drivers)

    for node in cluster.nodes():
        wait_for(f"the driver on {node}", partial(is_registered, node))
