"""What is a bucket's own: keys that are no paths, directories that are none, parts in order, and a
store that answers wrongly.
"""

from __future__ import annotations

import logging
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from tests.files.conftest import BUCKET_OPTIONS, OPTIONS, Request, Scripted, ScriptedServer
from tests.files.fake_s3 import MODIFIED, FakeS3, error, etag_of, object_answer

from trainmount_files import (
    AlreadyExists,
    ByteRange,
    Cancelled,
    DirectoryNotEmpty,
    InexactRange,
    InvalidRequest,
    IsADirectory,
    NoSpace,
    NotADirectory,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    QuotaExceeded,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unsupported,
    VolumeError,
    list_directory,
    open_volume,
)
from trainmount_files.bucket import BucketOptions, BucketVolume, Location, listing, parse_location
from trainmount_files.bucket.parts import BucketUpload
from trainmount_files.volume import MIB, list_pages

SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
ACCESS_KEY = "AKIAEXAMPLE"

MakeBucket = Callable[..., tuple[ScriptedServer, BucketVolume]]


def in_memory(**changes: object) -> BucketVolume:
    options = replace(BUCKET_OPTIONS, **changes)  # type: ignore[arg-type]
    return BucketVolume(Location("memory", uuid.uuid4().hex, "data"), options)


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)


@pytest.fixture
def bucket() -> Iterator[BucketVolume]:
    opened = in_memory()
    yield opened
    opened.close()


@pytest.fixture
def make() -> Iterator[MakeBucket]:
    """A volume over a server of the test's own; of the whole bucket."""
    with ExitStack() as stack:

        def make(
            fake: FakeS3, *, deadline_seconds: float = 2.0, **changes: int
        ) -> tuple[ScriptedServer, BucketVolume]:
            server = stack.enter_context(ScriptedServer(fake))
            storage = {
                "endpoint": server.url,
                "region": "us-east-1",
                "access_key_id": ACCESS_KEY,
                "secret_access_key": SECRET,
            }
            retry = replace(OPTIONS.retry, deadline_seconds=deadline_seconds)
            options = BucketOptions(storage=storage, retry=retry, **changes)  # type: ignore[arg-type]
            opened = BucketVolume(Location("s3", "bucket"), options)
            stack.callback(opened.close)
            return server, opened

        yield make


def read(volume: BucketVolume, path: str, start: int, end: int, **options: object) -> bytes:
    buffer = bytearray(end - start)
    volume.read_into(path, ByteRange(start, end), buffer, **options)  # type: ignore[arg-type]
    return bytes(buffer)


def names(volume: BucketVolume, path: str = "") -> list[str]:
    return [e.name + "/" * e.is_directory for e in list_directory(volume, path)]


# --- URLs and options


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://b", Location("s3", "b")),
        ("s3://b/", Location("s3", "b")),
        ("s3a://b/p/q/", Location("s3", "b", "p/q")),
        ("gs://b/a b%20c", Location("gs", "b", "a b%20c")),
        ("az://container/p", Location("az", "container", "p")),
        (
            "abfss://container@account.dfs.core.windows.net/p",
            Location("az", "container", "p", "account"),
        ),
    ],
)
def test_the_url_of_a_bucket_has_a_bucket_and_a_prefix(url: str, location: Location) -> None:
    assert parse_location(url) == location


@pytest.mark.parametrize(
    "url",
    ["s3:", "s3://", "s3:///p", "s3://key:secret@b/p", "s3://b/../c", "s3://b/a//c", "s3://b?x=1"],
)
def test_another_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_volume(url)
    assert "secret" not in str(caught.value)
    assert "must be s3://bucket" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "shown"),
    [
        ("s3://b/p", {"region": "eu-west-1", "skip_signature": "true"}, "s3://b/p"),
        ("gs://b/p", {"skip_signature": "true"}, "gs://b/p"),
        ("az://c/p", {"account_name": "a", "skip_signature": "true"}, "az://c/p"),
        ("abfss://c@a.dfs.core.windows.net/p", {"skip_signature": "true"}, "az://c/p"),
    ],
)
def test_each_store_is_opened_without_a_request(
    url: str, options: dict[str, str], shown: str
) -> None:
    volume = open_volume(url, options=options)
    assert volume.url == shown
    assert repr(volume) == f"BucketVolume({shown!r})"
    assert volume.stat("").is_directory
    volume.close()


