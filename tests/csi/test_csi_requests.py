"""What a publish request must hold, what it means, and what of it may be logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmount_csi.errors import InvalidArgument
from trainmount_csi.publication import Publication
from trainmount_csi.redaction import log_safe
from trainmount_csi.wire import csi_pb2

Mode = csi_pb2.VolumeCapability.AccessMode
SECRETS = {"DATABRICKS_HOST": "https://h/", "DATABRICKS_TOKEN": "dapi-secret"}


def capability(
    mode: int = Mode.MULTI_NODE_MULTI_WRITER, flags: tuple[str, ...] = (), group: str = ""
) -> csi_pb2.VolumeCapability:
    return csi_pb2.VolumeCapability(
        mount=csi_pb2.VolumeCapability.MountVolume(mount_flags=flags, volume_mount_group=group),
        access_mode=Mode(mode=mode),
    )


def request(tmp_path: Path, **changes: object) -> csi_pb2.NodePublishVolumeRequest:
    values: dict[str, object] = {
        "volume_id": "v",
        "target_path": str(tmp_path / "mount"),
        "volume_capability": capability(),
        "volume_context": {"source": "/Volumes/a/b/c"},
        "secrets": SECRETS,
    }
    return csi_pb2.NodePublishVolumeRequest(**{**values, **changes})


def test_a_whole_request_is_understood(tmp_path: Path) -> None:
    publication = Publication.parse(request(tmp_path))
    assert publication.context.source == "/Volumes/a/b/c"
    assert publication.credentials.host == "https://h"
    assert not publication.read_only


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"volume_id": ""}, "volume_id must be set"),
        ({"target_path": ""}, "target_path must be set"),
        ({"volume_capability": None}, "volume_capability must be set"),
        ({"volume_context": {}}, "must have the key source"),
        ({"secrets": {}}, "nodePublishSecretRef.*DATABRICKS_HOST"),
        ({"secrets": {"DATABRICKS_HOST": "https://h"}}, "nodePublishSecretRef.*DATABRICKS_TOKEN"),
        (
            {"volume_capability": csi_pb2.VolumeCapability(access_mode=Mode(mode=1))},
            "must have an access type",
        ),
        (
            {
                "volume_capability": csi_pb2.VolumeCapability(
                    block=csi_pb2.VolumeCapability.BlockVolume(), access_mode=Mode(mode=1)
                )
            },
            "volumeMode must be Filesystem",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Publication.parse(request(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"readonly": True},
        {"volume_capability": capability(flags=("ro",))},
        {"volume_capability": capability(mode=Mode.MULTI_NODE_READER_ONLY)},
        {"volume_context": {"source": "/Volumes/a/b/c", "readOnly": "true"}},
    ],
    ids=["pod", "mountOptions", "access mode", "attribute"],
)
def test_read_only_can_be_said_in_four_places(tmp_path: Path, changes: dict[str, object]) -> None:
    publication = Publication.parse(request(tmp_path, **changes))
    assert publication.read_only
    # A read-write pod on the same volume still shares the daemon.
    assert publication.spec.daemon_id == Publication.parse(request(tmp_path)).spec.daemon_id


def test_a_directory_of_the_node_needs_no_secret(tmp_path: Path) -> None:
    changes: dict[str, object] = {"volume_context": {"source": "file:///srv"}, "secrets": {}}
    assert Publication.parse(request(tmp_path, **changes)).credentials.token is None


def test_a_logged_request_has_no_secret_in_it(tmp_path: Path) -> None:
    text = log_safe(
        request(
            tmp_path,
            volume_capability=capability(flags=("password=hunter2",)),
            volume_context={
                "source": "/Volumes/a/b/c",
                "csi.storage.k8s.io/serviceAccount.tokens": '{"x":{"token":"eyJ-token"}}',
            },
        )
    )
    for secret in ("dapi-secret", "hunter2", "eyJ-token"):
        assert secret not in text
    assert "DATABRICKS_TOKEN" in text
    assert "/Volumes/a/b/c" in text
    assert "\n" not in text


def test_redaction_leaves_the_request_itself_alone(tmp_path: Path) -> None:
    whole = request(tmp_path)
    log_safe(whole)
    assert whole.secrets["DATABRICKS_TOKEN"] == "dapi-secret"
