"""Trees whose keys are no paths, out of a bucket that holds them byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.files.conftest import OPTIONS, ScriptedServer
from tests.files.fake_s3 import FakeS3

from trainmount_files.bucket import BucketOptions, BucketVolume, Location
from trainmount_files.trees import LocalPlace, VolumePlace, copy_tree


@pytest.fixture
def fake() -> FakeS3:
    return FakeS3({})


@pytest.fixture
def bucket(fake: FakeS3) -> Iterator[BucketVolume]:
    with ScriptedServer(fake) as server:
        storage = {
            "endpoint": server.url,
            "region": "us-east-1",
            "access_key_id": "AKIAEXAMPLE",
            "secret_access_key": "secret",
        }
        options = BucketOptions(storage=storage, retry=OPTIONS.retry)
        volume = BucketVolume(Location("s3", "bucket", ""), options)
        yield volume
        volume.close()


def content_of(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_keys_that_lead_out_are_named_and_the_rest_is_copied(
    fake: FakeS3, bucket: BucketVolume, tmp_path: Path
) -> None:
    bad = ["../x", "a/../../dst-evil/x", "/abs", "a//b", "a/c\x01", "\n"]
    good = ["a/fine", "b/fine", "good", *(f"c/{number}" for number in range(20))]
    fake.objects |= dict.fromkeys(bad + good, b"content")
    (tmp_path / "dst").mkdir()

    report = copy_tree(VolumePlace(bucket, ""), LocalPlace(tmp_path / "dst"))

    assert {failure.path: failure.code for failure in report.failures} == dict.fromkeys(
        bad, "INVALID_REQUEST"
    )
    assert content_of(tmp_path) == {f"dst/{key}": b"content" for key in good}


def test_a_key_that_is_a_file_and_a_directory_is_copied_as_one_and_named_as_the_other(
    fake: FakeS3, bucket: BucketVolume, tmp_path: Path
) -> None:
    fake.objects |= {"d/p": b"file", "d/p/f": b"inside", "d/q": b"q"}

    report = copy_tree(VolumePlace(bucket, "d"), LocalPlace(tmp_path / "dst"))

    assert [failure.path for failure in report.failures] == ["p"]
    there = content_of(tmp_path / "dst")
    assert there in ({"p": b"file", "q": b"q"}, {"p/f": b"inside", "q": b"q"})