def test_a_wrong_option_is_told_without_its_value() -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_volume("s3://b", options={"acess_key": SECRET})
    assert "acess_key" in str(caught.value)
    assert SECRET not in str(caught.value)
    with pytest.raises(InvalidRequest) as caught:
        open_volume("az://c")
    assert "az://c" in str(caught.value)


def test_without_the_extra_it_is_told_what_to_install() -> None:
    code = (
        "import sys; sys.modules['obstore'] = None; from trainmount_files import open_volume\n"
        "try: open_volume('s3://b')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Unsupported ")
    assert "pip install 'trainmount[bucket]'" in done.stdout


# --- Names and directories


@pytest.mark.parametrize("order", ["p first", "p/f first"])
def test_a_key_and_a_key_below_it_are_a_file_and_a_directory(order: str) -> None:
    bucket = in_memory(check_names=False)
    for path in ["p", "p/f"] if order == "p first" else ["p/f", "p"]:
        bucket.put(path, path.encode())
    for _ in range(2):
        assert not bucket.stat("p").is_directory
        assert names(bucket) == ["p", "p/"]
        assert names(bucket, "p") == ["f"]
        assert not bucket.stat("p/f").is_directory
    assert read(bucket, "p", 0, 1) == b"p"
    assert read(bucket, "p/f", 0, 3) == b"p/f"
    bucket.delete("p")
    assert bucket.stat("p").is_directory
    bucket.close()


def test_a_file_and_a_directory_of_one_name_are_not_made(bucket: BucketVolume) -> None:
    bucket.put("p", b"1")
    with pytest.raises(NotADirectory, match="p is a file"):
        bucket.put("p/f", b"2")
    bucket.put("q/f", b"1")
    with pytest.raises(IsADirectory):
        bucket.put("q", b"2")
    with pytest.raises(IsADirectory):
        bucket.start_upload("q")
    assert names(bucket) == ["p", "q/"]


def test_a_directory_of_another_tool_is_one_and_its_key_no_file(make: MakeBucket) -> None:
    # A key that ends in a slash.
    fake = FakeS3({"d/": b"", "d/e/": b"", "d/f": b"", "d/g": b"1", "h": b""})
    _, bucket = make(fake)
    assert bucket.stat("d").is_directory
    assert names(bucket) == ["d/", "h"]
    assert names(bucket, "d") == ["e/", "f", "g"]
    assert names(bucket, "d/e") == []
    with pytest.raises(DirectoryNotEmpty):
        bucket.remove_directory("d")
    bucket.remove_directory("d/e")
    assert sorted(fake.objects) == ["d/", "d/f", "d/g", "h"]
    with pytest.raises(NotFound):
        bucket.stat("d/e")


def test_our_own_keys_are_hidden_and_reserved(bucket: BucketVolume) -> None:
    bucket.make_directory("d")
    assert names(bucket, "d") == []
    for path in ("d/.trainmount-directory", ".trainmount-staging/x", ".trainmount-staging"):
        with pytest.raises(InvalidRequest, match="reserved"):
            bucket.put(path, b"1")
    bucket.put("d/.trainmount-staging", b"only at the root")
    assert names(bucket, "d") == [".trainmount-staging"]


@pytest.mark.parametrize("path", ["a\nb", "a\tb", "a\x7fb", "a\udc80b"])
def test_a_name_that_no_key_may_have_is_refused(bucket: BucketVolume, path: str) -> None:
    with pytest.raises(InvalidRequest):
        bucket.put(path, b"1")


def test_keys_that_begin_with_a_slash_are_left_out_and_named(
    make: MakeBucket, caplog: pytest.LogCaptureFixture
) -> None:
    _, bucket = make(FakeS3({"/abs": b"1", "//x": b"1", "abd": b"2", "d/f": b"3"}))
    with caplog.at_level(logging.WARNING):
        (page,) = list_pages(bucket, "")
    assert [entry.path for entry in page.entries] == ["abd", "d"]
    assert page.refused == ("//x", "/abs")
    assert "keys that no path can name are left out" in caplog.text
    with pytest.raises(InvalidRequest):
        bucket.stat("/abs")


