"""Files API 3.0: its prefix, its uploads, and the conditional requests that 2.0 has not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path

import pytest
import urllib3

TOKEN = "dapi-token-of-the-tests"
FILES = "/api/3.0/fs/files/Volumes/main/default/data"
OLD_FILES = "/api/2.0/fs/files/Volumes/main/default/data"
VOLUME = "main/default/data"

Http = Callable[..., urllib3.BaseHTTPResponse]


def test_every_verb_that_knows_the_version_tells_one_etag(http: Http) -> None:
    put = http("PUT", f"{FILES}/file", body=b"content")
    assert put.status == 204

    etag = put.headers["ETag"]
    assert etag[0] == etag[-1] == '"'
    assert http("HEAD", f"{FILES}/file").headers["ETag"] == etag
    answer = http("GET", f"{FILES}/file")
    assert (answer.data, answer.headers["ETag"]) == (b"content", etag)
    assert "ETag" not in http("GET", f"{OLD_FILES}/file").headers
    again = http("PUT", f"{FILES}/file", body=b"content")
    assert again.headers["ETag"] != etag


def test_a_read_is_for_the_version_that_it_names(http: Http) -> None:
    etag = http("PUT", f"{FILES}/file", body=b"content").headers["ETag"]
    for method in ("GET", "HEAD"):

        def status(method: str = method, **headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return http(method, f"{FILES}/file", headers=named).status

        assert status(If_Match=etag) == 200
        assert status(If_Match=f'"other", {etag}') == 200
        assert status(If_Match="*") == 200
        assert status(If_Match='"other"') == 412
        assert status(If_None_Match=etag) == 304
        assert status(If_None_Match="*") == 304
        assert status(If_None_Match='"other"') == 200
    answer = http("GET", f"{FILES}/file", headers={"If-None-Match": etag})
    assert (answer.data, answer.headers["ETag"]) == (b"", etag)
    # An older version of the API does not know the header.
    assert http("GET", f"{OLD_FILES}/file", headers={"If-Match": '"other"'}).status == 200


def test_a_read_is_for_a_time_unless_it_names_a_version(http: Http, served: Path) -> None:
    etag = http("PUT", f"{FILES}/file", body=b"content").headers["ETag"]
    now = int(time.time())
    os.utime(served / VOLUME / "file", (now, now))
    etag = http("HEAD", f"{FILES}/file").headers["ETag"]
    earlier, same = formatdate(now - 10, usegmt=True), formatdate(now, usegmt=True)

    def status(**headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return http("GET", f"{FILES}/file", headers=named).status

    assert status(If_Unmodified_Since=earlier) == 412
    assert status(If_Unmodified_Since=same) == 200
    assert status(If_Modified_Since=same) == 304
    assert status(If_Modified_Since=earlier) == 200
    assert status(If_Modified_Since="yesterday") == 200
    assert status(If_Unmodified_Since=earlier, If_Match=etag) == 200
    assert status(If_Modified_Since=same, If_None_Match='"other"') == 200
    head = http("HEAD", f"{OLD_FILES}/file", headers={"If-Unmodified-Since": earlier})
    assert head.status == 412


def test_a_write_for_another_version_changes_nothing(http: Http) -> None:
    etag = http("PUT", f"{FILES}/file", body=b"first").headers["ETag"]

    for headers in ({"If-Match": '"other"'}, {"If-None-Match": "*"}, {"If-None-Match": etag}):
        answer = http("PUT", f"{FILES}/file", body=b"second", headers=headers)
        assert (answer.status, answer.json()["error_code"]) == (412, "PRECONDITION_FAILED")
    assert http("PUT", f"{FILES}/none", body=b"x", headers={"If-Match": "*"}).status == 412
    assert http("DELETE", f"{FILES}/file", headers={"If-Match": '"other"'}).status == 412
    assert http("GET", f"{FILES}/file").data == b"first"
    assert http("PUT", f"{FILES}/file", body=b"2", headers={"If-Match": etag}).status == 204
    assert http("PUT", f"{FILES}/new", body=b"x", headers={"If-None-Match": "*"}).status == 204
    newest = http("HEAD", f"{FILES}/file").headers["ETag"]
    assert http("DELETE", f"{FILES}/file", headers={"If-Match": newest}).status == 204


def upload(http: Http, name: str, body: bytes, headers: dict[str, str] | None = None) -> str:
    """Begins one and sends its part; returns the target that completes it."""
    initiated = http("POST", f"{FILES}/{name}?action=initiate-upload", headers=headers or {})
    assert initiated.status == 200, initiated.data
    upload_id = initiated.json()["upload_id"]
    target = f"{FILES}/{name}?upload_id={upload_id}"
    part = http("PUT", f"{target}&part_number=1", body=body)
    assert part.status == 200
    return f"{target}&action=complete-upload#{part.headers['ETag']}"


def complete(
    http: Http, target: str, headers: dict[str, str] | None = None
) -> urllib3.BaseHTTPResponse:
    target, _, etag = target.partition("#")
    body = {"parts": [{"part_number": 1, "etag": etag}]}
    return http("POST", target, json=body, headers=headers or {})


def test_an_upload_by_its_id_tells_the_etag_at_complete_and_again(http: Http) -> None:
    target = upload(http, "file", b"content")

    answer = complete(http, target)

    assert answer.status == 200
    etag = http("HEAD", f"{FILES}/file").headers["ETag"]
    assert answer.headers["ETag"] == complete(http, target).headers["ETag"] == etag
    aborted = upload(http, "other", b"x").partition("#")[0].replace("complete-", "abort-")
    assert http("POST", aborted).status == 200
    assert http("GET", f"{FILES}/other").status == 404


def test_an_upload_that_was_begun_for_a_version_holds_it_at_complete(http: Http) -> None:
    created = upload(http, "file", b"late", {"If-None-Match": "*"})
    http("PUT", f"{FILES}/file", body=b"early")
    replaced = upload(http, "file", b"third")
    etag = http("HEAD", f"{FILES}/file").headers["ETag"]
    http("PUT", f"{FILES}/file", body=b"second")

    assert complete(http, created).status == 412
    assert complete(http, replaced, {"If-Match": etag}).status == 412
    assert http("GET", f"{FILES}/file").data == b"second"
    assert complete(http, replaced).status == 200
    begun = http("POST", f"{FILES}/file?action=initiate-upload", headers={"If-None-Match": "*"})
    assert begun.status == 412


def test_of_writers_that_replace_one_version_exactly_one_wins(http: Http) -> None:
    for index in range(5):
        etag = http("PUT", f"{FILES}/race-{index}", body=b"first").headers["ETag"]
        guard = {"If-Match": etag}

        def write(number: int, index: int = index, guard: dict[str, str] = guard) -> int:
            body = b"%d" % number
            if number % 2:
                target = upload(http, f"race-{index}", body)
                return complete(http, target, guard).status
            return http("PUT", f"{FILES}/race-{index}", body=body, headers=guard).status

        with ThreadPoolExecutor(12) as pool:
            statuses = list(pool.map(write, range(12)))

        winners = [number for number, status in enumerate(statuses) if status in (200, 204)]
        assert sorted(set(statuses) - {200, 204}) == [412]
        assert len(winners) == 1
        assert http("GET", f"{FILES}/race-{index}").data == b"%d" % winners[0]


@pytest.mark.parametrize("version", ["1.0", "2.1", "4.0"])
def test_a_version_that_does_not_exist_is_no_endpoint(http: Http, version: str) -> None:
    answer = http("GET", FILES.replace("3.0", version))
    assert (answer.status, answer.json()["error_code"]) == (404, "ENDPOINT_NOT_FOUND")
