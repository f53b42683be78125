"""Requests that no good client sends, and disks on a bad day: each is refused as what it is, and
harms nobody else.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3

from trainmount_files.server import LocalServer, ServerSettings
from trainmount_files.server.errors import disk_refusal
from trainmount_files.server.faults import FaultError, Faults
from trainmount_files.server.implicit import probe_marks

TOKEN = "dapi-token-of-the-tests"
VOLUME = "main/default/data"
FILES = f"/api/2.0/fs/files/Volumes/{VOLUME}"
DIRECTORIES = f"/api/2.0/fs/directories/Volumes/{VOLUME}"
HOUR_NS = 3600 * 10**9

Http = Callable[..., urllib3.BaseHTTPResponse]


class Wire:
    """One connection, byte for byte."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=20)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def ask(self, line: str, *headers: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Send a request and read its answer; `line` with its version."""
        lines = [line, f"Authorization: Bearer {TOKEN}", *headers, "", ""]
        self.socket.sendall("\r\n".join(lines).encode() + body)
        status = int(self._file.readline().split()[1])
        answered = {}
        while (text := self._file.readline().rstrip()) != b"":
            name, _, value = text.decode().partition(": ")
            answered[name] = value
        return status, answered, self._file.read(int(answered.get("Content-Length", "0")))


def client_of(url: str) -> Http:
    pool = urllib3.PoolManager(retries=False)

    def call(method: str, target: str, **options: Any) -> urllib3.BaseHTTPResponse:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return pool.request(method, url + target, headers=headers, **options)

    return call


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (*pieces, b""))


def initiate(http: Http, name: str = "file", query: str = "") -> str:
    answer = http("POST", f"{FILES}/{name}?action=initiate-upload{query}")
    return str(answer.json()["multipart_upload"]["session_token"])


def put_part(http: Http, token: str, body: bytes) -> dict[str, object]:
    target = f"{FILES}/file?upload_type=multipart&session_token={token}&part_number=1"
    return {"part_number": 1, "etag": http("PUT", target, body=body).headers["ETag"]}


def complete(http: Http, token: str, document: object) -> urllib3.BaseHTTPResponse:
    target = f"{FILES}/file?action=complete-upload&upload_type=multipart&session_token={token}"
    body = document if isinstance(document, bytes) else None
    return http("POST", target, **({"body": body} if body else {"json": document}))


# Names and wire