BAD_NAMES = ["../x", "/x", "./x", "../../dst-evil/x", "a\x01b", "a\nb/c", "\x7f", "..", "a b/../+&"]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("directory", ["", "d é/+%&"])
def test_a_key_that_no_path_can_name_is_refused_by_name_and_the_others_listed(
    make: MakeBucket, directory: str, name: str
) -> None:
    prefix = f"{directory}/" if directory else ""
    good = ["a file", "a+b", "a%20b", "a&b=c?#", "é", "g/f", "z/" + name]
    fake = FakeS3({prefix + key: key.encode() for key in [name, *good]})
    server, bucket = make(fake)
    if name.startswith("a b/"):
        # It is in the directory below.
        assert names(bucket, directory) == sorted(["a b/", *good[:5], "g/", "z/"])
        directory, name = f"{prefix}a b", name[4:]
    else:
        (page,) = list_pages(bucket, directory)
        assert page.refused == (name,)
        found = [entry.name + "/" * entry.is_directory for entry in page.entries]
        assert found == sorted([*good[:5], "g/", "z/"])
    (page,) = list_pages(bucket, directory)
    assert page.refused == (name,)
    assert read(bucket, f"{prefix}é", 0, 2) == "é".encode()
    signed = [r for r in server.requests if "encoding-type" in r.target]
    assert all(
        r.headers["authorization"].startswith(f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/")
        for r in signed
    )


def test_pages_beside_a_key_that_no_path_can_name_are_bounded(make: MakeBucket) -> None:
    keys = {f"d/{number:04}": b"1" for number in range(2500)} | {"d/1200//x": b"", "d//x": b""}
    server, bucket = make(FakeS3(keys | {f"d/0500/{number}": b"1" for number in range(5)}))
    pages = list(list_pages(bucket, "d"))
    listed = [e.name + "/" * e.is_directory for page in pages for e in page.entries]
    assert listed == sorted([*(f"{n:04}" for n in range(2500)), "0500/", "1200/"])
    assert [page.refused for page in pages if page.refused] == [("/x",)]
    assert all(len(page.entries) <= 1000 for page in pages)
    assert len(server.requests) <= 8


def test_a_key_that_no_path_can_name_is_met_late(make: MakeBucket) -> None:
    # Behind several large directories, from which on another way of listing is taken.
    keys = {f"d/{n}/{inside:04}": b"1" for n in range(1, 9) for inside in range(1010)}
    _, bucket = make(FakeS3(keys | {"d/9": b"1", "d/95/../x": b"1", "d/z\x01": b"1"}))
    pages = list(list_pages(bucket, "d"))
    listed = [e.name + "/" * e.is_directory for page in pages for e in page.entries]
    assert listed == [*(f"{n}/" for n in range(1, 9)), "9", "95/"]
    assert [page.refused for page in pages if page.refused] == [("z\x01",)]


def test_only_some_of_many_keys_behind_a_bad_name_are_told(make: MakeBucket) -> None:
    keys = {f"../{number:03}": b"1" for number in range(100)} | {"good": b"1"}
    _, bucket = make(FakeS3(keys))
    (page,) = list_pages(bucket, "")
    assert page.refused == (*(f"../{number:03}" for number in range(20)), "../")
    assert names(bucket) == ["good"]


def test_without_signed_requests_the_key_is_named_and_the_directory_refused(
    make: MakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bucket = make(FakeS3({"d/../x": b"1", "d/fine": b"2", "e/f": b"3"}))
    monkeypatch.setattr(bucket._process.get().listing, "_signed", None)
    with pytest.raises(InvalidRequest, match=r"no path can name the key 'd/\.\./'"):
        bucket.list_page("d")
    assert bucket.stat("d").is_directory
    # What is not in that directory is not disturbed.
    assert names(bucket) == ["d/", "e/"]
    assert read(bucket, "d/fine", 0, 1) == b"2"
    with pytest.raises(DirectoryNotEmpty):
        bucket.remove_directory("d")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not XML",
        b"<html/>",
        b"<ListBucketResult><Contents/></ListBucketResult>",
        b'<!DOCTYPE x [<!ENTITY a "aaaaaaaa">]><ListBucketResult>&a;</ListBucketResult>',
    ],
)
def test_a_signed_listing_that_is_none_is_an_error(make: MakeBucket, body: bytes) -> None:
    def other(request: Request) -> Scripted | None:
        return Scripted(body=body) if "encoding-type" in request.target else None

    _, bucket = make(FakeS3({"d/../x": b"1"}, other))
    with pytest.raises(InvalidRequest, match="the store's answer is no listing"):
        bucket.list_page("d")


