"""Keys of a bucket that no file system has side by side, and directories that nobody made."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.files.conftest import OPTIONS, ScriptedServer
from tests.files.fake_s3 import FakeS3
from tests.fuse.conftest import Node

from trainmount_files.bucket import BucketOptions, BucketVolume, Location
from trainmount_files.errors import DirectoryNotEmpty
from trainmount_fuse.errno import errno_of
from trainmount_fuse.settings import MountSettings

NO_TIME = {
    f"{kind}_timeout_seconds": 0.0 for kind in ("entry", "attr", "directory", "negative", "open")
}


@pytest.fixture
def over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`await over(keys)` is a mount of an S3 bucket with these keys, and the bucket."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with ExitStack() as stack:

        async def mount(keys: dict[str, bytes]) -> tuple[Node, FakeS3]:
            fake = FakeS3(keys)
            server = stack.enter_context(ScriptedServer(fake))
            storage = {
                "endpoint": server.url,
                "region": "us-east-1",
                "access_key_id": "AKIAEXAMPLE",
                "secret_access_key": "secret",
            }
            options = BucketOptions(storage=storage, retry=OPTIONS.retry)
            volume = BucketVolume(Location("s3", "bucket"), options)
            stack.callback(volume.close)
            settings = MountSettings(
                source="s3://bucket",
                cache_dir=tmp_path / "cache",
                state_dir=tmp_path / "state",
                mount_id="mount-0",
                free_disk_floor_bytes=0,
                **NO_TIME,
            )
            node = Node(volume, settings)  # type: ignore[arg-type]
            await node.fs.start()
            return node, fake

        yield mount


async def test_a_file_and_a_directory_of_one_name_show_as_the_directory(
    over: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And as the file again when the directory is gone."""
    keys = {"d/out": b"file", "d/out-1": b"", "d/out/x": b"below", "d/z": b"1"}
    a, fake = await over(keys)
    with caplog.at_level(logging.WARNING, "trainmount_fuse"):
        for _ in range(2):
            shown = {name: one.is_directory for name, one in (await a.entries("d")).items()}
            assert shown == {"out": True, "out-1": False, "z": False}
    assert await a.read("d/out/x") == b"below"
    core = a.fs.core
    assert core.metadata.statistics().num_hidden == 1
    assert [one.path for one in caplog.records if "hidden" in one.message] == ["d/out"]
    await a.unlink("d/out/x")
    # Empty, and as any other directory there until it is removed.
    assert (await a.stat("d/out")).is_directory
    assert (await a.entries("d"))["out"].is_directory
    assert await a.entries("d/out") == {}
    await a.rmdir("d/out")
    assert not (await a.stat("d/out")).is_directory
    assert await a.read("d/out") == b"file"
    assert set(fake.objects) == {"d/out", "d/out-1", "d/z"}


@pytest.mark.quotes(
    "Keys that are no names are hidden and counted.",
)
async def test_keys_that_are_no_names_are_hidden_counted_once_and_keep_their_directory(
    over: Any,
) -> None:
    keys = {"a//b": b"", "a/./c": b"", "a/../d": b"", "a/ok": b"1", "e/x\ny": b"2"}
    a, _fake = await over(keys)
    for _ in range(2):
        assert set(await a.entries("a")) == {"ok"}
    assert await a.read("a/ok") == b"1"
    assert a.fs.core.metadata.statistics().num_hidden >= 1
    counted = a.fs.core.metadata.num_hidden
    assert set(await a.entries("a")) == {"ok"}
    assert a.fs.core.metadata.num_hidden == counted
    await a.unlink("a/ok")
    with pytest.raises(DirectoryNotEmpty) as raised:
        await a.rmdir("a")
    assert errno_of(raised.value) == errno.ENOTEMPTY


@pytest.mark.quotes(
    "In a bucket, a directory that was emptied stays until `rmdir`.",
)
async def test_an_emptied_directory_stays_until_it_is_removed(over: Any) -> None:
    """One that was made, and a prefix that nobody made; past every timeout and a restart."""
    a, _fake = await over({"prefix/f": b"1"})
    await a.mkdir("made")
    await a.write("made/f", b"2")
    for directory in ("made", "prefix"):
        await a.unlink(f"{directory}/f")
        for restart in (a.crash, a.remount):
            assert (await a.stat(directory)).is_directory
            assert await a.entries(directory) == {}
            await restart()
    for directory in ("made", "prefix"):
        await a.rmdir(directory)
    assert await a.entries() == {}
