"""Rights by token: what a grant allows, what it hides, and what a malformed one is told."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import PermissionDenied

from trainmount_files.server import LocalServer, ServerSettings
from trainmount_files.server.grants import Callers, GrantError, load_grants

ADMIN = "dapi-token-of-the-tests"
READER, WRITER, WRITE_ONLY, STRANGER = "reader-token", "writer-token", "blind-token", "other-token"
ROOT = "/Volumes/main/default/data"
FILES = f"/api/2.0/fs/files{ROOT}"
DIRECTORIES = f"/api/2.0/fs/directories{ROOT}"

Ask = Callable[..., urllib3.BaseHTTPResponse]


def grant(user: str, token: str, volumes: str, *privileges: str) -> dict[str, Any]:
    return {"user": user, "token": token, "volumes": [volumes], "privileges": list(privileges)}


GRANTS = [
    grant("reader", READER, "main.default.data", "READ VOLUME"),
    grant("writer", WRITER, "main.*.*", "READ VOLUME"),
    grant("writer", WRITER, "main.default.d*", "WRITE_VOLUME"),
    grant("blind", WRITE_ONLY, "main.default.data", "WRITE VOLUME"),
    grant("stranger", STRANGER, "other.*.*", "READ VOLUME", "WRITE VOLUME"),
]


@pytest.fixture
def grants(tmp_path: Path) -> Path:
    path = tmp_path / "grants.json"
    path.write_text(json.dumps(GRANTS))
    return path


@pytest.fixture
def guarded(served: Path, grants: Path) -> Iterator[LocalServer]:
    settings = ServerSettings(
        directory=served,
        token=ADMIN,
        grants=grants,
        volumes=("main.default.data", "main.secret.hidden", "other.s.v"),
        admin=True,
        fsync=False,
    )
    with LocalServer(settings) as server:
        yield server


@pytest.fixture
def ask(guarded: LocalServer) -> Iterator[Ask]:
    """`ask(token, method, target, …)`."""
    with urllib3.PoolManager(retries=False) as pool:

        def call(token: str, method: str, target: str, **options: Any) -> urllib3.BaseHTTPResponse:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            url = target if target.startswith("http") else guarded.url + target
            return pool.request(method, url, headers=headers, **options)

        yield call


def begin_upload(ask: Ask, token: str) -> str:
    answer = ask(token, "POST", f"{FILES}/parts?action=initiate-upload")
    assert answer.status == 200
    return str(answer.json()["multipart_upload"]["session_token"])


def test_a_token_that_may_read_is_refused_every_verb_that_writes(ask: Ask, served: Path) -> None:
    assert ask(ADMIN, "PUT", f"{FILES}/file", body=b"content").status == 204
    session = begin_upload(ask, ADMIN)
    body = {"path": f"{ROOT}/parts", "session_token": session, "start_part_number": 1, "count": 1}
    query = f"upload_type=multipart&session_token={session}"

    refused = [
        ask(READER, "PUT", f"{FILES}/file", body=b"other"),
        ask(READER, "DELETE", f"{FILES}/file"),
        ask(READER, "PUT", f"{DIRECTORIES}/new"),
        ask(READER, "DELETE", f"{DIRECTORIES}/new"),
        ask(READER, "POST", f"{FILES}/parts?action=initiate-upload"),
        ask(READER, "POST", "/api/2.0/fs/create-upload-part-urls", json=body),
        ask(READER, "POST", "/api/2.0/fs/create-abort-upload-url", json=body),
        ask(READER, "POST", "/api/2.0/fs/create-resumable-upload-url", json=body),
        ask(READER, "PUT", f"{FILES}/parts?{query}&part_number=1", body=b"x"),
        ask(READER, "POST", f"{FILES}/parts?action=complete-upload&{query}", json={"parts": []}),
        ask(READER, "POST", f"{FILES}/parts?action=abort-upload&{query}"),
        ask(READER, "PUT", f"/api/3.0/fs/files{ROOT}/file", body=b"other"),
    ]

    for answer in refused:
        assert (answer.status, answer.json()["error_code"]) == (403, "PERMISSION_DENIED")
        assert "WRITE VOLUME on Volume 'main.default.data'" in answer.json()["message"]
    assert ask(READER, "GET", f"{FILES}/file").data == b"content"
    assert ask(READER, "HEAD", f"{FILES}/file").status == 200
    assert [path.name for path in (served / "main/default/data").iterdir()] == ["file"]


@pytest.mark.parametrize("token", [WRITE_ONLY, STRANGER])
def test_a_token_that_may_not_read_learns_nothing(ask: Ask, token: str) -> None:
    ask(ADMIN, "PUT", f"{FILES}/file", body=b"content")

    for method, target in [
        ("GET", f"{FILES}/file"),
        ("GET", f"{FILES}/missing"),
        ("GET", DIRECTORIES),
        ("POST", f"/api/2.0/fs/create-download-url?path={ROOT}/file"),
        ("PUT", f"{FILES}/file"),
    ]:
        answer = ask(token, method, target)
        assert (answer.status, answer.json()["error_code"]) == (403, "PERMISSION_DENIED")
        assert "READ VOLUME" in answer.json()["message"]
    assert ask(token, "HEAD", f"{FILES}/file").status == 403
    assert ask(token, "HEAD", DIRECTORIES).status == 403


def test_grants_of_one_token_add_up_by_volume(ask: Ask) -> None:
    assert ask(WRITER, "PUT", f"{FILES}/file", body=b"x").status == 204
    assert ask(WRITER, "GET", "/api/2.0/fs/directories/Volumes/main/secret/hidden").status == 200
    hidden = "/api/2.0/fs/files/Volumes/main/secret/hidden/file"
    assert ask(WRITER, "PUT", hidden, body=b"x").status == 403
    assert ask(STRANGER, "PUT", "/api/2.0/fs/files/Volumes/other/s/v/file", body=b"x").status == 204


def test_a_signed_url_holds_what_its_maker_was_granted(ask: Ask) -> None:
    ask(ADMIN, "PUT", f"{FILES}/file", body=b"content")

    url = ask(READER, "POST", f"/api/2.0/fs/create-download-url?path={ROOT}/file").json()["url"]

    assert ask("", "GET", url).data == b"content"
    assert ask("", "PUT", url, body=b"other").status == 403
    assert ask("", "DELETE", url).status == 403


def names(ask: Ask, token: str, kind: str, query: str = "") -> list[str]:
    answer = ask(token, "GET", f"/api/2.1/unity-catalog/{kind}{query}")
    assert answer.status == 200, answer.data
    return [entry["name"] for entry in answer.json()[kind]]


def test_listings_show_only_what_a_token_may_see(ask: Ask) -> None:
    assert names(ask, ADMIN, "catalogs") == ["main", "other"]
    assert names(ask, READER, "catalogs") == ["main"]
    assert names(ask, STRANGER, "catalogs") == ["other"]
    assert names(ask, ADMIN, "schemas", "?catalog_name=main") == ["default", "secret"]
    assert names(ask, READER, "schemas", "?catalog_name=main") == ["default"]
    assert names(ask, WRITER, "schemas", "?catalog_name=main") == ["default", "secret"]
    volumes = "?catalog_name=main&schema_name=default"
    assert names(ask, READER, "volumes", volumes) == ["data"]
    for target in (
        "schemas?catalog_name=main",
        "volumes/main.default.data",
        "volumes/main.default.none",
    ):
        answer = ask(STRANGER, "GET", f"/api/2.1/unity-catalog/{target}")
        assert (answer.status, answer.json()["error_code"]) == (403, "PERMISSION_DENIED")


def test_each_token_is_told_who_it_is_and_what_it_may(ask: Ask) -> None:
    def privileges(token: str, query: str = "") -> list[str]:
        target = "/api/2.1/unity-catalog/effective-permissions/volume/main.default.data"
        answer = ask(token, "GET", target + query).json()
        return [
            entry["privilege"]
            for assignment in answer["privilege_assignments"]
            for entry in assignment["privileges"]
        ]

    me = ask(READER, "GET", "/api/2.0/preview/scim/v2/Me").json()
    assert (me["userName"], me["active"]) == ("reader", True)
    use = ["USE_CATALOG", "USE_SCHEMA"]
    assert privileges(READER) == [*use, "READ_VOLUME"]
    assert privileges(WRITER) == [*use, "READ_VOLUME", "WRITE_VOLUME"]
    assert privileges(ADMIN, "?principal=reader") == [*use, "READ_VOLUME"]
    assert privileges(ADMIN, "?principal=stranger") == []
    assert privileges(ADMIN, "?principal=nobody") == []
    target = "/api/2.1/unity-catalog/effective-permissions/volume/main.default.data"
    assert ask(READER, "GET", f"{target}?principal=writer").status == 403


def test_what_is_granted_on_one_volume_is_not_granted_on_its_catalog(ask: Ask) -> None:
    def privileges(token: str, kind: str, name: str) -> list[str]:
        target = f"/api/2.1/unity-catalog/effective-permissions/{kind}/{name}"
        [assignment] = ask(token, "GET", target).json()["privilege_assignments"]
        return [entry["privilege"] for entry in assignment["privileges"]]

    for token in (READER, WRITE_ONLY):
        assert privileges(token, "catalog", "main") == ["USE_CATALOG"]
        assert privileges(token, "schema", "main.default") == ["USE_CATALOG", "USE_SCHEMA"]
    assert privileges(WRITER, "catalog", "main") == ["USE_CATALOG", "READ_VOLUME"]


def test_the_admin_routes_are_for_full_rights(ask: Ask) -> None:
    assert ask(WRITER, "GET", "/admin/statistics").status == 403
    assert ask(WRITER, "PUT", "/admin/faults", json={"faults": []}).status == 403
    assert ask(ADMIN, "GET", "/admin/statistics").status == 200


def test_the_sdk_of_a_reader_raises_permission_denied(guarded: LocalServer) -> None:
    admin = WorkspaceClient(host=guarded.url, token=ADMIN)
    reader = WorkspaceClient(host=guarded.url, token=READER)
    admin.files.upload(f"{ROOT}/file", io.BytesIO(b"content"))

    with pytest.raises(PermissionDenied, match="WRITE VOLUME"):
        reader.files.upload(f"{ROOT}/other", io.BytesIO(b"x"))
    with pytest.raises(PermissionDenied, match="WRITE VOLUME"):
        reader.files.delete(f"{ROOT}/file")
    response = reader.files.download(f"{ROOT}/file")
    assert response.contents is not None
    assert response.contents.read(100) == b"content"
    assert reader.current_user.me().user_name == "reader"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": ""}, "grants[0].token must be printable ASCII without spaces, and not empty"),
        ({"token": "dapi secret"}, "grants[0].token must be printable ASCII"),
        ({"token": None, "token_file": "/x"}, "grants[0] must have either token or token_file"),
        ({"user": ""}, "grants[0].user must be a name"),
        ({"volumes": "main.default.data"}, "grants[0].volumes must be a list of texts"),
        ({"volumes": ["main.data"]}, "grants[0].volumes must be CATALOG.SCHEMA.VOLUME"),
        ({"privileges": []}, "grants[0].privileges must be a list of texts, and not empty"),
        ({"privileges": ["MODIFY"]}, "privileges must be of READ VOLUME, WRITE VOLUME; got 'MODIF"),
        ({"volume": ["a.b.c"]}, "grants[0].volume is not a field; there are user, token"),
    ],
)
def test_a_malformed_grant_is_named_and_its_token_is_not(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    entry = grant("ann", "dapi-secret", "a.b.c", "READ VOLUME") | change
    path = tmp_path / "grants.json"
    path.write_text(json.dumps([entry]))

    with pytest.raises(GrantError) as refused:
        load_grants(path)

    assert str(refused.value).startswith(f"grants file {path}: ")
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_grants_file_that_is_not_json_is_told_without_its_content(tmp_path: Path) -> None:
    path = tmp_path / "grants.json"
    path.write_text('[{"token": "dapi-secret"')

    with pytest.raises(GrantError, match=r"is not JSON$"):
        load_grants(path)
    with pytest.raises(GrantError, match="cannot be read: No such file"):
        load_grants(tmp_path / "missing")


def test_a_token_comes_from_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-the-file\n")
    entry = grant("ann", "", "a.b.c", "READ VOLUME") | {"token_file": str(tmp_path / "token")}
    del entry["token"]
    (tmp_path / "grants.json").write_text(json.dumps([entry]))

    callers = Callers("", load_grants(tmp_path / "grants.json"))

    found = callers.find("from-the-file")
    assert found is not None
    assert (found.user, found.privileges("a", "b", "c")) == ("ann", ["READ_VOLUME"])
    assert callers.find("") is None


def test_tokens_are_in_no_repr_and_no_log(
    ask: Ask, guarded: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ask(WRITER, "PUT", f"{FILES}/file", body=b"x")
    ask("unknown-token", "GET", f"{FILES}/file")

    own = [record.getMessage() for record in caplog.records if "urllib3" not in record.name]
    shown = " ".join(own) + repr(guarded._settings) + repr(vars(guarded._require().service))
    for token in (ADMIN, READER, WRITER, "unknown-token"):
        assert token not in shown
