"""Reads over a bad wire: exactly the bytes that were asked for, or an error."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN, MakeVolume, Request, Scripted

from trainmount_files import (
    ByteRange,
    InexactRange,
    NotFound,
    PreconditionFailed,
    Unavailable,
    VolumeError,
)
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.retry import RetryPolicy
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault

DATA = bytes((number * 7 + number // 256) % 256 for number in range(100_000))
MODIFIED = "Wed, 21 Oct 2026 07:28:00 GMT"
MODIFIED_SECONDS = 1_792_567_680


def read(volume: FilesApiVolume, start: int, end: int, version: str | None = None) -> bytes:
    buffer = bytearray(end - start)
    volume.read_into("file", ByteRange(start, end), buffer, version=version)
    return bytes(buffer)


def range_of(request: Request) -> tuple[int, int]:
    first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
    return int(first), int(last) + 1


def exact(request: Request, data: bytes = DATA, modified: str | None = MODIFIED) -> Scripted:
    start, end = range_of(request)
    headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
    if modified is not None:
        headers["Last-Modified"] = modified
    return Scripted(status=206, headers=headers, body=data[start:end])


def cut(answer: Scripted, size_bytes: int) -> Scripted:
    headers = {**answer.headers, "Content-Length": str(len(answer.body))}
    return replace(answer, headers=headers, body=answer.body[:size_bytes])


def test_each_request_is_for_uncompressed_bytes_of_one_range_and_version(
    scripted: MakeVolume,
) -> None:
    server, volume = scripted(exact)
    assert read(volume, 10, 50, f"{len(DATA)}-{MODIFIED_SECONDS}") == DATA[10:50]
    (request,) = server.requests
    assert request.headers["range"] == "bytes=10-49"
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["if-unmodified-since"] == MODIFIED
    assert request.headers["authorization"] == f"Bearer {TOKEN}"


def test_a_body_cut_eleven_times_is_continued_at_the_first_missing_byte(
    scripted: MakeVolume,
) -> None:
    def script(request: Request) -> Scripted:
        number = len(server.requests)
        answer = exact(request)
        return cut(answer, 1000 * number) if number <= 11 else answer

    server, volume = scripted(script)
    assert read(volume, 100, 90_000) == DATA[100:90_000]
    starts = [range_of(request)[0] for request in server.requests]
    assert starts == [100 + sum(range(number)) * 1000 for number in range(1, 13)]
    assert all(range_of(request)[1] == 90_000 for request in server.requests)
    assert "if-unmodified-since" not in server.requests[0].headers
    assert all(r.headers["if-unmodified-since"] == MODIFIED for r in server.requests[1:])


def test_a_shifted_answer_is_thrown_away(scripted: MakeVolume) -> None:
    def script(request: Request) -> Scripted:
        if len(server.requests) > 1:
            return exact(request)
        start, end = range_of(request)
        headers = {"Content-Range": f"bytes {start - 4096}-{end - 4097}/{len(DATA)}"}
        return Scripted(status=206, headers=headers, body=DATA[start - 4096 : end - 4096])

    server, volume = scripted(script)
    assert read(volume, 5000, 9000) == DATA[5000:9000]
    assert len(server.requests) == 2


def test_a_whole_file_in_place_of_a_range_is_refused_and_not_drained(scripted: MakeVolume) -> None:
    whole = bytes(32 << 20)
    server, volume = scripted(lambda _: Scripted(headers={"Last-Modified": MODIFIED}, body=whole))
    with pytest.raises(InexactRange):
        read(volume, 100, 150)
    assert len(server.requests) == 3
    assert server.sent_bytes < 3 * (8 << 20)


@pytest.mark.parametrize("version", [None, f"{len(DATA)}-{MODIFIED_SECONDS}"])
def test_a_whole_file_of_the_length_of_the_range_is_the_range(
    scripted: MakeVolume, version: str | None
) -> None:
    server, volume = scripted(lambda _: Scripted(headers={"Last-Modified": MODIFIED}, body=DATA))
    assert read(volume, 0, len(DATA), version) == DATA
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("version", "headers", "error"),
    [
        # The file's size is known to be another one: it has been replaced.
        (f"50000-{MODIFIED_SECONDS}", {}, PreconditionFailed),
        (None, {"Content-Encoding": "gzip"}, InexactRange),
        (None, {"Content-Length": "101"}, InexactRange),
    ],
)
def test_a_whole_file_that_is_not_the_range_is_refused(
    scripted: MakeVolume, version: str | None, headers: dict[str, str], error: type[VolumeError]
) -> None:
    answer = Scripted(headers={"Last-Modified": MODIFIED, **headers}, body=DATA[:100])
    _, volume = scripted(lambda _: answer)
    with pytest.raises(error):
        read(volume, 0, 100, version)


def test_a_resumed_read_is_never_continued_with_a_whole_file(scripted: MakeVolume) -> None:
    def script(request: Request) -> Scripted:
        if len(server.requests) == 1:
            return cut(exact(request), 60)
        return Scripted(headers={"Last-Modified": MODIFIED}, body=DATA)

    server, volume = scripted(script)
    with pytest.raises(InexactRange):
        read(volume, 0, 100)


@pytest.mark.parametrize("status", [200, 206])
def test_a_body_that_was_compressed_on_its_way_is_refused(
    scripted: MakeVolume, status: int
) -> None:
    packed = gzip.compress(b"[" + b"1," * 560 + b"1]")

    def script(request: Request) -> Scripted:
        start, end = range_of(request)
        headers = {
            "Content-Encoding": "gzip",
            "Content-Range": f"bytes {start}-{end - 1}/1123",
        }
        return Scripted(status=status, headers=headers, body=packed)

    _, volume = scripted(script)
    with pytest.raises(InexactRange):
        read(volume, 0, 1123)


def test_a_file_that_is_compressed_itself_arrives_as_it_is(remote: FilesApiVolume) -> None:
    packed = gzip.compress(DATA)
    remote.put("file", packed)
    assert read(remote, 0, len(packed)) == packed


def test_a_body_that_never_comes_whole_is_an_error_within_the_deadline(
    scripted: MakeVolume,
) -> None:
    server, _ = scripted(lambda request: cut(exact(request, modified=None), 900))
    hasty = replace(OPTIONS, retry=replace(OPTIONS.retry, deadline_seconds=0.2))
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), hasty)
    with pytest.raises(Unavailable, match="900 of 1000 bytes"):
        read(volume, 0, 1000)
    volume.close()


def test_without_a_modification_time_a_cut_body_is_read_from_its_start_again(
    scripted: MakeVolume,
) -> None:
    def script(request: Request) -> Scripted:
        answer = exact(request, modified=None)
        return cut(answer, 900) if len(server.requests) == 1 else answer

    server, volume = scripted(script)
    assert read(volume, 0, 1000) == DATA[:1000]
    assert [range_of(request) for request in server.requests] == [(0, 1000), (0, 1000)]


def test_blocks_of_two_versions_are_never_joined(scripted: MakeVolume) -> None:
    later = "Wed, 21 Oct 2026 07:28:02 GMT"

    def script(request: Request) -> Scripted:
        if len(server.requests) == 1:
            return cut(exact(request), 500)
        return exact(request, data=bytes(len(DATA)), modified=later)

    server, volume = scripted(script)
    with pytest.raises(PreconditionFailed):
        read(volume, 0, 1000)


@pytest.mark.parametrize(
    ("size", "modified"), [(len(DATA) + 1, MODIFIED), (len(DATA), "Wed, 21 Oct 2026 07:27:59 GMT")]
)
def test_an_answer_of_another_version_is_refused_though_the_server_ignored_the_condition(
    scripted: MakeVolume, size: int, modified: str
) -> None:
    server, volume = scripted(lambda r: exact(r, data=DATA.ljust(size), modified=modified))
    with pytest.raises(PreconditionFailed):
        read(volume, 0, 100, f"{len(DATA)}-{MODIFIED_SECONDS}")
    assert len(server.requests) == 1


@pytest.mark.parametrize("content_range", ["", "bytes 0-99", "bytes 0-98/1000", "items 0-99/1000"])
def test_an_answer_that_does_not_say_its_range_is_refused(
    scripted: MakeVolume, content_range: str
) -> None:
    headers = {"Content-Range": content_range}
    _, volume = scripted(lambda _: Scripted(status=206, headers=headers, body=DATA[:100]))
    with pytest.raises(InexactRange):
        read(volume, 0, 100)


def test_a_body_longer_than_its_range_is_refused(scripted: MakeVolume) -> None:
    headers = {"Content-Range": "bytes 0-99/100000", "Last-Modified": MODIFIED}
    _, volume = scripted(lambda _: Scripted(status=206, headers=headers, body=DATA[:101]))
    with pytest.raises(InexactRange):
        read(volume, 0, 100)


def test_a_body_that_goes_on_after_its_range_is_refused(scripted: MakeVolume) -> None:
    headers = {
        "Content-Range": "bytes 0-99/100000",
        "Last-Modified": MODIFIED,
        "Transfer-Encoding": "chunked",
    }
    body = b"65\r\n" + DATA[:101] + b"\r\n0\r\n\r\n"
    _, volume = scripted(lambda _: Scripted(status=206, headers=headers, body=body))
    with pytest.raises(InexactRange, match="longer than the range"):
        read(volume, 0, 100)


def test_bytes_that_had_to_come_twice_are_counted_once(
    scripted: MakeVolume, tmp_path: Path
) -> None:
    def script(request: Request) -> Scripted:
        answer = exact(request, modified=None)
        return cut(answer, 900) if len(server.requests) == 1 else answer

    server, volume = scripted(script)
    arrived: list[int] = []
    with (tmp_path / "target").open("w+b") as file:
        volume.read_to_file("file", ByteRange(0, 1000), file.fileno(), progress=arrived.append)
    assert (tmp_path / "target").read_bytes() == DATA[:1000]
    assert [range_of(request) for request in server.requests] == [(0, 1000), (0, 1000)]
    assert arrived == [900, 100]


def test_one_server_error_is_ridden_out(remote: FilesApiVolume, server: LocalServer) -> None:
    remote.put("file", DATA)
    for status in (408, 429, 500, 502, 503, 504):
        server.inject(Fault(route="presigned_get", status=status, count=1))
        assert read(remote, 5, 5000) == DATA[5:5000]


def test_a_server_error_that_stays_is_named_at_the_deadline(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    remote.put("file", DATA)
    server.inject(
        Fault(route="presigned_get", status=503),
        Fault(route="get_file", status=429, retry_after="86400"),
    )
    with pytest.raises(Unavailable, match="HTTP 429"):
        read(remote, 0, 100)


def test_the_files_api_gets_a_time_of_its_own_after_the_signed_url_took_all(
    scripted: MakeVolume,
) -> None:
    asked = []

    def script(request: Request) -> Scripted:
        if request.method == "POST":
            sleep(2.1)
            return Scripted(status=403)
        asked.append(request.target)
        return exact(request) if len(asked) > 1 else Scripted(status=503)

    server, _ = scripted(script)
    hasty = replace(OPTIONS, retry=replace(OPTIONS.retry, deadline_seconds=2))
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), hasty)
    assert read(volume, 0, 100) == DATA[:100]
    assert len(asked) == 2
    volume.close()


@pytest.mark.parametrize("status", [400, 403, 404, 500, 501, 503])
def test_a_store_that_gives_no_signed_url_is_read_without(
    remote: FilesApiVolume, server: LocalServer, status: int
) -> None:
    remote.put("file", DATA)
    # One 5xx is asked again; a wait beyond the patience for this question ends that.
    server.inject(Fault(route="create_download_url", status=status, retry_after="60"))
    assert read(remote, 0, 100) == DATA[:100]
    assert read(remote, 100, 200) == DATA[100:200]
    # Remembered for a while.
    assert server.statistics()["requests"]["create_download_url"] == 1


@pytest.mark.parametrize("fault", [{"status": 403}, {"ignore_range": True}, {"status": 503}])
def test_a_signed_url_that_is_refused_is_replaced_by_the_files_api(
    remote: FilesApiVolume, server: LocalServer, fault: dict[str, object]
) -> None:
    remote.put("file", DATA)
    server.inject(Fault(route="presigned_get", **fault))  # type: ignore[arg-type]
    assert read(remote, 100, 200) == DATA[100:200]


def test_a_url_that_was_refused_is_not_kept_for_later(
    remote: FilesApiVolume, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmount_files.files_api.download._WITHOUT_SIGNED_SECONDS", 0.0)
    remote.put("file", DATA)
    server.inject(Fault(route="presigned_get", status=403, count=1))
    assert read(remote, 0, 100) == DATA[:100]
    assert read(remote, 100, 200) == DATA[100:200]
    requests = server.statistics()["requests"]
    assert (requests["create_download_url"], requests["presigned_get"]) == (2, 2)
    assert requests["get_file"] == 1


def test_a_store_that_cannot_be_connected_to_is_left_for_the_files_api_at_once(
    scripted: MakeVolume,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()[1]

    def script(request: Request) -> Scripted:
        if request.method == "POST":
            url = f"http://127.0.0.1:{closed}/signed"
            return Scripted(body=json.dumps({"url": url, "headers": []}).encode())
        return exact(request)

    server, _ = scripted(script)
    # Whoever asks the store again waits for longer than a test may take.
    patient = replace(OPTIONS, retry=RetryPolicy(deadline_seconds=900, first_delay_seconds=1e4))
    patient = replace(patient, retry=replace(patient.retry, max_delay_seconds=1e4))
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), patient)
    assert read(volume, 0, 100) == DATA[:100]
    volume.close()


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_refused_condition_means_that_the_file_has_changed(
    remote: FilesApiVolume, server: LocalServer, is_direct: bool
) -> None:
    remote.put("file", DATA)
    server.inject(
        Fault(route="create_download_url", status=403 if is_direct else None),
        Fault(route="presigned_get", status=412),
        Fault(route="get_file", status=412),
    )
    with pytest.raises(PreconditionFailed, match="the file has changed"):
        read(remote, 0, 100)
    requests = server.statistics()["requests"]
    assert requests.get("presigned_get", 0) + requests.get("get_file", 0) == 1


EXPIRED = b"""<?xml version="1.0"?>
<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"""


def test_eight_threads_renew_an_expired_url_with_one_request(scripted: MakeVolume) -> None:
    asked = itertools.count(1)

    def script(request: Request) -> Scripted:
        if request.method == "POST":
            url = f"http://{request.headers['host']}/signed/{next(asked)}"
            return Scripted(body=json.dumps({"url": url, "headers": []}).encode())
        assert "authorization" not in request.headers
        return Scripted(status=403, body=EXPIRED) if request.target[-1] == "1" else exact(request)

    server, _ = scripted(script)
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), OPTIONS)
    barrier = threading.Barrier(8)
    wrong: list[object] = []

    def run(number: int) -> None:
        start = number * 1000
        barrier.wait()
        try:
            found = read(volume, start, start + 1000)
        except VolumeError as error:
            wrong.append(error)
        else:
            if found != DATA[start : start + 1000]:
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    volume.close()
    assert wrong == []
    assert len(server.asked("POST", "/api/2.0/fs/create-download-url")) == 2


def test_a_signed_url_that_always_is_expired_is_given_up(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    remote.put("file", DATA)
    server.inject(Fault(route="presigned_get", expired_url=True))
    assert read(remote, 0, 100) == DATA[:100]
    assert server.statistics()["requests"]["presigned_get"] == 4


def test_a_file_deleted_behind_a_signed_url_is_not_found(
    remote: FilesApiVolume, served: Path
) -> None:
    remote.put("file", DATA)
    assert read(remote, 0, 10) == DATA[:10]
    (served / "file").unlink()
    with pytest.raises(NotFound):
        read(remote, 0, 10)


def test_a_file_replaced_behind_a_signed_url_is_read_anew(remote: FilesApiVolume) -> None:
    remote.put("file", DATA)
    assert read(remote, 0, 10) == DATA[:10]
    new = remote.put("file", b"new content")
    assert read(remote, 0, 11, new.version) == b"new content"


def test_a_file_replaced_between_blocks_is_an_error(remote: FilesApiVolume, served: Path) -> None:
    version = remote.put("file", DATA).version
    assert read(remote, 0, 100, version) == DATA[:100]
    (served / "file").write_bytes(DATA[::-1])
    status = (served / "file").stat()
    os.utime(served / "file", ns=(status.st_atime_ns, status.st_mtime_ns + 2_000_000_000))
    with pytest.raises(PreconditionFailed):
        read(remote, 100, 200, version)


def test_a_version_of_another_kind_of_volume_matches_nothing(remote: FilesApiVolume) -> None:
    remote.put("file", DATA)
    with pytest.raises(PreconditionFailed):
        read(remote, 0, 10, "100000-1796025641000000000-77")


def test_a_small_read_asks_once_and_a_large_one_by_signed_url(
    server: LocalServer, remote: FilesApiVolume
) -> None:
    remote.put("file", DATA)
    options = replace(OPTIONS, direct_read_max_bytes=1000)
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    read(volume, 0, 1000)
    assert "create_download_url" not in server.statistics()["requests"]
    read(volume, 0, 1001)
    read(volume, 0, 10)
    requests = server.statistics()["requests"]
    assert (requests["get_file"], requests["presigned_get"]) == (1, 2)
    volume.close()
