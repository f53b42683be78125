"""Faults on purpose, and the calls above the volumes that clients ask when something is missing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import urllib3
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import NotFound

from trainmount_files.server import LocalServer, ServerSettings
from trainmount_files.server.faults import Fault, FaultError, FaultPlan, Faults, parse_faults

TOKEN = "dapi-token-of-the-tests"
FILES = "/api/2.0/fs/files/Volumes/main/default/data"
DIRECTORIES = "/api/2.0/fs/directories/Volumes/main/default/data"
CATALOG = "/api/2.1/unity-catalog"

Http = Callable[..., urllib3.BaseHTTPResponse]


def download_url(http: Http, name: str) -> str:
    target = f"/api/2.0/fs/create-download-url?path=/Volumes/main/default/data/{name}"
    return str(http("POST", target).json()["url"])


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("AccessDenied", 403, b"<Message>Request has expired</Message>"),
        (
            "AuthenticationFailed",
            403,
            b"<AuthenticationErrorDetail>Signature not valid in the specified time frame",
        ),
        ("ExpiredToken", 400, b"<Code>ExpiredToken</Code>"),
    ],
)
def test_an_expired_url_is_told_in_each_stores_words(
    http: Http, server: LocalServer, code: str, status: int, words: bytes
) -> None:
    http("PUT", f"{FILES}/file", body=b"content")
    url = download_url(http, "file")
    server.inject(Fault(route="presigned_get", expired_url=True, expired_code=code, count=1))

    answer = http("GET", url)

    assert answer.status == status
    assert answer.headers["Content-Type"].startswith("application/xml")
    assert words in answer.data
    assert http("GET", url).data == b"content"


def test_a_url_lives_no_longer_than_the_server_lets_it(served: Path) -> None:
    settings = ServerSettings(
        directory=served,
        token=TOKEN,
        volumes=("main.default.data",),
        max_url_lifetime_seconds=0.2,
        fsync=False,
    )
    (served / "main/default/data").mkdir(parents=True)
    (served / "main/default/data/file").write_bytes(b"content")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    query = "path=/Volumes/main/default/data/file&expire_time=2099-01-01T00:00:00Z"
    with LocalServer(settings) as server, urllib3.PoolManager(retries=False) as pool:
        target = f"{server.url}/api/2.0/fs/create-download-url?{query}"
        url = pool.request("POST", target, headers=headers).json()["url"]
        deadline = time.monotonic() + 10
        while (answer := pool.request("GET", url)).status == 200:
            assert time.monotonic() < deadline
        assert (answer.status, b"Request has expired" in answer.data) == (403, True)
        assert pool.request("POST", target, headers=headers).status == 200


def test_an_upload_is_cut_and_nothing_of_it_is_stored(
    http: Http, server: LocalServer, served: Path
) -> None:
    http("PUT", f"{FILES}/file", body=b"old")
    server.inject(Fault(route="put_file", cut_after_bytes=1_000_000))

    with pytest.raises(urllib3.exceptions.ProtocolError):
        http("PUT", f"{FILES}/file", body=bytes(3_000_000))

    server.inject()
    assert http("GET", f"{FILES}/file").data == b"old"
    deadline = time.monotonic() + 10
    while server.statistics()["staged_bytes"]:
        assert time.monotonic() < deadline


def test_bodies_flow_no_faster_than_the_bandwidth(http: Http, server: LocalServer) -> None:
    body = bytes(range(256)) * 400
    server.inject(Fault(bandwidth_bytes_per_second=400_000))

    started = time.monotonic()
    assert http("PUT", f"{FILES}/file", body=body).status == 204
    uploaded = time.monotonic()
    assert http("GET", f"{FILES}/file").data == body
    downloaded = time.monotonic()
    assert http("GET", f"{FILES}/file", headers={"Range": "bytes=10-19"}).data == body[10:20]

    assert uploaded - started > 0.2
    assert downloaded - uploaded > 0.2


def test_directories_that_become_empty_can_vanish_with_a_delete(
    http: Http, server: LocalServer, served: Path
) -> None:
    http("PUT", f"{DIRECTORIES}/a/b")
    http("PUT", f"{FILES}/a/b/file", body=b"x")
    server.inject(Fault(route="delete_file", vanish_parents=True, count=1))

    assert http("DELETE", f"{FILES}/a/b/file").status == 204

    assert http("HEAD", f"{DIRECTORIES}/a").status == 404
    assert http("HEAD", DIRECTORIES).status == 200


def test_a_seed_brings_the_same_faults_back() -> None:
    rule = Fault(route="get_file", probability=0.3, status=503)

    def hits(seed: int | None) -> list[bool]:
        faults = Faults()
        faults.replace(FaultPlan(rules=(rule,), seed=seed))
        return [faults.take("get_file", "/x").status == 503 for _ in range(200)]

    assert hits(7) == hits(7)
    assert hits(7) != hits(8)
    assert 30 < sum(hits(7)) < 90


def test_faults_are_replaced_by_the_admin_route_with_their_seed(http: Http) -> None:
    rules = [{"route": "head_file", "status": 429, "retry_after": "3", "skip": 1, "count": 1}]
    plan = {"seed": 5, "faults": rules}
    assert http("PUT", "/admin/faults", body=json.dumps(plan)).status == 200

    answers = [http("HEAD", f"{FILES}/none") for _ in range(3)]

    assert [answer.status for answer in answers] == [404, 429, 404]
    assert answers[1].headers["Retry-After"] == "3"
    assert http("PUT", "/admin/faults", json=[]).status == 200
    refused = http("PUT", "/admin/faults", json={"faults": [{"status": 50}]})
    assert refused.status == 400
    assert refused.json()["message"] == "faults[0].status must be between 200 and 599; got 50"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"faults": [], "sed": 1}, "sed is not a field; there are faults, seed"),
        ({"faults": [], "seed": "x"}, "seed must be a whole number"),
        ({"seed": 1}, "faults must be a JSON list of rules"),
        ([{"probability": 1.5}], r"faults\[0\]\.probability must be between 0 and 1; got 1\.5"),
        ([{}, {"count": -1}], r"faults\[1\]\.count must be at least 0; got -1"),
        ([{"bandwidth_bytes_per_second": 0}], r"bandwidth_bytes_per_second must be greater than 0"),
        ([{"expired_code": "Late"}], r"expired_code must be one of AccessDenied, Authent"),
        ([{"retry_after": "1\r\nX: y"}], r"retry_after must be one line of text"),
    ],
)
def test_a_value_that_cannot_be_is_named_by_rule_and_field(document: object, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        parse_faults(document)


def test_a_faults_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text('[{"status": "503"}]')

    with pytest.raises(FaultError) as refused:
        Faults(path)

    text = f"faults file {path}: faults[0].status has the wrong type: '503'"
    assert str(refused.value) == text


def test_a_faults_file_that_becomes_wrong_is_told_once_and_the_last_rules_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "faults.json"
    path.write_text('[{"status": 503}]')
    faults = Faults(path)
    path.write_text('[{"status": 50000}]')

    statuses = [faults.take("get_file", "/x").status for _ in range(3)]

    assert statuses == [503, 503, 503]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "faults[0].status must be between 200 and 599; got 50000" in message
    path.write_text("[]")
    assert faults.take("get_file", "/x").status is None


def test_pages_of_unity_catalog_go_on_until_there_is_no_token(
    client: WorkspaceClient, http: Http, served: Path
) -> None:
    for name in ("one", "two", "three"):
        (served / "main/default" / name).mkdir()
    query = "catalog_name=main&schema_name=default"

    first = http("GET", f"{CATALOG}/volumes?{query}&max_results=3").json()
    second = http(
        "GET", f"{CATALOG}/volumes?{query}&max_results=3&page_token={first['next_page_token']}"
    ).json()

    names = [volume["name"] for volume in first["volumes"] + second["volumes"]]
    assert names == ["data", "one", "three", "two"]
    assert "next_page_token" not in second
    paged = client.volumes.list("main", "default", max_results=1)
    assert [volume.name for volume in paged] == names


def test_each_level_above_a_volume_is_described_or_told_to_be_missing(
    client: WorkspaceClient, http: Http
) -> None:
    assert client.catalogs.get("main").name == "main"
    assert client.schemas.get("main.default").catalog_name == "main"
    volume = client.volumes.read("main.default.data")
    assert (volume.schema_name, volume.browse_only) == ("default", False)
    for target, code in [
        ("catalogs/none", "CATALOG_DOES_NOT_EXIST"),
        ("schemas/none.default", "CATALOG_DOES_NOT_EXIST"),
        ("schemas/main.none", "SCHEMA_DOES_NOT_EXIST"),
        ("schemas?catalog_name=none", "CATALOG_DOES_NOT_EXIST"),
        ("volumes?catalog_name=main&schema_name=none", "SCHEMA_DOES_NOT_EXIST"),
        ("volumes/main.default.none", "RESOURCE_DOES_NOT_EXIST"),
        ("volumes/main.none.data", "SCHEMA_DOES_NOT_EXIST"),
        ("effective-permissions/volume/main.default.none", "RESOURCE_DOES_NOT_EXIST"),
        ("tables", "ENDPOINT_NOT_FOUND"),
    ]:
        answer = http("GET", f"{CATALOG}/{target}")
        assert (answer.status, answer.json()["error_code"]) == (404, code), target
    for target in ("volumes/main.default", "volumes?catalog_name=main", "catalogs?page_token=!"):
        assert http("GET", f"{CATALOG}/{target}").status == 400
    with pytest.raises(NotFound):
        client.catalogs.get("none")


def test_each_level_above_a_volume_has_the_time_of_its_last_change_in_milliseconds(
    client: WorkspaceClient, served: Path
) -> None:
    for number, name in enumerate(("main", "main/default", "main/default/data"), 1):
        os.utime(served / name, ns=(0, number * 1_000_123_456_789))
    found = [
        *client.catalogs.list(),
        client.catalogs.get("main"),
        *client.schemas.list("main"),
        client.schemas.get("main.default"),
        *client.volumes.list("main", "default"),
        client.volumes.read("main.default.data"),
    ]
    expected = [1_000_123, 1_000_123, 2_000_246, 2_000_246, 3_000_370, 3_000_370]
    assert [one.updated_at for one in found] == expected
    assert [one.created_at for one in found] == expected


def test_there_are_no_credentials_for_the_servers_own_disk(http: Http) -> None:
    body = {"volume_id": "x", "operation": "READ_VOLUME"}
    target = "/api/2.0/unity-catalog/temporary-volume-credentials"

    answer = http("POST", target, json=body)

    assert (answer.status, answer.json()["error_code"]) == (501, "NOT_IMPLEMENTED")
    assert "Use the Files API" in answer.json()["message"]


def test_two_thousand_entries_are_two_pages_and_the_last_has_no_token(
    http: Http, served: Path
) -> None:
    for index in range(2000):
        (served / "main/default/data" / f"{index}").touch()

    first = http("GET", f"{DIRECTORIES}?page_size=1000").json()
    second = http("GET", f"{DIRECTORIES}?page_token={first['next_page_token']}").json()

    assert (len(first["contents"]), len(second["contents"])) == (1000, 1000)
    assert "next_page_token" not in second