def test_the_folder_of_the_server_is_out_of_reach(http: Http, served: Path) -> None:
    folder = served / ".trainmount" / "uploads" / initiate(http).partition(".")[0]
    before = (folder / "upload.json").read_bytes()
    inside = f"Volumes/.trainmount/uploads/{folder.name}"

    for method, target in (
        ("GET", f"/api/2.0/fs/files/{inside}/upload.json"),
        ("HEAD", f"/api/2.0/fs/files/{inside}/upload.json"),
        ("PUT", f"/api/2.0/fs/files/{inside}/upload.json"),
        ("DELETE", f"/api/2.0/fs/files/{inside}/upload.json"),
        ("GET", f"/api/2.0/fs/directories/{inside}"),
        ("PUT", f"/api/2.0/fs/directories/{inside}/new"),
        ("POST", f"/api/2.0/fs/create-download-url?path=/{inside}/upload.json"),
        ("POST", f"/api/2.0/fs/files/{inside}/new?action=initiate-upload"),
    ):
        assert http(method, target).status == 404, (method, target)
    assert (folder / "upload.json").read_bytes() == before
    assert [one.name for one in folder.iterdir()] == ["upload.json"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_called_compressed_is_stored_as_it_came(
    http: Http, is_chunked: bool
) -> None:
    packed = gzip.compress(b"row\n" * 1000)
    body = iter([packed]) if is_chunked else packed

    answer = http(
        "PUT",
        f"{FILES}/x.csv.gz",
        body=body,
        chunked=is_chunked,
        headers={"Content-Encoding": "gzip"},
    )

    assert answer.status == 204
    assert http("GET", f"{FILES}/x.csv.gz").data == packed


def test_a_body_of_single_bytes_is_stored_exactly(http: Http) -> None:
    content = bytes(range(256)) * 12
    answer = http(
        "PUT", f"{FILES}/file", body=(bytes([one]) for one in content), chunked=True, headers={}
    )
    assert answer.status == 204
    assert http("GET", f"{FILES}/file").data == content


def test_a_request_as_to_a_proxy_is_answered(server: LocalServer, http: Http) -> None:
    http("PUT", f"{FILES}/file", body=b"content")
    with Wire(server.url) as wire:
        line = f"GET {server.url}{FILES}/file HTTP/1.1"
        assert wire.ask(line, "Host: x")[::2] == (200, b"content")


def test_a_signed_url_for_a_client_that_names_no_host_leads_here(
    server: LocalServer, http: Http
) -> None:
    http("PUT", f"{FILES}/file", body=b"content")
    target = f"/api/2.0/fs/create-download-url?path=/Volumes/{VOLUME}/file"
    with Wire(server.url) as wire:
        status, _, body = wire.ask(f"POST {target} HTTP/1.0")
    assert status == 200
    assert body.startswith(b'{"url": "' + server.url.encode() + b"/presigned/")


def test_trailers_belong_to_the_body_and_to_no_later_request(
    server: LocalServer, http: Http
) -> None:
    body = chunked(b"hello")[:-2] + b"If-Unmodified-Since: Thu, 01 Jan 1970 00:00:00 GMT\r\n\r\n"
    with Wire(server.url) as wire:
        line = f"PUT {FILES}/file HTTP/1.1"
        status, headers, _ = wire.ask(line, "Host: x", "Transfer-Encoding: chunked", body=body)
        assert (status, headers["Connection"]) == (204, "close")
        assert wire.socket.recv(1) == b""
    assert http("GET", f"{FILES}/file").data == b"hello"


def test_a_path_too_long_for_any_disk_is_refused_in_json(http: Http) -> None:
    answer = http("PUT", f"{FILES}/{'%C3%BC' * 2000}", body=b"x")
    assert (answer.status, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


@pytest.mark.parametrize(
    "document",
    [
        b"[" * 100_000,
        b"{",
        b"[]",
        b'{"parts": [{"part_number": Infinity, "etag": "x"}]}',
        b'{"parts": [{"part_number": 1e400, "etag": "x"}]}',
        b'{"parts": [{"part_number": true, "etag": "x"}]}',
        b'{"parts": [{"part_number": "1_0", "etag": "x"}]}',
        b'{"parts": [{"part_number": 1, "etag": "%b/00001-%b"}]}' % (b"x" * 300, b"a" * 32),
        b'{"parts": [{"part_number": 1, "etag": "\\ud800/00001-%b"}]}' % (b"a" * 32),
        b'{"parts": [{"part_number": 1, "etag": "\\u0000"}]}',
    ],
)
def test_a_complete_that_is_nonsense_is_refused(http: Http, document: bytes) -> None:
    answer = complete(http, initiate(http), document)
    assert (answer.status, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


@pytest.mark.parametrize("sent", [b'{"parts": [', b"zz\r\n"])
def test_a_client_that_goes_away_is_no_failure_of_the_server(
    server: LocalServer, http: Http, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    target = f"{FILES}/file?action=complete-upload&session_token={initiate(http)}"
    with caplog.at_level(logging.ERROR), Wire(server.url) as wire:
        head = f"POST {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        wire.socket.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode() + sent)
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.socket.recv(1000) == b""
    assert caplog.records == []


@pytest.mark.parametrize("line", ["GET /presigned/the-secret\xff HTTP/1.1", "GET / HTTP/1.1"])
def test_a_request_that_is_no_http_leaves_no_secret_in_the_log(
    server: LocalServer, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    with caplog.at_level(logging.DEBUG), Wire(server.url) as wire:
        head = f"{line}\r\nHost: x\r\nAuthorization: Bearer the-secret\x01\r\n\r\n"
        wire.socket.sendall(head.encode("latin-1"))
        assert wire.socket.recv(1000).startswith(b"HTTP/1.0 400 ")
    assert [record.levelname for record in caplog.records if record.name != "asyncio"] == [
        "WARNING"
    ]
    assert "the-secret" not in caplog.text


@pytest.mark.parametrize("other", [f"{VOLUME}/other", "main/default/theirs/file"])
def test_an_upload_is_nobodys_by_another_path(http: Http, served: Path, other: str) -> None:
    (served / "main/default/theirs").mkdir()
    token = initiate(http)
    part = put_part(http, token, b"content")
    query = f"upload_type=multipart&session_token={token}"
    theirs = f"/api/2.0/fs/files/Volumes/{other}"
    body = {"path": f"/Volumes/{other}", "session_token": token, "start_part_number": 1, "count": 1}

    for answer in (
        http("PUT", f"{theirs}?{query}&part_number=1", body=b"evil"),
        http("POST", f"{theirs}?action=complete-upload&{query}", json={"parts": [part]}),
        http("POST", f"{theirs}?action=abort-upload&{query}"),
        http("POST", "/api/2.0/fs/create-upload-part-urls", json=body),
        http("POST", "/api/2.0/fs/create-abort-upload-url", json=body),
        http("POST", "/api/2.0/fs/create-resumable-upload-url", json=body),
    ):
        assert (answer.status, answer.json()["error_code"]) == (404, "NOT_FOUND")

    assert complete(http, token, {"parts": [part]}).status == 200
    assert http("GET", f"{FILES}/file").data == b"content"


def test_a_part_counts_once_and_in_its_last_version(http: Http, server: LocalServer) -> None:
    token = initiate(http)
    content = b"n" * (5 << 20)  # as large as one must be that is not the last
    old, new = put_part(http, token, b"old"), put_part(http, token, content)
    assert server.statistics()["staged_bytes"] == len(content)

    for parts in ([old], [new, new], [old, new]):
        answer = complete(http, token, {"parts": parts})
        assert (answer.status, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")

    assert complete(http, token, {"parts": [new]}).status == 200
    assert http("GET", f"{FILES}/file").data == content


def test_completes_at_once_are_one(http: Http) -> None:
    for number in range(10):
        token = initiate(http)
        content = bytes([number]) * (1 << 20)
        parts = {"parts": [put_part(http, token, content)]}
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: complete(http, token, parts), range(8)))  # noqa: B023
        assert [answer.status for answer in answers] == [200] * 8
        assert http("GET", f"{FILES}/file").data == content


def test_a_part_of_no_upload_is_refused_before_its_bytes_come(
    server: LocalServer, http: Http
) -> None:
    token = initiate(http)
    document = {
        "path": f"/Volumes/{VOLUME}/file",
        "session_token": token,
        "start_part_number": 1,
        "count": 1,
    }
    urls = http("POST", "/api/2.0/fs/create-upload-part-urls", json=document).json()
    target = urlsplit(urls["upload_part_urls"][0]["url"]).path
    http("POST", f"{FILES}/file?action=abort-upload&session_token={token}")

    with Wire(server.url) as wire:
        head = f"PUT {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000000\r\n\r\n"
        wire.socket.sendall(head.encode())
        answer = wire.socket.recv(1000)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"Content-Type: application/xml" in answer


def test_a_range_of_another_version_is_the_whole_file(http: Http) -> None:
    http("PUT", f"{FILES}/file", body=b"0123456789")
    current = http("HEAD", f"{FILES}/file").headers["Last-Modified"]
    for validator, status, data in (
        (current, 206, b"23"),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 200, b"0123456789"),
        ('"another"', 200, b"0123456789"),
    ):
        headers = {"Range": "bytes=2-3", "If-Range": validator}
        answer = http("GET", f"{FILES}/file", headers=headers)
        assert (answer.status, answer.data) == (status, data)


# Others and the disk


def test_a_lock_that_another_server_holds_keeps_only_its_own_path_waiting(
    server: LocalServer, http: Http, served: Path
) -> None:
    http("PUT", f"{FILES}/file", body=b"old")
    locks = sorted((served / ".trainmount" / "locks").iterdir())
    held = [os.open(path, os.O_RDWR) for path in locks]
    done = threading.Event()

    def put() -> None:
        http("PUT", f"{FILES}/file", body=b"new")
        done.set()

    writer = threading.Thread(target=put)
    try:
        for fd in held:
            fcntl.flock(fd, fcntl.LOCK_EX)
        writer.start()
        for _ in range(20):
            assert http("GET", f"{FILES}/file", timeout=20).data == b"old"
        assert not done.is_set()
    finally:
        for fd in held:
            os.close(fd)
    writer.join()
    assert http("GET", f"{FILES}/file").data == b"new"


def test_a_file_is_never_older_than_the_one_it_replaces(http: Http, served: Path) -> None:
    http("PUT", f"{FILES}/file", body=b"old")
    ahead = time.time_ns() + HOUR_NS  # what it shows when the clock is put back by an hour
    os.utime(served / VOLUME / "file", ns=(ahead, ahead))
    seen = http("HEAD", f"{FILES}/file").headers["Last-Modified"]

    http("PUT", f"{FILES}/file", body=b"new")

    assert http("GET", f"{FILES}/file", headers={"If-Unmodified-Since": seen}).status == 412


def test_a_file_that_was_refused_leaves_no_implicit_directories(tmp_path: Path) -> None:
    settings = ServerSettings(
        directory=tmp_path, token=TOKEN, volumes=("main.default.data",), implicit_directories=True
    )
    try:
        probe_marks(tmp_path)
    except OSError:
        pytest.skip("this disk has no extended attributes")
    with LocalServer(settings) as server:
        http = client_of(server.url)
        http("PUT", f"{DIRECTORIES}/kept")
        for folder in ("new/inner", "kept/inner"):
            assert http("PUT", f"{FILES}/{folder}/{'n' * 300}", body=b"x").status == 400
    assert sorted(one.name for one in (tmp_path / VOLUME).iterdir()) == ["kept"]
    assert list((tmp_path / VOLUME / "kept").iterdir()) == []


def test_a_file_that_could_not_be_joined_is_not_taken_for_published(
    served: Path,
) -> None:
    settings = ServerSettings(directory=served, token=TOKEN, volumes=("main.default.data",))
    with LocalServer(settings) as server:
        http = client_of(server.url)
        token = initiate(http, query="&overwrite=false")
        parts = {"parts": [put_part(http, token, b"content")]}
        http("PUT", f"{FILES}/file", body=b"in the way")
        assert complete(http, token, parts).status == 409
        http("DELETE", f"{FILES}/file")
        [part] = (served / ".trainmount" / "uploads").glob("*/00001-*")
        part.rename(part.with_name("aside"))
        part.mkdir()  # cannot be read, as from a disk that fails

        for _ in range(2):
            assert complete(http, token, parts).status == 500
            assert not list((served / ".trainmount" / "uploads").glob("*/assembled"))
            assert http("GET", f"{FILES}/file").status == 404

        part.rmdir()
        part.with_name("aside").rename(part)
        assert complete(http, token, parts).status == 200
        assert http("GET", f"{FILES}/file").data == b"content"


@pytest.mark.parametrize("overwrite", ["true", "false"])
def test_a_complete_that_could_not_be_remembered_is_answered_again(
    start_process: Callable[..., tuple[int, str]], served: Path, overwrite: str
) -> None:
    pid, url = start_process()
    http = client_of(url)
    token = initiate(http, query=f"&overwrite={overwrite}")
    parts = {"parts": [put_part(http, token, b"content")]}
    folder = served / ".trainmount" / "uploads" / token.partition(".")[0]

    # Room for the file, none for the answer.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (len(b"content"), resource.RLIM_INFINITY))
    assert complete(http, token, parts).status == 500
    assert http("GET", f"{FILES}/file").data == b"content"
    assert not list(folder.glob("00001-*"))  # they made room

    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    http("PUT", f"{FILES}/file", body=b"of another writer")
    assert complete(http, token, parts).status == 200
    assert http("GET", f"{FILES}/file").data == b"of another writer"


def test_a_server_that_stops_in_the_middle_of_an_upload_leaves_nothing(
    served: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ServerSettings(directory=served, token=TOKEN, volumes=("main.default.data",))
    with LocalServer(settings) as server:
        wire = Wire(server.url)
        head = f"PUT {FILES}/file HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        wire.socket.sendall(f"{head}Content-Length: 5000000\r\n\r\n".encode() + bytes(3_000_000))
        while not server.statistics()["staged_bytes"]:
            time.sleep(0.01)
    with wire:
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        assert [link for link in links if str(served) in link] == []
    assert list((served / ".trainmount" / "temporary").iterdir()) == []
    assert list((served / VOLUME).iterdir()) == []
    assert caplog.records == []


def test_a_server_out_of_descriptors_says_so_and_recovers(
    start_process: Callable[..., tuple[int, str]],
) -> None:
    pid, url = start_process()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert limits[0] == limits[1]
    with Wire(url) as wire:
        line = f"PUT {FILES}/file HTTP/1.1"
        assert wire.ask(line, "Host: x", "Content-Length: 1", body=b"1")[0] == 204
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        status, headers, _ = wire.ask(line, "Host: x", "Content-Length: 1", body=b"2")
        assert (status, headers["Retry-After"]) == (503, "1")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert wire.ask(f"GET {FILES}/file HTTP/1.1", "Host: x")[::2] == (200, b"1")


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.ENOSPC, 507),
        (errno.EDQUOT, 507),
        (errno.EROFS, 403),
        (errno.EACCES, 403),
        (errno.EMFILE, 503),
        (errno.ENFILE, 503),
        (errno.ENOMEM, 503),
        (errno.ENAMETOOLONG, 400),
        (errno.EIO, None),
    ],
)
def test_each_error_of_a_disk_is_told_as_what_can_be_done(number: int, status: int | None) -> None:
    refusal = disk_refusal(OSError(number, os.strerror(number)), "/Volumes/a/b/c/file")
    assert (None if refusal is None else refusal.status) == status


def test_a_faults_file_that_is_nested_without_end_is_wrong_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text("[" * 100_000)
    with pytest.raises(FaultError, match="not JSON"):
        Faults(path)