def test_a_signed_listing_is_asked_for_again_until_the_deadline(make: MakeBucket) -> None:
    failures = [error(503, "SlowDown"), Scripted(hang_up=True), error(500, "InternalError")]

    def failing(request: Request) -> Scripted | None:
        return failures.pop() if failures and "encoding-type" in request.target else None

    fake = FakeS3({"d/../x": b"1", "d/fine": b"2"}, failing)
    server, bucket = make(fake)
    assert names(bucket, "d") == ["fine"]
    leak = f"<StringToSign>{SECRET}</StringToSign>"
    for answer, kind in [
        (error(503, "SlowDown", leak), Unavailable),
        (error(403, "SignatureDoesNotMatch", leak), Unauthenticated),
        (error(404, "NoSuchBucket", leak), NotFound),
        (error(301, "PermanentRedirect", leak), InvalidRequest),
    ]:
        fake.fault = lambda r, a=answer: a if "encoding-type" in r.target else None  # type: ignore[misc]
        _, impatient = make(fake, deadline_seconds=0.2)
        with pytest.raises(kind) as caught:
            impatient.list_page("d")
        told = "".join(traceback.format_exception(caught.value))
        assert SECRET not in told and ACCESS_KEY not in told and server.url not in told


def test_a_signed_listing_that_hangs_ends_when_the_volume_is_closed(make: MakeBucket) -> None:
    release, asked = threading.Event(), threading.Event()

    def hang(request: Request) -> Scripted | None:
        if "encoding-type" in request.target:
            asked.set()
            release.wait(60)
        return None

    _, bucket = make(FakeS3({"d/../x": b"1"}, hang))
    caught: list[BaseException] = []

    def run() -> None:
        try:
            bucket.list_page("d")
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert asked.wait(30)
    bucket.close()
    thread.join(10)
    assert not thread.is_alive()
    release.set()
    assert [type(error) for error in caught] == [Cancelled]


def test_azure_would_take_a_backslash_for_a_slash() -> None:
    volume = open_volume("az://c", options={"account_name": "a", "skip_signature": "true"})
    with pytest.raises(InvalidRequest, match="backslash"):
        volume.put("a\\b", b"1")
    volume.close()


# --- Listing


@pytest.mark.parametrize("seed", range(6))
def test_both_ways_of_listing_give_every_entry_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(listing, "_KEYS", 7)
    bucket = in_memory(page_entries=5, check_names=False)
    rng = random.Random(seed)
    expected = set()
    for _ in range(120):
        name = "".join(rng.choice("ab-./0é") for _ in range(3)).strip("/")
        if not name or any(part in ("", ".", "..") for part in name.split("/")):
            continue
        bucket.put(f"d/{name}", rng.choice([b"", b"1"]))
        expected.add(name.split("/")[0] + "/" * ("/" in name))
    if seed % 2:
        for number in range(6):
            # More large directories than are passed one by one.
            for inside in range(20):
                bucket.put(f"d/large{number}/{inside:02}", b"1")
            expected.add(f"large{number}/")
    assert names(bucket, "d") == sorted(expected)
    bucket.close()


def test_a_million_files_would_be_listed_in_the_memory_of_a_page(make: MakeBucket) -> None:
    keys = {f"d/{number:05}": b"1" for number in range(3000)}
    server, bucket = make(FakeS3(keys))
    pages = list(list_pages(bucket, "d"))
    assert [len(page.entries) for page in pages] == [1000, 1000, 1000, 0]
    # Not a request more than pages, and each begins where the last ended.
    assert len(server.requests) == 4


