"""Target paths, the mount table as text, and exclusive operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmount_csi.errors import InvalidArgument, Pending
from trainmount_csi.mounts import LinuxMounter, mounts_at, parse_mountinfo
from trainmount_csi.operations import PendingOperations
from trainmount_csi.target_path import TargetPath

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
31 27 0:40 / /var/lib/a\040b rw,nosuid shared:5 master:2 - fuse.trainmount trainmount-x rw,user_id=0
32 27 0:40 / /var/lib/c ro,nosuid - fuse.trainmount trainmount-x rw,user_id=0
33 27 0:41 / /var/lib/c rw - tmpfs tmpfs rw
"""


def test_the_table_tells_place_device_mode_and_source() -> None:
    proc, first, second, cover = parse_mountinfo(TABLE)
    assert proc.mount_point == Path("/proc")
    assert (first.mount_point, first.device, first.read_only) == (
        Path("/var/lib/a b"),
        "0:40",
        False,
    )
    assert (second.source, second.filesystem_type, second.read_only) == (
        "trainmount-x",
        "fuse.trainmount",
        True,
    )
    assert cover.filesystem_type == "tmpfs"


def test_of_several_mounts_at_a_place_the_last_is_the_visible_one() -> None:
    entries = parse_mountinfo(TABLE)
    assert [entry.source for entry in mounts_at(entries, Path("/var/lib/c"))] == [
        "trainmount-x",
        "tmpfs",
    ]


def test_the_real_table_can_be_read() -> None:
    assert mounts_at(LinuxMounter().entries(), Path("/proc"))


def test_unmounting_what_is_not_mounted_is_fine(tmp_path: Path) -> None:
    LinuxMounter().unmount(tmp_path)
    LinuxMounter().unmount(tmp_path / "missing")


def test_a_kubelet_path_tells_pod_and_volume(tmp_path: Path) -> None:
    text = f"{tmp_path}/pods/u-1/volumes/kubernetes.io~csi/pvc-7/mount"
    target = TargetPath.parse("target_path", text)
    assert (target.pod_uid, target.pod_volume, target.path) == ("u-1", "pvc-7", Path(text))


def test_links_above_the_target_are_resolved_and_the_target_is_not(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "mount").symlink_to("nowhere")
    target = TargetPath.parse("target_path", f"{tmp_path}/link/mount")
    assert target.path == tmp_path.resolve() / "real" / "mount"


@pytest.mark.parametrize("text", ["", "relative", "/a/../b", "/"])
def test_a_bad_path_is_refused_with_its_field(text: str) -> None:
    with pytest.raises(InvalidArgument, match="target_path must"):
        TargetPath.parse("target_path", text)


def test_a_second_operation_on_the_same_key_is_refused_and_others_are_not() -> None:
    pending = PendingOperations()
    with pending.exclusive("a"):
        with pytest.raises(Pending, match="a has not ended"), pending.exclusive("a"):
            pass
        with pending.exclusive("b"):
            pass
    with pending.exclusive("a"):
        pass
