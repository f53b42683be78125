"""Resumable uploads as on Google Cloud Storage: chunks at one URL, the status between them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import urllib3

from trainmount_files.server import LocalServer, ServerSettings
from trainmount_files.server.errors import ApiError
from trainmount_files.server.faults import Fault
from trainmount_files.server.resumable import parse_content_range

TOKEN = "dapi-token-of-the-tests"
PATH = "/Volumes/main/default/data/file"
FILE = f"/api/2.0/fs/files{PATH}"
QUANTUM = 256 * 1024

Http = Callable[..., urllib3.BaseHTTPResponse]


@pytest.fixture
def server(served: Path) -> Iterator[LocalServer]:
    settings = ServerSettings(
        directory=served,
        token=TOKEN,
        volumes=("main.default.data",),
        resumable=True,
        fsync=False,
    )
    with LocalServer(settings) as running:
        yield running


def initiate(http: Http, query: str = "") -> str:
    answer = http("POST", f"{FILE}?action=initiate-upload{query}")
    assert answer.status == 200, answer.data
    token = answer.json()["resumable_upload"]["session_token"]
    assert isinstance(token, str)
    return token


def upload_url(http: Http, query: str = "") -> str:
    body = {"path": PATH, "session_token": initiate(http, query)}
    url = http("POST", "/api/2.0/fs/create-resumable-upload-url", json=body).json()
    assert url["resumable_upload_url"]["headers"] == []
    return str(url["resumable_upload_url"]["url"])


def send(http: Http, url: str, place: str, body: bytes = b"") -> tuple[int, str | None]:
    answer = http("PUT", url, body=body, headers={"Content-Range": f"bytes {place}"})
    return answer.status, answer.headers.get("Range")


def test_chunks_make_the_file_when_the_last_one_names_the_total(
    http: Http, server: LocalServer
) -> None:
    url = upload_url(http)
    first, last = b"a" * (2 * QUANTUM), b"b" * 1000

    assert send(http, url, "*/*") == (308, None)
    assert send(http, url, f"0-{2 * QUANTUM - 1}/*", first) == (308, f"bytes=0-{2 * QUANTUM - 1}")
    assert http("GET", FILE).status == 404
    assert send(http, url, "*/*") == (308, f"bytes=0-{2 * QUANTUM - 1}")
    total = 2 * QUANTUM + 1000
    assert send(http, url, f"{2 * QUANTUM}-{total - 1}/{total}", last) == (200, None)

    assert http("GET", FILE).data == first + last
    assert server.statistics()["staged_bytes"] == server.statistics()["open_uploads"] == 0


def test_a_repeated_last_chunk_and_a_late_question_get_the_same_answer(http: Http) -> None:
    url = upload_url(http, "&overwrite=false")

    for _ in range(2):
        assert send(http, url, "0-6/7", b"content") == (200, None)
    assert send(http, url, "*/*") == (200, None)
    assert send(http, url, "*/7") == (200, None)
    assert http("GET", FILE).data == b"content"


def test_of_a_chunk_that_is_not_the_last_whole_quanta_are_kept(http: Http) -> None:
    url = upload_url(http)
    body = bytes(range(250)) * 2000

    assert send(http, url, f"0-{len(body) - 1}/*", body) == (308, f"bytes=0-{QUANTUM - 1}")
    rest = body[QUANTUM:]
    assert send(http, url, f"{QUANTUM}-{len(body) - 1}/{len(body)}", rest) == (200, None)
    assert http("GET", FILE).data == body


def test_a_chunk_that_is_sent_again_adds_only_what_is_new(http: Http) -> None:
    url = upload_url(http)
    body = bytes(range(256)) * 3 * 1024

    send(http, url, f"0-{QUANTUM - 1}/*", body[:QUANTUM])
    assert send(http, url, f"0-{len(body) - 1}/{len(body)}", body) == (200, None)
    assert http("GET", FILE).data == body


def test_a_gap_or_a_total_that_is_too_small_is_refused_and_can_be_mended(http: Http) -> None:
    url = upload_url(http)
    assert send(http, url, f"{QUANTUM}-{QUANTUM}/*", b"x") == (400, None)
    assert send(http, url, f"0-{QUANTUM - 1}/*", bytes(QUANTUM))[0] == 308
    assert send(http, url, "*/5") == (400, None)
    assert send(http, url, "5-1/*") == (400, None)
    assert send(http, url, "0-9/*", b"short") == (400, None)
    assert send(http, url, f"*/{QUANTUM}") == (200, None)


def test_an_empty_file_is_one_request(http: Http) -> None:
    assert send(http, upload_url(http), "*/0") == (200, None)
    assert http("GET", FILE).data == b""


def test_what_came_of_a_chunk_that_broke_off_is_kept(http: Http, server: LocalServer) -> None:
    url = upload_url(http)
    parts = urlsplit(url)
    body = bytes(range(256)) * 4096 * 4
    head = f"PUT {parts.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += f"Content-Range: bytes 0-{len(body) - 1}/{len(body)}\r\n\r\n"
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=10) as raw:
        raw.sendall(head.encode() + body[: 3 << 20])
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass

    deadline = time.monotonic() + 10
    while (stored := send(http, url, "*/*")[1]) is None:
        assert time.monotonic() < deadline
    begin = int(stored.removeprefix("bytes=0-")) + 1
    assert begin % QUANTUM == 0
    assert 0 < begin <= 3 << 20
    place = f"{begin}-{len(body) - 1}/{len(body)}"
    assert send(http, url, place, body[begin:]) == (200, None)
    assert http("GET", FILE).data == body


def test_overwrite_false_is_held_at_the_last_chunk(http: Http) -> None:
    url = upload_url(http, "&overwrite=false")
    http("PUT", FILE, body=b"early")

    answer = http("PUT", url, body=b"late", headers={"Content-Range": "bytes 0-3/4"})

    assert (answer.status, b"<Code>PreconditionFailed</Code>" in answer.data) == (412, True)
    assert http("GET", FILE).data == b"early"


def test_an_abort_leaves_nothing(http: Http, server: LocalServer) -> None:
    url = upload_url(http)
    send(http, url, f"0-{QUANTUM - 1}/*", bytes(QUANTUM))

    assert http("DELETE", url).status == 200

    assert server.statistics()["staged_bytes"] == server.statistics()["open_uploads"] == 0
    answer = http("PUT", url, body=b"late", headers={"Content-Range": "bytes 0-3/4"})
    assert (answer.status, b"NoSuchUpload" in answer.data) == (404, True)


def test_a_resumable_upload_takes_no_parts(http: Http) -> None:
    token = initiate(http)
    body = {"path": PATH, "session_token": token, "start_part_number": 1, "count": 1}

    answer = http("POST", "/api/2.0/fs/create-upload-part-urls", json=body)

    assert (answer.status, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


def test_a_lost_answer_is_found_out_by_asking(http: Http, server: LocalServer) -> None:
    url = upload_url(http)
    server.inject(Fault(route="presigned_resumable", count=1, lose_reply=True, status=503))

    assert send(http, url, f"0-{QUANTUM - 1}/*", b"a" * QUANTUM) == (503, None)
    assert send(http, url, "*/*") == (308, f"bytes=0-{QUANTUM - 1}")


@pytest.mark.parametrize(
    "header", ["bytes", "bytes 0-4", "bytes 4-0/*", "bytes 0-9/5", "items 0-1/2", "bytes -1-4/*"]
)
def test_a_malformed_content_range_is_refused(header: str) -> None:
    with pytest.raises(ApiError, match="Content-Range"):
        parse_content_range(header, 5)
