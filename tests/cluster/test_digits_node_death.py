"""A node dies under a job: it goes on where there is room, also with other processes than before.

The node dies once for all tests here. What the job had written by then is copied, so that each grid
goes on from the same state.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from rig.digits import GATE_STEP, Digits, DigitsJob
from rig.inventory import mounts
from rig.kubectl import Kubectl
from rig.under_test import ClusterUnderTest
from rig.waiting import wait_for

GRIDS = {"one-node": (4, 4), "two-by-one": (2, 1)}
"""Accelerators of the whole job and of each node."""

DAMAGE_STEP = 10
CHECKPOINT = 8
"""The newest checkpoint by then."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """A job that lost a node, and what became of it."""

    job: DigitsJob
    status: dict[str, Any]
    survivor: str
    nodes_after: list[str]
    """Where the second attempt ran."""


@pytest.fixture(scope="module")
def death(cluster: ClusterUnderTest, kubectl: Kubectl, installed: str, digits: Digits) -> Death:
    """The node without the Files API is killed while it trains, with the operator on it."""
    survivor, victim = cluster.nodes()[:2]
    move_operator(kubectl, installed, away_from=survivor)
    job = digits.run("node-killed", gate_step=GATE_STEP)
    job.wait_step(DAMAGE_STEP)
    assert set(job.nodes(0)) == {survivor, victim}
    cluster.kill_node(victim)
    try:
        wait_for(f"{victim} to be seen as dead", lambda: not cluster.is_ready(victim))
        # The other half of the job waits for the dead one and writes nothing meanwhile.
        for name in GRIDS:
            folder = job.output.removesuffix(job.name)
            digits.in_server("cp", "-r", job.output, f"{folder}{name}")
        job.open_gate()
        status = job.wait_succeeded()
        nodes_after = job.nodes(1)
    finally:
        cluster.start_node(victim)
    return Death(job=job, status=status, survivor=survivor, nodes_after=nodes_after)


def move_operator(kubectl: Kubectl, namespace: str, *, away_from: str) -> None:
    """Have the operator's pod on another node than this one."""
    selector = "app.kubernetes.io/component=operator"
    [pod] = kubectl.items("-n", namespace, "get", "pods", "-l", selector)
    if pod["spec"]["nodeName"] != away_from:
        return
    kubectl("cordon", away_from)
    try:
        kubectl("-n", namespace, "delete", "pod", pod["metadata"]["name"])
        status = ("rollout", "status", "deployment", "-l", selector, "--timeout=120s")
        kubectl("-n", namespace, *status, timeout_seconds=140)
    finally:
        kubectl("uncordon", away_from)


def test_a_job_whose_node_dies_goes_on_where_there_is_room_and_spends_no_retry(
    cluster: ClusterUnderTest, digits: Digits, death: Death, undisturbed_weights: str
) -> None:
    job = death.job
    assert job.outcomes() == [("Interrupted", "NodeLost"), ("Succeeded", "Completed")]
    assert (death.status["retries"], death.status["interruptions"]) == (0, 1)
    assert death.nodes_after == [death.survivor] * 2
    assert f"attempt 1: resumed at step {CHECKPOINT}" in job.log(1)
    assert "the node is gone; no retry spent" in digits("describe", "tj", job.name)
    assert job.weights() == undisturbed_weights


@pytest.mark.parametrize("name", GRIDS)
def test_another_grid_goes_on_from_the_state_at_the_death_and_repeats_no_sample(
    cluster: ClusterUnderTest, digits: Digits, death: Death, undisturbed_weights: str, name: str
) -> None:
    accelerators, per_node = GRIDS[name]
    compute = {"numAccelerators": accelerators, "acceleratorsPerNode": per_node}
    job = digits.run(name, compute=compute)
    job.wait_succeeded()
    assert len(job.pods(0)) == accelerators // per_node
    assert f"attempt 0: resumed at step {CHECKPOINT}" in job.log(0)
    result = json.loads(digits.in_server("cat", f"{job.output}/result.json"))
    assert result["world_size"] == accelerators
    weights = job.weights()
    # Four processes are the same four wherever they run.
    assert accelerators != 4 or weights == undisturbed_weights


def test_the_node_that_comes_back_keeps_no_mount_of_the_job_it_lost(
    cluster: ClusterUnderTest, death: Death
) -> None:
    wait_for(lambda: f"the end of {mounts(cluster)}", lambda: not mounts(cluster))
