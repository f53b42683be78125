"""Which publications share a daemon, and what it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainmount_csi.credentials import Credentials
from trainmount_csi.daemon_spec import DaemonFolder, DaemonSpec, daemon_folders, daemon_id_of
from trainmount_csi.errors import InvalidArgument
from trainmount_csi.volume_context import MountFlags, VolumeContext

ALICE = Credentials(host="https://h", token="dapi-alice")
BOB = Credentials(host="https://h", token="dapi-bob")
CONTEXT = VolumeContext(source="/Volumes/a/b/c")


def spec(
    context: VolumeContext = CONTEXT,
    *,
    who: Credentials = ALICE,
    flags: MountFlags | None = None,
    group: str = "",
) -> DaemonSpec:
    return DaemonSpec.of(context, flags or MountFlags(), who, group)


def test_two_identities_never_share_a_daemon() -> None:
    assert spec(who=ALICE).daemon_id != spec(who=BOB).daemon_id


def test_a_reader_and_a_writer_share_one() -> None:
    reader = spec(VolumeContext(source=CONTEXT.source, read_only=True))
    assert reader.daemon_id == spec().daemon_id


def test_other_options_need_another_daemon() -> None:
    larger = VolumeContext(source=CONTEXT.source, cache_size_bytes=1 << 30)
    assert spec(larger).daemon_id != spec().daemon_id


def test_memory_and_timeouts_arrive_in_the_settings(tmp_path: Path) -> None:
    context = VolumeContext(
        source=CONTEXT.source,
        memory_bytes=64 << 20,
        metadata_timeout_seconds=60.0,
        negative_timeout_seconds=0.0,
        open_timeout_seconds=5.0,
    )
    settings = spec(context).settings(DaemonFolder(tmp_path), "1")
    assert settings.memory_bytes == 64 << 20
    assert {
        settings.entry_timeout_seconds,
        settings.attr_timeout_seconds,
        settings.directory_timeout_seconds,
    } == {60.0}
    assert (settings.negative_timeout_seconds, settings.open_timeout_seconds) == (0.0, 5.0)


def test_the_token_is_in_no_field_and_no_representation() -> None:
    assert "dapi-alice" not in repr(spec())
    assert "dapi-alice" not in repr(ALICE)


def test_without_options_every_user_may_read_and_write() -> None:
    assert (spec().file_mode, spec().directory_mode) == (0o666, 0o777)


def test_the_group_of_the_pod_owns_what_it_mounts() -> None:
    shared = spec(group="2000")
    assert (shared.gid, shared.file_mode, shared.directory_mode) == (2000, 0o664, 0o775)


def test_attributes_win_over_mount_options_and_those_over_the_group() -> None:
    flags = MountFlags(gid=7, umask=0o022)
    assert spec(flags=flags, group="2000").gid == 7
    assert spec(flags=flags).file_mode == 0o644
    context = VolumeContext(source=CONTEXT.source, gid=8, file_mode=0o600)
    chosen = spec(context, flags=flags, group="2000")
    assert (chosen.gid, chosen.file_mode, chosen.directory_mode) == (8, 0o600, 0o755)


def test_a_daemon_is_found_by_the_name_of_its_mount(tmp_path: Path) -> None:
    folder = DaemonFolder(tmp_path / spec().daemon_id)
    assert daemon_id_of(folder.mount_name) == folder.daemon_id
    assert daemon_id_of("trainmount-other") is None
    assert daemon_id_of(folder.daemon_id) is None


def test_a_folder_is_for_its_daemon_alone_and_goes_whole(tmp_path: Path) -> None:
    folder = DaemonFolder(tmp_path / spec().daemon_id)
    folder.create(os.getuid())
    folder.create(os.getuid())
    assert folder.serve_path.stat().st_mode & 0o777 == 0o700
    assert list(daemon_folders(tmp_path)) == [folder]
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_at_its_mount_path_is_not_removed(tmp_path: Path) -> None:
    folder = DaemonFolder(tmp_path / spec().daemon_id)
    folder.create(os.getuid())
    folder.mount_path.chmod(0o700)
    (folder.mount_path / "data").write_text("x")
    with pytest.raises(OSError, match="not empty"):
        folder.remove()
    assert (folder.mount_path / "data").read_text() == "x"
    assert folder.state_path.is_dir()


def test_other_folders_of_the_root_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "csi.sock").touch()
    (tmp_path / "lost+found").mkdir()
    assert list(daemon_folders(tmp_path)) == []
    assert list(daemon_folders(tmp_path / "missing")) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cacheSize", "1Ki", "volumeAttributes.cacheSize must be at least 1048576, got 1024"),
        ("memory", "1Mi", "volumeAttributes.memory must be at least 8388608, got 1048576"),
        ("blockSize", "1000", "volumeAttributes.blockSize must be at least 4096, got 1000"),
        ("openTimeout", "9" * 400, "volumeAttributes.openTimeout must be "),
    ],
)
def test_a_value_that_the_mount_does_not_take_is_refused_with_its_key(
    key: str, value: str, said: str, tmp_path: Path
) -> None:
    context = VolumeContext.parse({"source": "/Volumes/a/b/c", key: value})
    with pytest.raises(InvalidArgument) as raised:
        spec(context).settings(DaemonFolder(tmp_path), "1")
    assert str(raised.value).startswith(said)
