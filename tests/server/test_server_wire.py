"""The wire itself, without an SDK in between: headers, ranges, presigned URLs, broken bodies,
escapes.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import urllib3

from trainmount_files.server import LocalServer, ServerSettings
from trainmount_files.server.faults import Fault, FaultError, parse_faults

TOKEN = "dapi-token-of-the-tests"
FILES = "/api/2.0/fs/files/Volumes/main/default/data"
DIRECTORIES = "/api/2.0/fs/directories/Volumes/main/default/data"
VOLUME = "main/default/data"

Http = Callable[..., urllib3.BaseHTTPResponse]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def raw_exchange(server: LocalServer, request: bytes, *, half_close: bool = True) -> bytes:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 0), timeout=10) as connection:
        connection.sendall(request)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def download_url(http: Http, name: str, query: str = "") -> str:
    target = f"/api/2.0/fs/create-download-url?path=/Volumes/main/default/data/{name}{query}"
    url = http("POST", target).json()["url"]
    assert isinstance(url, str)
    return url


def test_a_range_is_answered_exactly(http: Http) -> None:
    body = bytes(range(250)) * 4000
    http("PUT", f"{FILES}/file", body=body)
    for target in (f"{FILES}/file", download_url(http, "file")):
        for header, start, end in [
            ("bytes=0-0", 0, 1),
            ("bytes=100-599999", 100, 600_000),
            ("bytes=999990-", 999_990, 1_000_000),
            ("bytes=999990-5000000", 999_990, 1_000_000),
            ("bytes=-7", 999_993, 1_000_000),
        ]:
            answer = http("GET", target, headers={"Range": header})
            assert answer.status == 206
            assert answer.headers["Content-Range"] == f"bytes {start}-{end - 1}/1000000"
            assert answer.data == body[start:end]
            assert "Content-Encoding" not in answer.headers
        assert http("GET", target, headers={"Range": "bytes=1000000-"}).status == 416
        assert http("GET", target, headers={"Range": "lines=1-2"}).status == 200


def test_a_changed_file_fails_the_precondition(http: Http, served: Path) -> None:
    http("PUT", f"{FILES}/file", body=b"first")
    before = http("HEAD", f"{FILES}/file").headers["Last-Modified"]
    guard = {"If-Unmodified-Since": before}
    assert http("GET", f"{FILES}/file", headers=guard).status == 200

    later = time.time() + 2
    os.utime(served / VOLUME / "file", (later, later))

    assert http("GET", f"{FILES}/file", headers=guard).status == 412
    assert http("GET", download_url(http, "file"), headers=guard).status == 412


def test_a_presigned_url_refuses_a_token_another_method_and_another_signature(http: Http) -> None:
    http("PUT", f"{FILES}/file", body=b"content")
    url = download_url(http, "file")

    assert http("GET", url).data == b"content"
    assert http("GET", url, headers={"Authorization": f"Bearer {TOKEN}"}).status == 400
    assert http("PUT", url, body=b"x").status == 403
    assert http("GET", url[:-1] + ("0" if url[-1] != "0" else "1")).status == 403


def test_an_expired_url_answers_as_an_object_store_does(http: Http) -> None:
    http("PUT", f"{FILES}/file", body=b"content")
    url = download_url(http, "file", "&expire_time=2020-01-01T00:00:00Z")

    answer = http("GET", url)

    assert answer.status == 403
    assert b"<Code>AccessDenied</Code>" in answer.data
    assert b"Request has expired" in answer.data


def test_without_a_token_or_with_another_there_is_nothing(http: Http, server: LocalServer) -> None:
    for token in ("", "Bearer ", "Bearer wrong", "Basic " + TOKEN, f"Bearer {TOKEN}x"):
        answer = http("GET", f"{DIRECTORIES}", headers={"Authorization": token})
        assert answer.status == 401
        assert answer.json()["error_code"] == "UNAUTHENTICATED"


def test_a_body_that_breaks_off_publishes_nothing(
    http: Http, server: LocalServer, served: Path
) -> None:
    http("PUT", f"{FILES}/kept", body=b"old")
    head = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    some = b"x" * (4 << 20)
    for name in ("kept", "fresh"):
        short = f"PUT {FILES}/{name} HTTP/1.1\r\n{head}Content-Length: 10485760\r\n\r\n".encode()
        raw_exchange(server, short + some)
        chunked = f"PUT {FILES}/{name} HTTP/1.1\r\n{head}Transfer-Encoding: chunked\r\n\r\n"
        raw_exchange(server, chunked.encode() + f"{len(some):x}\r\n".encode() + some + b"\r\n")

    assert eventually(lambda: server.statistics()["staged_bytes"] == 0)
    assert [path.name for path in (served / VOLUME).iterdir()] == ["kept"]
    assert http("GET", f"{FILES}/kept").data == b"old"


def test_a_chunked_body_is_stored_whole(http: Http) -> None:
    pieces = [bytes([index]) * 100_000 for index in range(20)]

    assert http("PUT", f"{FILES}/chunked", body=iter(pieces), chunked=True).status == 204
    assert http("GET", f"{FILES}/chunked").data == b"".join(pieces)


def test_one_empty_file_after_another_is_stored(http: Http, served: Path) -> None:
    for name in ("a", "b", "c"):
        assert http("PUT", f"{FILES}/{name}", body=b"", timeout=10).status == 204
        assert (served / VOLUME / name).read_bytes() == b""


def test_a_client_that_asks_before_it_sends_is_told_to_go_on(server: LocalServer) -> None:
    head = f"PUT {FILES}/file HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Expect: 100-continue\r\nConnection: close\r\n"
    request = f"{head}Content-Length: 5\r\n\r\nhello"

    answer = raw_exchange(server, request.encode(), half_close=False)

    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 ")


@pytest.mark.parametrize(
    "path",
    [
        "/../../../secret",
        "/a/%2e%2e/%2E%2e/%2e%2e/%2e%2e/secret",
        "/%2e%2e%2f%2e%2e%2f%2e%2e%2f%2e%2e%2fsecret",
        "/a/../../../../../secret",
        "/nul%00byte",
        "/./a",
        "/link",
        "/linked/secret",
        "/linked/new",
        "/%ff%fe",
    ],
)
def test_nothing_outside_of_the_directory_is_reached(
    server: LocalServer, served: Path, tmp_path: Path, path: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    (served / VOLUME / "link").symlink_to(outside / "secret")
    (served / VOLUME / "linked").symlink_to(outside)
    for base in (FILES, DIRECTORIES):
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            head = f"{method} {base}{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            request = f"{head}Authorization: Bearer {TOKEN}\r\nContent-Length: 1\r\n\r\nx"
            answer = raw_exchange(server, request.encode(), half_close=False)
            assert answer.split()[1] in (b"400", b"404", b"409"), (method, base)
            assert b"secret" not in answer.partition(b"\r\n\r\n")[2].replace(b"/secret", b"")
    assert [name.name for name in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == (tmp_path / "secret").read_text() == "secret"
    assert not (outside / "new").exists()


def test_a_put_replaces_neither_a_link_nor_a_pipe(http: Http, served: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("outside")
    (served / VOLUME / "link").symlink_to(tmp_path / "target")
    os.mkfifo(served / VOLUME / "pipe")

    for name in ("link", "pipe"):
        answer = http("PUT", f"{FILES}/{name}", body=b"inside")
        assert (answer.status, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")

    assert (tmp_path / "target").read_text() == "outside"
    assert (served / VOLUME / "link").is_symlink()
    assert (served / VOLUME / "pipe").is_fifo()


def test_of_many_exclusive_writers_exactly_one_wins(http: Http) -> None:
    for index in range(10):
        bodies = [f"writer {number}".encode() * 100 for number in range(16)]
        gate = threading.Barrier(len(bodies))

        def write(body: bytes, index: int = index, gate: threading.Barrier = gate) -> int:
            gate.wait()
            return http("PUT", f"{FILES}/race-{index}?overwrite=false", body=body).status

        with ThreadPoolExecutor(len(bodies)) as pool:
            statuses = list(pool.map(write, bodies))

        assert sorted(statuses) == [204] + [409] * 15
        assert http("GET", f"{FILES}/race-{index}").data == bodies[statuses.index(204)]


def test_pages_have_a_token_exactly_while_more_is_to_come(http: Http, served: Path) -> None:
    for index in range(6):
        (served / VOLUME / f"{index}").touch()

    sizes, token = [], ""
    while True:
        page = http("GET", f"{DIRECTORIES}?page_size=3&page_token={token}").json()
        sizes.append(len(page["contents"]))
        token = page.get("next_page_token", "")
        if not token:
            break

    assert sizes == [3, 3]
    assert http("GET", f"{DIRECTORIES}?page_token=!!!").status == 400
    assert http("GET", f"{DIRECTORIES}?page_size=many").status == 400
    assert http("GET", "/api/2.0/fs/directories/Volumes/main").status == 404


def test_faults_come_from_a_file_and_change_with_it(served: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps([{"route": "head_directory", "status": 429, "retry_after": "7"}]))
    settings = ServerSettings(
        directory=served, token=TOKEN, volumes=("main.default.data",), faults=faults, fsync=False
    )
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with LocalServer(settings) as server, urllib3.PoolManager(retries=False) as pool:
        answer = pool.request("HEAD", server.url + DIRECTORIES, headers=headers)
        assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
        faults.write_text("[]")
        assert pool.request("HEAD", server.url + DIRECTORIES, headers=headers).status == 200


def test_a_reply_can_be_lost_although_the_work_was_done(http: Http, server: LocalServer) -> None:
    server.inject(Fault(route="put_file", count=1, lose_reply=True))

    with pytest.raises(urllib3.exceptions.ProtocolError):
        http("PUT", f"{FILES}/file", body=b"content")

    assert http("GET", f"{FILES}/file").data == b"content"


def test_a_range_can_be_ignored_and_a_body_cut(http: Http, server: LocalServer) -> None:
    body = bytes(1_000_000)
    http("PUT", f"{FILES}/file", body=body)
    server.inject(Fault(route="get_file", count=1, ignore_range=True, no_last_modified=True))
    whole = http("GET", f"{FILES}/file", headers={"Range": "bytes=5-9"})
    assert (whole.status, len(whole.data)) == (200, 1_000_000)
    assert "Last-Modified" not in whole.headers

    server.inject(Fault(route="get_file", count=1, cut_after_bytes=600_000))
    with pytest.raises(urllib3.exceptions.ProtocolError):
        http("GET", f"{FILES}/file")


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"rout": "put_file"}, r"faults\[0\]\.rout"),
        ({"route": "nothing"}, r"faults\[0\]\.route"),
        ({"status": "503"}, r"faults\[0\]\.status"),
        ({"ignore_range": 1}, r"faults\[0\]\.ignore_range"),
    ],
)
def test_a_malformed_fault_is_named(rule: dict[str, object], field: str) -> None:
    with pytest.raises(FaultError, match=field):
        parse_faults([rule])


def test_the_admin_routes_are_there_only_when_asked_for(http: Http, served: Path) -> None:
    assert http("GET", "/admin/statistics").json()["open_uploads"] == 0
    settings = ServerSettings(directory=served, token=TOKEN, fsync=False)
    with LocalServer(settings) as plain:
        target = plain.url + "/admin/statistics"
        assert http("GET", target, headers={"Authorization": f"Bearer {TOKEN}"}).status == 404