def test_a_thousand_large_directories_are_listed_in_few_requests(make: MakeBucket) -> None:
    keys = {f"d/{number:02}/{inside:04}": b"1" for number in range(30) for inside in range(1100)}
    server, bucket = make(FakeS3(keys))
    assert names(bucket, "d") == [f"{number:02}/" for number in range(30)]
    assert len(server.requests) <= 16


def test_a_token_of_another_store_is_refused(bucket: BucketVolume) -> None:
    bucket.put("d/f", b"1")
    with pytest.raises(InvalidRequest, match="page token"):
        bucket.list_page("d", "CAESB2xhc3Q=")


# --- Uploads


@pytest.mark.parametrize(
    ("size_bytes", "part_bytes"),
    [(1, 8 * MIB), (80_000 * MIB, 8 * MIB), (250 << 30, 26 * MIB), (5 << 40, 525 * MIB)],
)
def test_parts_grow_with_the_file(size_bytes: int, part_bytes: int) -> None:
    options = BucketOptions()
    assert options.part_bytes_of(size_bytes) == part_bytes
    assert -(-size_bytes // part_bytes) <= 10_000
    parallelism = options.parallelism_of(part_bytes)
    assert parallelism == 1 or (parallelism + 1) * part_bytes <= 32 * MIB


def test_parts_ahead_of_their_turn_wait_on_the_disk(bucket: BucketVolume) -> None:
    parts = {number: bytes([number]) * 20_000 for number in range(1, 13)}
    upload = bucket.start_upload("file")
    assert isinstance(upload, BucketUpload)
    for number in range(12, 0, -1):
        upload.put_part(number, parts[number])
        assert upload._memory_bytes <= BUCKET_OPTIONS.window_bytes
    upload.put_part(3, b"3" * 20_000)
    assert upload._spill_bytes > 0
    assert upload.complete().size_bytes == 240_000
    parts[3] = b"3" * 20_000
    assert read(bucket, "file", 0, 240_000) == b"".join(parts[n] for n in range(1, 13))
    assert upload._spill is None


def test_a_part_at_the_store_may_be_repeated_but_not_changed(bucket: BucketVolume) -> None:
    upload = bucket.start_upload("file")
    for number in range(1, 9):
        upload.put_part(number, bytes([number]) * 16_384)
    upload.put_part(1, bytes([1]) * 16_384)
    with pytest.raises(Unsupported, match="part 1 is at the store"):
        upload.put_part(1, b"other")
    assert upload.complete().size_bytes == 8 * 16_384


def test_a_callers_buffer_may_change_after_the_part_was_put(bucket: BucketVolume) -> None:
    upload = bucket.start_upload("file")
    buffer = bytearray(16_384)
    for number in range(10):
        buffer[:] = bytes([number]) * 16_384
        upload.put_part(number + 1, buffer)
    upload.complete()
    expected = b"".join(bytes([number]) * 16_384 for number in range(10))
    assert read(bucket, "file", 0, len(expected)) == expected


def test_a_stream_ends_at_its_limit_and_leaves_nothing(bucket: BucketVolume) -> None:
    tiny = in_memory(part_size_bytes=1, window_bytes=0, held_back_bytes=0)
    upload = tiny.start_upload("file")
    upload.put_part(1, b"1")
    upload.put_part(2, bytes(9_999))
    with pytest.raises(
        TooLarge, match=r"may have 10000 bytes here.*larger first part \(part_bytes\)"
    ):
        upload.put_part(3, b"1")
    upload.abort()
    assert names(tiny) == []
    tiny.close()


def test_an_exclusive_file_that_s3_cannot_copy_is_refused_before_the_first_byte(
    make: MakeBucket, tmp_path: Path
) -> None:
    server, bucket = make(FakeS3({}))
    local = tmp_path / "sparse"
    with local.open("wb") as sparse:
        sparse.truncate((5 << 30) + 1)
    with local.open("rb") as source, pytest.raises(TooLarge, match="5368709120"):
        bucket.upload("file", source, (5 << 30) + 1, overwrite=False)
    assert server.requests == []


def lost_replies(fake: FakeS3, *, applied: bool, skip: int = 0) -> None:
    """The reply to a completion is lost, be the upload complete or gone by then."""
    seen = []

    def fault(request: Request) -> Scripted | None:
        if request.method == "POST" and "uploadId" in request.target:
            seen.append(request)
            if len(seen) == skip + 1:
                fake.answer(request) if applied else fake.uploads.clear()
                return Scripted(hang_up=True)
        return None

    fake.fault = fault


def local_of(tmp_path: Path, data: bytes) -> BinaryIO:
    (tmp_path / "local").write_bytes(data)
    return (tmp_path / "local").open("rb")


@pytest.mark.parametrize("before", [None, b"o" * 5500, b"n" * 5500, b"shorter"])
@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_reply_to_a_completion_is_settled_by_a_look_at_the_path(
    make: MakeBucket, tmp_path: Path, applied: bool, before: bytes | None
) -> None:
    data = b"n" * 5500
    fake = FakeS3({} if before is None else {"f": before})
    lost_replies(fake, applied=applied)
    _, bucket = make(fake, part_size_bytes=1000)
    with local_of(tmp_path, data) as source:
        if applied:
            assert bucket.upload("f", source, 5500).size_bytes == 5500
        else:
            with pytest.raises(Unavailable, match="does not know the upload any more"):
                bucket.upload("f", source, 5500)
    assert fake.objects.get("f") == (data if applied else before)
    assert fake.uploads == {}


@pytest.mark.parametrize("skip", [0, 1])
def test_a_lost_reply_of_an_exclusive_upload_is_settled_as_well(
    make: MakeBucket, tmp_path: Path, skip: int
) -> None:
    # The second completion is that of the copy from the staging key.
    fake = FakeS3({})
    lost_replies(fake, applied=True, skip=skip)
    _, bucket = make(fake, part_size_bytes=1000)
    data = os.urandom(5500)
    with local_of(tmp_path, data) as source:
        assert bucket.upload("f", source, 5500, overwrite=False).size_bytes == 5500
    assert fake.objects == {"f": data}


@pytest.mark.parametrize("broken", ["lost", "500"])
def test_a_file_that_was_created_exclusively_is_no_obstacle_to_its_own_repeat(
    make: MakeBucket, broken: str
) -> None:
    fake = FakeS3({"taken": b"1"})
    once = [Scripted(hang_up=True) if broken == "lost" else error(500, "InternalError")]

    def fault(request: Request) -> Scripted | None:
        if request.method == "PUT" and once:
            fake.answer(request)
            return once.pop()
        return None

    fake.fault = fault
    _, bucket = make(fake)
    stored = bucket.put("f", b"1", overwrite=False)
    assert stored == bucket.stat("f")
    for path in ("f", "taken"):
        with pytest.raises(AlreadyExists):
            # Of the same bytes, but another's.
            bucket.put(path, b"1", overwrite=False)


def test_whoever_may_not_look_at_the_path_is_told_that_the_upload_failed(
    make: MakeBucket, tmp_path: Path
) -> None:
    fake = FakeS3({})
    lost_replies(fake, applied=True)
    lose = fake.fault

    def fault(request: Request) -> Scripted | None:
        return error(403, "AccessDenied") if request.method == "HEAD" else lose(request)

    fake.fault = fault
    _, bucket = make(fake, part_size_bytes=1000)
    with local_of(tmp_path, bytes(5500)) as source, pytest.raises(Unavailable):
        bucket.upload("f", source, 5500)


# --- A store that answers wrongly


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "AccessDenied", PermissionDenied),
        (403, "SignatureDoesNotMatch", Unauthenticated),
        (403, "InvalidAccessKeyId", Unauthenticated),
        (400, "ExpiredToken", Unauthenticated),
        (401, "Unauthorized", Unauthenticated),
        (404, "NoSuchBucket", NotFound),
        (400, "KeyTooLongError", InvalidRequest),
        (400, "EntityTooLarge", TooLarge),
        (503, "SlowDown", Unavailable),
        (500, "InternalError", Unavailable),
        (429, "TooManyRequests", Unavailable),
        (507, "XMinioStorageFull", NoSpace),
        (400, "XMinioAdminBucketQuotaExceeded", QuotaExceeded),
        (403, "QuotaExceeded", QuotaExceeded),
    ],
)
def test_each_answer_is_the_right_error_and_tells_no_secret(
    make: MakeBucket,
    caplog: pytest.LogCaptureFixture,
    status: int,
    code: str,
    kind: type[VolumeError],
) -> None:
    leak = f"<StringToSign>{SECRET}</StringToSign><AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId>"
    server, bucket = make(FakeS3({}, lambda _: error(status, code, leak)), deadline_seconds=0.2)
    with caplog.at_level(logging.DEBUG):
        for call in (
            lambda: bucket.list_page("d"),
            lambda: bucket.put("d/f", b"1"),
            lambda: read(bucket, "d/f", 0, 1),
        ):
            with pytest.raises(kind) as caught:
                call()
            told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
            assert "d" in caught.value.path
            assert caught.value.operation in ("list", "put", "read")
            for secret in (SECRET, ACCESS_KEY, server.url, "X-Amz"):
                assert secret not in told
    for secret in (SECRET, ACCESS_KEY):
        assert secret not in caplog.text
        assert secret.encode() not in pickle.dumps(bucket)


