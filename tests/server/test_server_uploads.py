"""Uploads in parts: order, replacement, refusals, repetition, and a server that is killed in
between.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import urllib3

from trainmount_files.server import LocalServer
from trainmount_files.server.faults import Fault

TOKEN = "dapi-token-of-the-tests"
PATH = "/Volumes/main/default/data/file"
FILE = f"/api/2.0/fs/files{PATH}"
PART_BYTES = 5 << 20

Http = Callable[..., urllib3.BaseHTTPResponse]


def initiate(http: Http, query: str = "") -> str:
    answer = http("POST", f"{FILE}?action=initiate-upload{query}")
    assert answer.status == 200, answer.data
    token = answer.json()["multipart_upload"]["session_token"]
    assert isinstance(token, str)
    return token


def part_url(http: Http, token: str, number: int) -> str:
    body = {"path": PATH, "session_token": token, "start_part_number": number, "count": 1}
    answer = http("POST", "/api/2.0/fs/create-upload-part-urls", json=body)
    assert answer.status == 200, answer.data
    url = answer.json()["upload_part_urls"][0]["url"]
    assert isinstance(url, str)
    return url


def put_part(http: Http, token: str, number: int, body: bytes) -> dict[str, Any]:
    answer = http("PUT", part_url(http, token, number), body=body)
    assert answer.status == 200
    return {"part_number": number, "etag": answer.headers["ETag"]}


def complete(http: Http, token: str, parts: list[dict[str, Any]]) -> urllib3.BaseHTTPResponse:
    target = f"{FILE}?action=complete-upload&upload_type=multipart&session_token={token}"
    return http("POST", target, json={"parts": parts})


def abort(http: Http, token: str) -> urllib3.BaseHTTPResponse:
    target = f"{FILE}?action=abort-upload&upload_type=multipart&session_token={token}"
    return http("POST", target)


def body_of(number: int) -> bytes:
    return bytes([number]) * PART_BYTES


def test_parts_in_any_order_and_one_twice_make_the_file_by_number(http: Http) -> None:
    token = initiate(http)
    parts = {number: put_part(http, token, number, body_of(number)) for number in range(5, 0, -1)}
    parts[3] = put_part(http, token, 3, body_of(9))

    assert http("GET", FILE).status == 404
    assert complete(http, token, [parts[number] for number in range(1, 6)]).status == 200

    expected = b"".join(body_of(number) for number in (1, 2, 9, 4, 5))
    assert http("GET", FILE).data == expected


def test_a_list_that_does_not_match_publishes_nothing_and_can_be_mended(http: Http) -> None:
    token = initiate(http)
    first, second = (put_part(http, token, number, body_of(number)) for number in (1, 2))

    for wrong in (
        [],
        [first, second, {"part_number": 3, "etag": first["etag"]}],
        [first, {"part_number": 2, "etag": '"wrong"'}],
        [second, first],
        [first, {"part_number": 2, "etag": "../../../../../etc/passwd"}],
    ):
        answer = complete(http, token, wrong)
        assert (answer.status, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
        assert http("GET", FILE).status == 404

    assert complete(http, token, [first, second]).status == 200


def test_a_small_part_that_is_not_the_last_is_refused(http: Http) -> None:
    token = initiate(http)
    first, second = (put_part(http, token, number, b"small") for number in (1, 2))

    assert complete(http, token, [first, second]).status == 400
    assert complete(http, token, [first]).status == 200
    assert http("GET", FILE).data == b"small"


def test_a_repeated_complete_gets_the_same_answer(http: Http, server: LocalServer) -> None:
    token = initiate(http, "&overwrite=false")
    parts = [put_part(http, token, 1, b"content")]
    server.inject(Fault(route="complete_upload", count=1, lose_reply=True))

    with pytest.raises(urllib3.exceptions.ProtocolError):
        complete(http, token, parts)

    assert complete(http, token, parts).status == 200
    assert complete(http, token, parts).status == 200
    assert http("GET", FILE).data == b"content"
    assert server.statistics()["staged_bytes"] == 0


def test_overwrite_false_is_held_at_complete(http: Http) -> None:
    token = initiate(http, "&overwrite=false")
    parts = [put_part(http, token, 1, b"late")]
    http("PUT", FILE, body=b"early")

    answer = complete(http, token, parts)

    assert (answer.status, answer.json()["error_code"]) == (409, "ALREADY_EXISTS")
    assert http("GET", FILE).data == b"early"
    assert http("POST", f"{FILE}?action=initiate-upload&overwrite=false").status == 409


def test_of_puts_and_uploads_that_race_exactly_one_wins(http: Http) -> None:
    tokens = [initiate(http, "&overwrite=false") for _ in range(6)]
    parts = [[put_part(http, token, 1, token.encode())] for token in tokens]

    with ThreadPoolExecutor(12) as pool:
        uploads = [pool.submit(complete, http, *pair) for pair in zip(tokens, parts, strict=True)]
        puts = [
            pool.submit(http, "PUT", f"{FILE}?overwrite=false", body=f"put {number}".encode())
            for number in range(6)
        ]
        statuses = [future.result().status for future in (*uploads, *puts)]

    assert [status for status in statuses if status < 300] in ([200], [204])
    assert statuses.count(409) == 11
    winner = next(index for index, status in enumerate(statuses) if status < 300)
    contents = [token.encode() for token in tokens] + [f"put {n}".encode() for n in range(6)]
    assert http("GET", FILE).data == contents[winner]


def test_an_aborted_upload_leaves_nothing_and_takes_no_part(
    http: Http, server: LocalServer
) -> None:
    token = initiate(http)
    url = part_url(http, token, 2)
    part = put_part(http, token, 1, body_of(1))

    assert abort(http, token).status == 200
    assert abort(http, token).status == 200

    assert server.statistics()["open_uploads"] == server.statistics()["staged_bytes"] == 0
    late = http("PUT", url, body=b"late")
    assert (late.status, b"NoSuchUpload" in late.data) == (404, True)
    assert complete(http, token, [part]).status == 404
    assert abort(http, "0" * 32 + "." + "0" * 64).status == 404
    assert complete(http, "../../..", [part]).status == 404


def test_older_clients_abort_by_a_url_of_their_own(http: Http, server: LocalServer) -> None:
    token = initiate(http)
    put_part(http, token, 1, b"part")
    body = {"path": PATH, "session_token": token, "expire_time": "2099-01-01T00:00:00Z"}

    url = http("POST", "/api/2.0/fs/create-abort-upload-url", json=body).json()

    assert http("DELETE", url["abort_upload_url"]["url"]).status == 200
    assert server.statistics()["open_uploads"] == 0


def test_a_part_can_go_through_the_api_itself(http: Http) -> None:
    token = initiate(http)
    query = f"session_token={token}&upload_type=multipart&part_number=1"

    answer = http("PUT", f"{FILE}?{query}", body=b"content")

    part = {"part_number": 1, "etag": answer.headers["ETag"]}
    assert complete(http, token, [part]).status == 200
    assert http("GET", FILE).data == b"content"


@pytest.mark.parametrize("number", [0, 10_001, "one", True])
def test_a_part_number_out_of_range_is_refused(http: Http, number: object) -> None:
    token = initiate(http)
    body = {"path": PATH, "session_token": token, "start_part_number": number, "count": 1}

    assert http("POST", "/api/2.0/fs/create-upload-part-urls", json=body).status == 400


def test_an_upload_goes_on_after_the_server_was_killed(
    start_process: Callable[[], tuple[int, str]],
) -> None:
    urls = []
    with urllib3.PoolManager(retries=False) as pool:

        def http(method: str, target: str, **options: Any) -> urllib3.BaseHTTPResponse:
            is_url = target.startswith("http")
            headers = {} if is_url else {"Authorization": f"Bearer {TOKEN}"}
            return pool.request(
                method, target if is_url else urls[-1] + target, headers=headers, **options
            )

        pid, url = start_process()
        urls.append(url)
        token = initiate(http)
        first = put_part(http, token, 1, body_of(1))
        late_url = part_url(http, token, 2)
        os.kill(pid, signal.SIGKILL)
        _, url = start_process()
        urls.append(url)

        # The URL was signed by the dead one and names its port.
        answer = http("PUT", late_url.replace(urls[0], urls[1]), body=body_of(2))
        second = {"part_number": 2, "etag": answer.headers["ETag"]}

        assert complete(http, token, [first, second]).status == 200
        assert http("GET", FILE).data == body_of(1) + body_of(2)
