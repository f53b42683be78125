"""A bucket mounted: keys that no file system has side by side, and directories that nobody made."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.files.conftest import ScriptedServer
from tests.files.fake_s3 import FakeS3
from tests.mount.conftest import MountProcess

MountBucket = Callable[[dict[str, bytes]], tuple[MountProcess, FakeS3]]


@pytest.fixture
def mount_bucket(start_mount: Callable[..., MountProcess]) -> Iterator[MountBucket]:
    """`mount_bucket(keys)` is a mount of a bucket with these keys, and the bucket."""
    with ExitStack() as stack:

        def mount(keys: dict[str, bytes]) -> tuple[MountProcess, FakeS3]:
            fake = FakeS3(keys)
            server = stack.enter_context(ScriptedServer(fake))
            options = ("--endpoint", server.url, "--region", "us-east-1")
            credentials = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}
            return start_mount("s3://bucket", *options, environment=credentials), fake

        yield mount


def _run(*command: object) -> str:
    """What a command prints; fails where it fails or complains."""
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert (done.returncode, done.stderr) == (0, ""), command
    return done.stdout


def _num_hidden(mount: MountProcess) -> int:
    command = (sys.executable, "-m", "trainmount_cli", "status", mount.mountpoint, "-o", "json")
    (status,) = json.loads(_run(*command))["data"]["mounts"]
    hidden: int = status["num_hidden_names"]
    return hidden


def _hidden_in_log(mount: MountProcess) -> int:
    return sum("is hidden" in line for line in mount.log.splitlines())


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_key_that_is_also_a_directory_shows_when_the_directory_is_gone(
    mount_bucket: MountBucket,
) -> None:
    mount, fake = mount_bucket({"out": b"a file", "out/x": b"below it"})
    here = mount.mountpoint
    for _ in range(2):
        with os.scandir(here) as entries:
            assert [(one.name, one.is_dir()) for one in entries] == [("out", True)]
    assert (here / "out").is_dir()
    assert (here / "out/x").read_bytes() == b"below it"
    assert (_num_hidden(mount), _hidden_in_log(mount)) == (1, 1)
    _run("rm", here / "out/x")
    _run("rmdir", here / "out")
    assert (here / "out").read_bytes() == b"a file"
    assert _names(here) == ["out"]
    assert fake.objects == {"out": b"a file"}


def test_keys_that_are_no_names_are_hidden_and_those_beside_them_read(
    mount_bucket: MountBucket,
) -> None:
    keys = {"a//b": b"", "/x": b"", "a/./c": b"", "a/../d": b"", "a/ok": b"1", "e/x\ny": b"2"}
    mount, fake = mount_bucket(dict(keys))
    here = mount.mountpoint
    for _ in range(2):
        assert _run("ls", here / "a") == "ok\n"
        assert _names(here) == ["a", "e"]
    assert (here / "a/ok").read_bytes() == b"1"
    # The library for buckets takes no key with a control character.
    assert _names(here / "e") == []
    assert (_num_hidden(mount), _hidden_in_log(mount)) == (5, 5)
    (here / "a/ok").unlink()
    with pytest.raises(OSError, match="not empty") as raised:
        (here / "a").rmdir()
    assert raised.value.errno == errno.ENOTEMPTY
    assert {key: data for key, data in fake.objects.items() if key != "a/"} == {
        key: data for key, data in keys.items() if key != "a/ok"
    }


def test_an_emptied_directory_stays_past_the_timeouts_and_a_daemons_death(
    mount_bucket: MountBucket,
) -> None:
    mount, _fake = mount_bucket({"prefix/f": b"1", "other/deep/f": b"1"})
    here = mount.mountpoint
    _run("mkdir", here / "d")
    _run("touch", here / "d/f")
    _run("rm", "-r", here / "d")
    assert not (here / "d").exists()
    _run("mkdir", here / "d")
    _run("touch", here / "d/f")
    for file in ("d/f", "prefix/f", "other/deep/f"):
        _run("rm", here / file)
    for _ in range(2):
        _run(sys.executable, "-m", "trainmount_cli", "refresh", "--mount", here)
        for folder in ("d", "prefix", "other/deep"):
            assert (here / folder).is_dir()
            assert _names(here / folder) == []
        assert _names(here) == ["d", "other", "prefix"]
        mount.kill_daemon()
    _run("rm", "-r", here / "other")
    _run("rmdir", here / "d", here / "prefix")
    assert _names(here) == []
