"""A bucket at a real S3 server: what only shows there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.external.s3_server import BUCKET, S3Server, running_s3_server
from tests.files.conftest import REAL_BUCKET_OPTIONS
from tests.files.test_volume_contract import blob
from tests.runtime import test_ray_filesystem as ray_checkpoints

from trainmount_files import (
    AlreadyExists,
    ByteRange,
    Cancelled,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    VolumeError,
    list_directory,
    open_volume,
)
from trainmount_files.bucket import BucketVolume, Location
from trainmount_files.bucket.signed_listing import SignedListing
from trainmount_files.transfer import download_file, open_writer, upload_file
from trainmount_files.volume import FileStat

WAIT_SECONDS = 20
PART_BYTES = REAL_BUCKET_OPTIONS.part_size_bytes


@pytest.fixture
def s3_server() -> Iterator[S3Server]:
    with running_s3_server() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server) -> Iterator[BucketVolume]:
    options = replace(REAL_BUCKET_OPTIONS, storage=s3_server.storage)
    opened = BucketVolume(Location("s3", BUCKET, f"own-{uuid.uuid4().hex}"), options)
    yield opened
    opened.close()


def local_file(tmp_path: Path, size_bytes: int) -> Path:
    local = tmp_path / "local"
    local.write_bytes(blob(size_bytes))
    return local


def wait_for(condition: Callable[[], bool]) -> None:
    """The server writes its log after it has answered."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_file_of_many_parts_comes_back_as_it_was(bucket: BucketVolume, tmp_path: Path) -> None:
    local = local_file(tmp_path, 9 * PART_BYTES + 1)
    stored = upload_file(bucket, local, "d/file")
    assert stored.version.endswith("-10")
    download_file(bucket, "d/file", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == local.read_bytes()
    with open_writer(bucket, "d/stream") as writer:
        writer.write(local.read_bytes())
    buffer = bytearray(local.stat().st_size)
    bucket.read_into("d/stream", ByteRange(0, len(buffer)), buffer)
    assert buffer == local.read_bytes()


@pytest.mark.parametrize("how", ["cancel", "interrupt", "short source"])
def test_an_upload_that_fails_is_aborted_at_the_store(
    bucket: BucketVolume, s3_server: S3Server, tmp_path: Path, how: str
) -> None:
    bucket.put("file", b"old")
    size = 12 * PART_BYTES
    local = local_file(tmp_path, size)
    cancel = threading.Event()
    begun, aborted = s3_server.begun_uploads(), s3_server.aborted_uploads()

    def progress(_: int) -> None:
        if how == "cancel":
            cancel.set()
        elif how == "interrupt":
            raise KeyboardInterrupt
        else:
            os.truncate(local, 7 * PART_BYTES)

    started = time.monotonic()
    with local.open("rb") as source, pytest.raises((VolumeError, KeyboardInterrupt)) as caught:
        bucket.upload("file", source, size, cancel=cancel, progress=progress)
    assert time.monotonic() - started < 30
    assert caught.type.__name__ in ("Cancelled", "KeyboardInterrupt", "InvalidRequest")
    wait_for(lambda: s3_server.begun_uploads() > begun)
    wait_for(lambda: s3_server.aborted_uploads() > aborted)
    assert bucket.stat("file").size_bytes == 3


def test_parts_that_are_given_up_are_aborted_at_the_store(
    bucket: BucketVolume, s3_server: S3Server
) -> None:
    cancel = threading.Event()
    begun, aborted = s3_server.begun_uploads(), s3_server.aborted_uploads()
    upload = bucket.start_upload("file", cancel=cancel)
    for number in range(1, 8):
        upload.put_part(number, bytes(PART_BYTES))
    wait_for(lambda: s3_server.begun_uploads() > begun)
    cancel.set()
    with pytest.raises(Cancelled):
        upload.put_part(8, b"1")
    upload.abort()
    wait_for(lambda: s3_server.aborted_uploads() > aborted)
    with pytest.raises(NotFound):
        bucket.stat("file")


def test_of_many_exclusive_uploads_of_parts_one_wins(bucket: BucketVolume, tmp_path: Path) -> None:
    local = local_file(tmp_path, 2 * PART_BYTES + 1)

    def upload(_: int) -> bool:
        with local.open("rb") as source:
            try:
                bucket.upload("file", source, local.stat().st_size, overwrite=False)
            except AlreadyExists:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(upload, range(6))) == 1
    assert bucket.stat("file").size_bytes == local.stat().st_size
    # Nothing is left of the losers.
    root = Location("s3", BUCKET)
    whole = BucketVolume(root, bucket._options)
    prefix = bucket.url.rpartition("/")[2]
    assert [entry.name for entry in list_directory(whole, prefix)] == ["file"]
    whole.close()


def test_wrong_credentials_and_a_wrong_bucket_are_told(s3_server: S3Server) -> None:
    wrong = s3_server.storage | {"secret_access_key": "not-it"}
    volume = open_volume(f"s3://{BUCKET}/x", options=wrong)
    with pytest.raises(Unauthenticated, match="SignatureDoesNotMatch"):
        volume.list_page("")
    with pytest.raises(PermissionDenied):
        volume.stat("x")
    volume.close()
    volume = open_volume("s3://no-such-bucket", options=s3_server.storage)
    with pytest.raises(NotFound, match="no such bucket"):
        volume.list_page("")
    volume.close()