def test_a_store_that_is_down_is_given_up_at_the_deadline(make: MakeBucket) -> None:
    server, bucket = make(FakeS3({}), deadline_seconds=0.2)
    server.__exit__()
    with pytest.raises(Unavailable, match=r"stat file: the store cannot be reached .*refused"):
        bucket.stat("file")


def test_a_store_that_was_down_for_a_moment_is_asked_again(make: MakeBucket) -> None:
    failures = [error(503, "SlowDown"), Scripted(hang_up=True)]
    _, bucket = make(FakeS3({"f": b"0123456789"}, lambda _: failures.pop() if failures else None))
    assert read(bucket, "f", 2, 5) == b"234"


@pytest.mark.parametrize(("status", "retry_after"), [(429, "1"), (503, "86400")])
def test_a_storm_of_refusals_is_ridden_out_or_ends_at_the_deadline(
    make: MakeBucket, tmp_path: Path, status: int, retry_after: str
) -> None:
    # obstore takes no notice of Retry-After: neither of a second nor of a day.
    refusal = replace(error(status, "SlowDown"), headers={"Retry-After": retry_after})
    fake = FakeS3({"d/f": b"0123456789"})
    _, bucket = make(fake, deadline_seconds=20, part_size_bytes=1000)
    storm = [refusal] * 12
    fake.fault = lambda _: storm.pop() if storm and len(fake.requests) % 3 else None
    assert names(bucket, "d") == ["f"]
    assert read(bucket, "d/f", 2, 5) == b"234"
    with local_of(tmp_path, bytes(5500)) as source:
        assert bucket.upload("d/g", source, 5500).size_bytes == 5500
    assert bucket.put("d/h", b"1").size_bytes == 1
    fake.fault = lambda _: refusal
    _, impatient = make(fake, deadline_seconds=0.3, part_size_bytes=1000)
    with local_of(tmp_path, bytes(5500)) as source:
        for call in (
            lambda: impatient.list_page("d"),
            lambda: read(impatient, "d/f", 2, 5),
            lambda: impatient.put("d/h", b"2"),
            lambda: impatient.upload("d/g", source, 5500),
        ):
            asked, started = len(fake.requests), time.monotonic()
            with pytest.raises(Unavailable, match=f"HTTP {status}"):
                call()
            assert len(fake.requests) - asked > 1
            assert time.monotonic() - started < 10
    assert fake.objects["d/h"] == b"1"
    assert fake.uploads == {}


