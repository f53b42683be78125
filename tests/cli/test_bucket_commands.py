"""`trainmount cp` out of a bucket that holds keys which are no paths."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.files.conftest import ScriptedServer
from tests.files.fake_s3 import FakeS3

Run = Callable[..., "subprocess.CompletedProcess[str]"]

BAD = ["../dst-evil/x", "../x", "/abs", "a/../../dst-evil/x", "a//b", "a/c\x1b[2J", "b/y\n"]
GOOD = ["a/fine", "b/fine", "good", "link/inside", *(f"c/{number}" for number in range(30))]


def test_keys_that_lead_out_of_the_destination_are_named_and_the_rest_is_copied(
    in_process: Run, tmp_path: Path
) -> None:
    outside, target = tmp_path / "outside", tmp_path / "dst"
    outside.mkdir()
    target.mkdir()
    (target / "link").symlink_to(outside)
    environment = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}

    with ScriptedServer(FakeS3(dict.fromkeys(BAD + GOOD, b"content"))) as server:
        environment["AWS_ENDPOINT_URL"] = server.url
        done = in_process(
            "cp", "-r", "s3://bucket/", str(target), "-o", "json", status=1, **environment
        )
        told = in_process("cp", "-r", "s3://bucket/", str(target), status=1, **environment)

    failed = {entry["path"] for entry in json.loads(done.stdout)["data"]["failed"]}
    assert {f"s3://bucket/{key}" for key in BAD} <= failed
    # A link in the destination that leads out is not followed.
    assert all("link" in path for path in failed - {f"s3://bucket/{key}" for key in BAD})
    assert "\x1b" not in told.stdout + told.stderr
    copied = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert copied == set(GOOD) - {"link/inside"}
    assert list(outside.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.name in ("dst-evil", "x")) == []
