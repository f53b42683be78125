"""The chart is uninstalled: what stays. The last file, because no other test has the chart then."""

from __future__ import annotations

import helm_python
import yaml
from rig.digits import EXAMPLE
from rig.inventory import cluster_objects, mounts, namespace_objects
from rig.kubectl import Kubectl
from rig.under_test import ClusterUnderTest
from rig.waiting import wait_for

KIND = {
    "CustomResourceDefinition trainingjobs.trainmount.dev",
    # The API server keeps one for the group of each kind, by itself.
    "APIService v1alpha1.trainmount.dev",
}
OWN_OF_A_NAMESPACE = ("ServiceAccount {}/default", "ConfigMap {}/kube-root-ca.crt")


def test_uninstalling_leaves_only_the_kind_and_its_objects(
    cluster: ClusterUnderTest,
    kubectl: Kubectl,
    helm: helm_python.Config,
    before_installation: set[str],
    installed: str,
    namespace: str,
) -> None:
    documents = list(yaml.safe_load_all((EXAMPLE / "trainingjob.yaml").read_text()))
    for document in documents:
        if document["kind"] == "TrainingJob":
            document["spec"]["suspend"] = True
    kubectl.apply(documents, namespace=namespace)
    condition = "--for=condition=Suspended"
    kubectl("-n", namespace, "wait", condition, "tj/digits", "--timeout=120s", timeout_seconds=140)
    helm.uninstall("trainmount", wait="watcher", timeout=120)

    own = {text.format(installed) for text in OWN_OF_A_NAMESPACE}

    def left() -> set[str]:
        objects = cluster_objects(kubectl) - before_installation
        # The tests' own namespaces are still there, with addresses of their services.
        objects = {item for item in objects if item.split()[0] not in ("Namespace", "IPAddress")}
        return (objects | namespace_objects(kubectl, installed)) - KIND - own

    wait_for(lambda: f"the end of {left()}", lambda: not left())
    assert mounts(cluster) == []
    assert kubectl("-n", namespace, "get", "tj", "-o", "name").split()