def test_a_body_that_breaks_off_is_gone_on_with_or_an_error(make: MakeBucket) -> None:
    data = bytes(range(256)) * 4096
    cuts = [300_000, 70_000]

    def cut(request: Request) -> Scripted | None:
        if request.method != "GET" or not cuts:
            return None
        whole = object_answer(request, data)
        headers = whole.headers | {"Content-Length": str(len(whole.body))}
        return replace(whole, headers=headers, body=whole.body[: cuts.pop()])

    server, bucket = make(FakeS3({"f": data}, cut))
    assert read(bucket, "f", 1000, 900_000) == data[1000:900_000]
    ranges = [r.headers["range"] for r in server.requests if r.method == "GET"]
    assert ranges == ["bytes=1000-899999", "bytes=71000-899999", "bytes=371000-899999"]
    cuts.extend([0] * 1000)
    with pytest.raises(Unavailable):
        read(bucket, "f", 0, 900_000)


def test_a_store_that_takes_no_notice_of_the_range_is_an_error(make: MakeBucket) -> None:
    def whole(request: Request) -> Scripted | None:
        headers = {"ETag": etag_of(b"0123456789"), "Last-Modified": MODIFIED}
        return Scripted(headers=headers, body=b"0123456789") if request.method == "GET" else None

    _, bucket = make(FakeS3({"f": b"0123456789"}, whole))
    with pytest.raises(InexactRange):
        read(bucket, "f", 3, 7)