def test_the_environment_is_enough(
    bucket: BucketVolume, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("file", b"content")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    opened = open_volume(bucket.url)
    assert opened.stat("file").size_bytes == 7
    opened.close()


MEASURE = """
import os, sys
from pathlib import Path
from trainmount_files import ByteRange, open_volume
from trainmount_files.transfer import download_file, open_writer, upload_file

def told(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) >> 10

how, local, num_mib = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
volume = open_volume("s3://volume/memory")
# obstore, its threads and connections are not counted.
volume.put("warm", b"1")
volume.read_into("warm", ByteRange(0, 1), bytearray(1))
block = os.urandom(1 << 20)
Path("/proc/self/clear_refs").write_text("5")
before = told("VmRSS")
if how == "stream":
    with open_writer(volume, "file") as writer:
        for _ in range(num_mib):
            writer.write(block)
elif how == "upload":
    upload_file(volume, local, "file")
else:
    download_file(volume, "file", local)
print(told("VmHWM") - before)
"""


def test_memory_does_not_grow_with_the_file(s3_server: S3Server, tmp_path: Path) -> None:
    environment = os.environ | {
        "AWS_ENDPOINT_URL": s3_server.endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
    }
    for how, limit_mib in [("stream", 64), ("download", 64), ("upload", 40)]:
        command = [sys.executable, "-c", MEASURE, how, str(tmp_path / "local"), "200"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert int(done.stdout) <= limit_mib, how


def test_a_signed_listing_is_the_one_of_obstore(bucket: BucketVolume) -> None:
    directory = "a b+é%"
    for name in ("a file", "a+b", "a%20b", "a&b=c?#", "é", "[x]", "~t", "it's*(1)!", "ü/ö", "d/e"):
        bucket.put(f"{directory}/{name}", name.encode())
    here, key = bucket._process.get(), bucket._location.key(directory)
    assert here.signed is not None
    signed = SignedListing(here.signed, 3)
    found: list[FileStat] = []
    token, pages = None, 0
    while pages == 0 or token is not None:
        entries, refused, token = signed.page(directory, key, token=token)
        assert (len(entries) <= 3, refused) == (True, ())
        found += entries
        pages += 1
    assert pages == 4
    expected = {entry.path: entry for entry in list_directory(bucket, directory)}
    assert {entry.path: entry for entry in found} == expected
    # What is signed stands in the query as it is, `..` and all.
    assert signed.page("..", f"{key}/../x//y\n\x7f") == ([], (), None)


def test_a_directory_of_another_tool_is_removed(bucket: BucketVolume) -> None:
    here, key = bucket._process.get(), bucket._location.key("d é+")
    assert here.signed is not None
    here.signed.send("put", "d é+", "PUT", f"{key}/")
    assert bucket.stat("d é+").is_directory
    bucket.remove_directory("d é+")
    with pytest.raises(NotFound):
        bucket.stat("d é+")


UPLOAD = """
import sys
from pathlib import Path
from trainmount_files import open_volume
from trainmount_files.transfer import open_writer, upload_file
volume = open_volume("s3://volume/ending")
upload_file(volume, Path(sys.argv[1]), f"file-{sys.argv[2]}")
writer = open_writer(volume, f"open-{sys.argv[2]}")
writer.write(bytes(9 << 20))
"""


def test_a_process_ends_well_that_closes_neither_volume_nor_file(
    s3_server: S3Server, tmp_path: Path
) -> None:
    environment = os.environ | {
        "AWS_ENDPOINT_URL": s3_server.endpoint,
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
    }
    local = local_file(tmp_path, 20 << 20)

    def run(number: int) -> tuple[int, str]:
        command = [sys.executable, "-c", UPLOAD, str(local), str(number)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(run, range(9)))
    for number, outcome in enumerate(outcomes):
        told = f"open-{number} was being written and never closed; nothing of it is stored\n"
        assert outcome == (0, told)
    wait_for(lambda: s3_server.aborted_uploads() == 9)


@pytest.mark.parametrize("style", ["path", "virtual"])
def test_checkpoints_of_ray_data_are_kept_in_a_bucket_of_either_address(style: str) -> None:
    with running_s3_server(is_virtual=style == "virtual") as server:
        options = {
            "key": server.access_key,
            "secret": server.secret_key,
            "endpoint_url": server.endpoint,
            "config_kwargs": {"s3": {"addressing_style": style}},
        }
        url, folder = f"s3://{server.bucket}/jobs/ck", f"{server.bucket}/jobs/ck"
        filesystem = ray_checkpoints.build_checkpoint_filesystem(url, {"s3": options})
        ray_checkpoints.begun(filesystem, folder)
        done, pending = (f"{'0' * 32}_{number:06}" for number in range(2))
        ray_checkpoints.commit(filesystem, folder, done, ["a"])
        ray_checkpoints.write_ids(filesystem, f"{folder}/{pending}.pending.parquet", ["b"])

        names = {f"{done}.parquet", f"{pending}.pending.parquet"}
        assert set(ray_checkpoints.listed(filesystem, folder)) == names
        assert {path.name for path in (server.directory / folder).glob("*.parquet")} == names
        ids = pq.read_table(f"{folder}/{done}.parquet", filesystem=filesystem)
        assert ids["uid"].to_pylist() == ["a"]
        filesystem.delete_dir(folder)
        assert ray_checkpoints.listed(filesystem, folder) == []
