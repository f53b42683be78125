"""What a person reads when a volume or an object keeps a pod from starting."""

from __future__ import annotations

import pytest

from trainmount_operator.facts import JobFact, PodFact
from trainmount_operator.judge import find_hold

SET_UP = "FailedMount: MountVolume.SetUp failed for volume"
MOUNT_PROBLEMS = [
    (
        f'{SET_UP} "volume-0" : rpc error: code = NotFound desc = /Volumes/main/default/data: no',
        "VolumeUnavailable",
        "/Volumes/main/default/data: no",
    ),
    (
        f'{SET_UP} "volume-0" : fetching failed: secrets "databricks" not found',
        "VolumeUnavailable",
        'volume /Volumes/main/default/data: fetching failed: secrets "databricks" not found',
    ),
    (
        f'{SET_UP} "code" : configmap "nothing" not found',
        "ConfigurationMissing",
        'configmap "nothing" not found',
    ),
    (
        f'{SET_UP} "volume-7" : what is this',
        "VolumeUnavailable",
        "what is this",
    ),
    ("FailedMount: of another form", "VolumeUnavailable", "FailedMount: of another form"),
]


@pytest.mark.parametrize(("warning", "reason", "message"), MOUNT_PROBLEMS)
def test_a_mount_that_fails_is_named_with_the_volume_and_the_cause(
    warning: str, reason: str, message: str
) -> None:
    pod = PodFact(
        name="p", uid="p", owner_uid="u", attempt=0, node_rank=1, node_name="n1", warning=warning
    )
    job = JobFact(name="j", uid="j", owner_uid="u", attempt=0)
    paths = ["/Volumes/main/default/data"]
    hold = find_hold([pod], job, num_nodes=1, volume_paths=paths)
    assert hold is not None
    assert (hold.reason, hold.message) == (reason, f"node 1 (on n1): {message}")
