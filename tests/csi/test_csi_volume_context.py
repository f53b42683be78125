"""Attributes, mount options and quantities as a person writes them."""

from __future__ import annotations

import pytest

from trainmount_csi.errors import InvalidArgument
from trainmount_csi.volume_context import MountFlags, VolumeContext, parse_quantity


def test_a_source_is_all_that_is_needed() -> None:
    context = VolumeContext.parse({"source": "dbfs:/Volumes/main/default/data/"})
    assert context == VolumeContext(source="/Volumes/main/default/data")
    assert context.needs_credentials


def test_a_missing_source_is_named() -> None:
    with pytest.raises(InvalidArgument, match="volumeAttributes must have the key source"):
        VolumeContext.parse({})


def test_an_unknown_key_is_named_and_the_known_ones_are_told() -> None:
    with pytest.raises(InvalidArgument, match=r"unknown key 'cachesize'.*cacheSize"):
        VolumeContext.parse({"source": "/Volumes/a/b/c", "cachesize": "1Gi"})


def test_keys_of_kubernetes_itself_are_not_ours_to_refuse() -> None:
    attributes = {
        "source": "/Volumes/a/b/c",
        "csi.storage.k8s.io/pod.name": "p",
        "storage.kubernetes.io/csiProvisionerIdentity": "i",
    }
    assert VolumeContext.parse(attributes).source == "/Volumes/a/b/c"


@pytest.mark.parametrize("source", ["/Volumes/a/b/c/../d", "/Volumes/a/./b/c"])
def test_a_source_must_not_climb(source: str) -> None:
    with pytest.raises(InvalidArgument, match=r"must not contain '\.'"):
        VolumeContext.parse({"source": source})


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("10Gi", 10 << 30), ("5M", 5_000_000), (" 2Ki ", 2048)]
)
def test_a_quantity_is_bytes(text: str, size: int) -> None:
    assert parse_quantity("cacheSize", text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5Gi", "10GB", "ten"])
def test_what_is_no_quantity_is_refused_with_the_key(text: str) -> None:
    with pytest.raises(InvalidArgument, match="cacheSize must be a size"):
        parse_quantity("cacheSize", text)


def test_all_attributes_survive_the_way_through_a_persistent_volume() -> None:
    context = VolumeContext.parse(
        {
            "source": "/Volumes/a/b/c",
            "readOnly": "true",
            "cacheSize": "1Gi",
            "blockSize": "2Mi",
            "memory": "512Mi",
            "metadataTimeout": "3600",
            "negativeTimeout": "0.5",
            "openTimeout": "0",
            "uid": "1000",
            "gid": "2000",
            "fileMode": "0640",
            "directoryMode": "750",
        }
    )
    assert (context.file_mode, context.directory_mode) == (0o640, 0o750)
    assert VolumeContext.parse(context.to_attributes()) == context


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("readOnly", "yes"),
        ("memory", "much"),
        *(("metadataTimeout", text) for text in ("-1", "nan", "1e3", "")),
        ("openTimeout", "soon"),
        ("uid", "root"),
        ("gid", "4294967295"),
        ("fileMode", "rw-"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(key: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"volumeAttributes\.{key} must be"):
        VolumeContext.parse({"source": "/Volumes/a/b/c", key: value})


def test_mount_options_of_other_drivers_are_understood() -> None:
    flags = MountFlags.parse(["ro", "uid=1001,gid=2000", "umask=0027", "allow_other"])
    assert flags == MountFlags(read_only=True, uid=1001, gid=2000, umask=0o027)


def test_an_unknown_mount_option_is_refused_without_its_value() -> None:
    with pytest.raises(InvalidArgument) as caught:
        MountFlags.parse(["password=hunter2"])
    assert "password" in str(caught.value)
    assert "hunter2" not in str(caught.value)
