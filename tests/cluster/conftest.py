"""The cluster of these tests, and the project installed on it.

Without `KUBECONFIG` a session starts a rig of its own, which needs root, and takes it down at its
end. With it, that cluster is used; README.md says what it must have.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from uuid import uuid4

import helm_python
import pytest

HERE = Path(__file__).resolve().parent
# The rig is a package of this folder and of no installation.
sys.path.insert(0, str(HERE))

from rig.cluster import Rig  # noqa: E402
from rig.digits import Digits  # noqa: E402
from rig.inventory import cluster_objects  # noqa: E402
from rig.kubectl import Kubectl  # noqa: E402
from rig.locations import PROJECT, Progress  # noqa: E402
from rig.under_test import GPUS_PER_NODE, ClusterUnderTest  # noqa: E402

NAMESPACE = "trainmount-system"
RELEASE = "trainmount"
TIMEOUT_SECONDS = 1800


@pytest.fixture(scope="session")
def progress(request: pytest.FixtureRequest) -> Progress:
    """Prints a line at once, whatever is captured: building a cluster takes minutes once."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n[cluster] {line}", end="", flush=True)

    return say


@pytest.fixture(scope="session")
def cluster(progress: Progress) -> Iterator[ClusterUnderTest]:
    """A cluster with two nodes or more, GPUs on each, and the project's images."""
    kubeconfig = os.environ.get("KUBECONFIG")
    if kubeconfig:
        yield ClusterUnderTest.attach(Path(kubeconfig), progress)
        return
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root, or KUBECONFIG with a cluster to use")
    rig = Rig.up(
        f"tests-{os.getpid()}",
        gpus_per_node=GPUS_PER_NODE,
        owner_pid=os.getpid(),
        progress=progress,
    )
    try:
        yield ClusterUnderTest(rig.kubeconfig, rig=rig)
    finally:
        rig.down()


@pytest.fixture(scope="session")
def kubectl(cluster: ClusterUnderTest) -> Kubectl:
    """kubectl on the cluster."""
    return cluster.kubectl


@pytest.fixture
def namespace(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own; it and what is in it are gone before the next test."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).removeprefix("test-")
    name = f"{words[:40].strip('-')}-{uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--timeout=180s", timeout_seconds=200)


@pytest.fixture(scope="session")
def helm(cluster: ClusterUnderTest) -> Iterator[helm_python.Config]:
    """Helm on the cluster, with releases in the project's namespace."""
    with helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=NAMESPACE) as config:
        yield config


@pytest.fixture(scope="session")
def before_installation(kubectl: Kubectl) -> set[str]:
    """The objects outside of namespaces that were there before the chart."""
    return cluster_objects(kubectl)


@pytest.fixture(scope="session")
def installed(
    before_installation: set[str], helm: helm_python.Config, progress: Progress
) -> Iterator[str]:
    """The chart, installed and ready; gives its namespace. Uninstalled at the end of the
    session."""
    progress("installing the chart")
    helm.install(
        PROJECT / "charts" / "trainmount",
        RELEASE,
        namespace=NAMESPACE,
        create_namespace=True,
        wait="watcher",
        timeout=180,
    )
    try:
        yield NAMESPACE
    finally:
        helm.uninstall(RELEASE, wait="watcher", timeout=120, ignore_not_found=True)


@pytest.fixture(scope="session")
def digits(cluster: ClusterUnderTest, installed: str) -> Iterator[Digits]:
    """A namespace with the example's Files API and its digits, on the first node."""
    name = f"digits-{uuid4().hex[:6]}"
    yield Digits.create(cluster.kubectl, name, node=cluster.nodes()[0])
    cluster.kubectl("delete", "namespace", name, "--timeout=180s", timeout_seconds=200)


@pytest.fixture(scope="session")
def undisturbed_weights(digits: Digits) -> str:
    """The SHA-256 of the final weights of a short job of the example that nothing happened to."""
    job = digits.run("undisturbed")
    job.wait_succeeded()
    return job.weights()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests here longer than others have: the first one may build the cluster's programs."""
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the cluster's state and the place of its logs into the report of a failed test."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, ClusterUnderTest):
        report.sections.append(("cluster", cluster.report(item.name)))
    return report
