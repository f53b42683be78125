"""A bucket in forked and spawned processes, where obstore's own threads do not follow."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.files.conftest import REAL_BUCKET_OPTIONS, ScriptedServer
from tests.files.fake_s3 import FakeS3

from trainmount_files import ByteRange, open_volume
from trainmount_files.bucket import BucketVolume, Location
from trainmount_files.bucket.library import obstore
from trainmount_files.volume import list_pages

SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
WAIT_SECONDS = 60

READ = """
import pickle, sys
from trainmount_files import ByteRange
volume = pickle.load(sys.stdin.buffer)
buffer = bytearray(7)
volume.read_into("file", ByteRange(0, 7), buffer)
print(buffer.decode())
"""

PUT = """
import asyncio, os, pickle, sys, threading, time
volume = pickle.load(sys.stdin.buffer)
volume.stat("file")
ours = {thread.ident for thread in threading.enumerate()}
call = asyncio.BaseEventLoop.call_soon_threadsafe
def call_slowly(*args, **options):
    handle = call(*args, **options)
    if threading.get_ident() not in ours:
        time.sleep(0.5)
        os.write(1, b"out")
    return handle
asyncio.BaseEventLoop.call_soon_threadsafe = call_slowly
volume.put("new", b"content", want_version=False)
"""


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    # One page is listed past obstore.
    keys = {"data/file": b"content", "data/d/../x": b"1", "data/d/content": b"2"}
    with ScriptedServer(FakeS3(keys)) as running:
        yield running


@pytest.fixture
def bucket(server: ScriptedServer) -> Iterator[BucketVolume]:
    storage = {
        "endpoint": server.url,
        "region": "us-east-1",
        "access_key_id": "AKIAEXAMPLE",
        "secret_access_key": SECRET,
    }
    opened = BucketVolume(
        Location("s3", "bucket", "data"), replace(REAL_BUCKET_OPTIONS, storage=storage)
    )
    yield opened
    opened.close()


def environment_of(server: ScriptedServer) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


def read(bucket: BucketVolume) -> bytes:
    buffer = bytearray(7)
    bucket.read_into("file", ByteRange(0, 7), buffer)
    (page,) = list_pages(bucket, "d")
    assert page.refused == ("../x",)
    assert [entry.name.encode() for entry in page.entries] == [bytes(buffer)]
    return bytes(buffer)


def in_fork(bucket: BucketVolume, generations: int) -> tuple[int, bytes]:
    """Exit status and what the last of so many forked generations read."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if generations > 1:
                assert read(bucket) == b"content"
                inner, found = in_fork(bucket, generations - 1)
                assert inner == 0
            else:
                found = read(bucket)
            os.write(send, found)
            status = 0
        finally:
            os._exit(status)
    os.close(send)
    found = os.read(receive, 100)
    os.close(receive)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), found


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("generations", [1, 2])
def test_a_forked_child_reads_after_its_parent_did(bucket: BucketVolume, generations: int) -> None:
    assert read(bucket) == b"content"
    assert in_fork(bucket, generations) == (0, b"content")
    assert in_fork(bucket, generations) == (0, b"content")
    assert read(bucket) == b"content"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_while_locks_are_held_in_its_parent(bucket: BucketVolume) -> None:
    assert read(bucket) == b"content"
    here = bucket._process.get()
    with bucket._process._lock, here.calls._lock, here.places._lock, here.listing._lock:
        assert in_fork(bucket, 1) == (0, b"content")
    assert read(bucket) == b"content"


def test_a_process_that_was_not_forked_has_the_library_itself() -> None:
    assert obstore() is sys.modules["obstore._obstore"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_explicit_options_travel_to_a_child_that_is_being_spawned(
    bucket: BucketVolume, method: str
) -> None:
    assert read(bucket) == b"content"
    context = multiprocessing.get_context(method)
    child = context.Process(target=bucket.put, args=("from-child", b"1234567"))
    child.start()
    child.join(WAIT_SECONDS)
    assert child.exitcode == 0
    assert bucket.stat("from-child").size_bytes == 7


def test_a_pickled_volume_holds_no_options_and_reads_with_its_environment(
    bucket: BucketVolume, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = pickle.dumps(pickle.loads(pickle.dumps(bucket)))
    assert SECRET.encode() not in pickled
    assert b"AKIAEXAMPLE" not in pickled
    environment = environment_of(server)
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=pickled,
        capture_output=True,
        check=True,
        timeout=WAIT_SECONDS,
        env=os.environ | environment,
    )
    assert done.stdout == b"content\n"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    opened = open_volume("s3://bucket/data")
    assert opened.stat("file").size_bytes == 7
    opened.close()


@pytest.mark.parametrize("ending", ["volume.close()", ""])
def test_a_process_ends_only_when_the_librarys_threads_are_out_of_it(
    bucket: BucketVolume, server: ScriptedServer, ending: str
) -> None:
    """They stay in the interpreter for a moment after what they brought was taken."""
    done = subprocess.run(
        [sys.executable, "-c", PUT + ending],
        input=pickle.dumps(bucket),
        capture_output=True,
        check=False,
        timeout=WAIT_SECONDS,
        env=os.environ | environment_of(server),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out" * 2, b"")