def test_a_shifted_range_is_an_error(make: MakeBucket) -> None:
    def shifted(request: Request) -> Scripted | None:
        if request.method != "GET":
            return None
        other = replace(request, headers=request.headers | {"range": "bytes=0-3"})
        return object_answer(other, b"0" * 9)

    _, bucket = make(FakeS3({"f": b"0123456789"}, shifted))
    with pytest.raises(InexactRange):
        read(bucket, "f", 3, 7)


def test_another_version_is_an_error_even_where_the_store_does_not_compare(
    make: MakeBucket,
) -> None:
    fake = FakeS3({"f": b"old-content"})
    server, bucket = make(fake)
    version = bucket.stat("f").version
    fake.objects["f"] = b"new-content"
    with pytest.raises(PreconditionFailed):
        read(bucket, "f", 0, 3, version=version)
    assert server.requests[-1].headers["if-match"] == f'"{version}"'

    def careless(request: Request) -> Scripted | None:
        request.headers.pop("if-match", None)
        return None

    fake.fault = careless
    with pytest.raises(PreconditionFailed):
        read(bucket, "f", 0, 3, version=version)


@pytest.mark.parametrize("num_bytes", [5, 2 << 20])
@pytest.mark.parametrize("closed", [False, True])
def test_a_call_that_hangs_ends_when_it_is_cancelled_or_the_volume_closed(
    make: MakeBucket, closed: bool, num_bytes: int
) -> None:
    release, cancel, asked = threading.Event(), threading.Event(), threading.Event()

    def hang(request: Request) -> Scripted | None:
        asked.set()
        release.wait(60)
        return None

    _, bucket = make(FakeS3({"f": bytes(num_bytes)}, hang))
    caught: list[BaseException] = []

    def run() -> None:
        try:
            read(bucket, "f", 0, num_bytes, cancel=cancel)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert asked.wait(30)
    bucket.close() if closed else cancel.set()
    thread.join(10)
    assert not thread.is_alive()
    release.set()
    assert [type(error) for error in caught] == [Cancelled]


def test_no_thread_is_left_behind(bucket: BucketVolume) -> None:
    bucket.put("f", b"1")
    assert bucket.stat("f").size_bytes == 1
    ours = [one for one in threading.enumerate() if one.name.startswith("trainmount-bucket")]
    assert {thread.name for thread in ours} == {"trainmount-bucket", "trainmount-bucket-call"}
    bucket.close()
    bucket.close()
    for thread in ours:
        thread.join(10)
    assert not any(thread.is_alive() for thread in ours)


def test_many_short_calls_at_once_each_get_their_own_answer(bucket: BucketVolume) -> None:
    for number in range(20):
        bucket.put(f"f-{number}", bytes(number))
    with ThreadPoolExecutor(20) as threads:
        stats = list(threads.map(bucket.stat, [f"f-{number}" for number in range(20)] * 10))
    assert [stat.size_bytes for stat in stats] == list(range(20)) * 10
