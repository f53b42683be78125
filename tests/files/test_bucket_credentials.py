"""Where a bucket's credentials come from, and what is said where there are none."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tests.files.conftest import Request, Scripted, ScriptedServer
from tests.files.fake_s3 import FakeS3

from trainmount_files import (
    InvalidRequest,
    Unauthenticated,
    Unsupported,
    list_directory,
    open_volume,
)
from trainmount_files.bucket import Location, metadata
from trainmount_files.bucket.s3_settings import S3Address
from trainmount_files.per_process import PerProcess

SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty one; no variables, and no answer where a cloud's metadata service would be."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(metadata, "_MISSING", PerProcess(metadata._Missing))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(metadata, "_ADDRESS", taken.getsockname())
    return tmp_path


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    # Of such a directory one page is listed by obstore, and one past it.
    with ScriptedServer(FakeS3({"d/../x": b"1", "d/f": b"2"})) as running:
        yield running


def configure(home: Path, *, config: str = "", credentials: str = "") -> None:
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text(config)
    (home / ".aws" / "credentials").write_text(credentials)


def signers(server: ScriptedServer, **options: str) -> set[str]:
    """The key identifiers that both ways of listing signed with."""
    with ExitStack() as stack:
        volume = open_volume("s3://bucket", options=options or {"endpoint": server.url})
        stack.callback(volume.close)
        assert [entry.path for entry in list_directory(volume, "d")] == ["d/f"]
    ways = {"encoding-type" in request.target for request in server.requests}
    assert ways == {True, False}
    return {
        request.headers["authorization"].partition("Credential=")[2].partition("/")[0]
        for request in server.requests
    }


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b", {}),
        ("s3://b", {"endpoint": "http://127.0.0.1:1"}),
        ("gs://b", {}),
        ("az://c", {"account_name": "a"}),
    ],
)
def test_without_credentials_and_a_cloud_the_first_call_says_so_at_once(
    url: str, options: dict[str, str]
) -> None:
    volume = open_volume(url, options=options)
    started = time.monotonic()
    for call in (
        lambda: volume.stat("f"),
        lambda: volume.list_page(""),
        lambda: volume.delete("f"),
    ):
        with pytest.raises(Unauthenticated) as caught:
            call()
        for name in ("AWS_ACCESS_KEY_ID", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_"):
            assert name in str(caught.value)
        assert url in str(caught.value)
    assert time.monotonic() - started < 30
    volume.close()


def test_a_machine_without_a_metadata_service_is_asked_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append((address, timeout))
        raise TimeoutError

    monkeypatch.setattr(metadata.socket, "create_connection", connect)
    for _ in range(5):
        with pytest.raises(Unauthenticated):
            metadata.check_credentials(Location("s3", "b"), {}, None)
    assert asked == [(metadata._ADDRESS, 2.0)]


def test_where_a_metadata_service_answers_it_is_left_to_obstore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        monkeypatch.setattr(metadata, "_ADDRESS", service.getsockname())
        metadata.check_credentials(Location("s3", "b"), {}, None)
        metadata.check_credentials(Location("az", "c"), {"account_name": "a"}, None)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(Unauthenticated):
            metadata.check_credentials(Location("s3", "b"), {}, None)


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [
        ("s3", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        ("s3", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
        ("s3", "AWS_SKIP_SIGNATURE"),
        ("gs", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("az", "AZURE_FEDERATED_TOKEN_FILE"),
    ],
)
def test_whoever_names_a_source_is_not_second_guessed(
    monkeypatch: pytest.MonkeyPatch, scheme: str, variable: str
) -> None:
    monkeypatch.setenv(variable, "true")
    metadata.check_credentials(Location(scheme, "b"), {}, None)


def test_the_default_profile_is_read(server: ScriptedServer, home: Path) -> None:
    configure(
        home,
        config=f"[default]\nregion = eu-north-1\nendpoint_url = {server.url}\n",
        credentials=f"[default]\naws_access_key_id = PROFILE\naws_secret_access_key = {SECRET}\n",
    )
    volume = open_volume("s3://bucket")
    assert volume.stat("d/f").size_bytes == 1
    assert [entry.path for entry in list_directory(volume, "d")] == ["d/f"]
    volume.close()
    for request in server.requests:
        assert "Credential=PROFILE/" in request.headers["authorization"]
        assert "/eu-north-1/s3/" in request.headers["authorization"]
    assert SECRET.encode() not in pickle.dumps(volume)


def test_variables_and_options_are_above_profiles(
    server: ScriptedServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = "aws_access_key_id = {}\naws_secret_access_key = secret\n"
    configure(
        home, credentials=f"[default]\n{keys.format('DEFAULT')}[other]\n{keys.format('OTHER')}"
    )
    assert signers(server) == {"DEFAULT"}
    monkeypatch.setenv("AWS_PROFILE", "other")
    server.requests.clear()
    assert signers(server) == {"OTHER"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "VARIABLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    server.requests.clear()
    assert signers(server) == {"VARIABLE"}
    server.requests.clear()
    options = {
        "aws_access_key_id": "OPTION",
        "secret_access_key": SECRET,
        "aws_endpoint": server.url,
    }
    assert signers(server, **options) == {"OPTION"}


def test_a_session_token_of_a_profile_is_sent(
    server: ScriptedServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(
        home,
        config="[profile p]\naws_access_key_id=A\naws_secret_access_key=B\naws_session_token=T\n",
    )
    monkeypatch.setenv("AWS_PROFILE", "p")
    assert signers(server) == {"A"}
    assert {r.headers["x-amz-security-token"] for r in server.requests} == {"T"}


def test_a_profile_that_is_not_there_or_cannot_be_read_is_told_without_its_text(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(home, credentials=f"[default\naws_secret_access_key {SECRET}\n")
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(InvalidRequest, match="no profile 'missing'") as caught:
        open_volume("s3://bucket")
    assert SECRET not in str(caught.value)


def test_a_profile_without_keys_needs_botocore(
    server: ScriptedServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(home, config="[default]\nsso_account_id = 1\nsso_session = s\n")
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(Unauthenticated, match="pip install botocore"):
        open_volume("s3://bucket")

    frozen = SimpleNamespace(access_key="CHAIN", secret_key=SECRET, token=None)
    found = SimpleNamespace(get_frozen_credentials=lambda: frozen)
    session = ModuleType("botocore.session")
    session.Session = lambda: SimpleNamespace(get_credentials=lambda: found)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "botocore", ModuleType("botocore"))
    monkeypatch.setitem(sys.modules, "botocore.session", session)
    assert signers(server) == {"CHAIN"}


def test_beside_a_role_that_obstore_alone_knows_the_key_is_named_and_the_directory_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    fake = FakeS3({"d/../x": b"1", "d/f": b"2", "e/": b""})

    def script(request: Request) -> Scripted:
        if request.target != "/credentials":
            return fake(request)
        answer = {"AccessKeyId": "ROLE", "SecretAccessKey": SECRET, "Token": "T"}
        return Scripted(body=json.dumps(answer | {"Expiration": "2099-01-01T00:00:00Z"}).encode())

    (home / "token").write_text("pod")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(home / "token"))
    with ScriptedServer(script) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{server.url}/credentials")
        volume = open_volume("s3://bucket", options={"endpoint": server.url})
        assert volume.stat("d/f").size_bytes == 1
        assert "Credential=ROLE/" in server.requests[-1].headers["authorization"]
        with pytest.raises(InvalidRequest, match=r"the key 'd/\.\./' \(.*pip install botocore"):
            volume.list_page("d")
        with pytest.raises(Unsupported, match="pip install botocore"):
            volume.remove_directory("e")
        volume.close()


def test_an_open_bucket_is_listed_without_a_signature(server: ScriptedServer) -> None:
    volume = open_volume("s3://bucket", options={"endpoint": server.url, "skip_signature": "true"})
    assert [entry.path for entry in list_directory(volume, "d")] == ["d/f"]
    assert not any("authorization" in request.headers for request in server.requests)
    volume.close()


@pytest.mark.parametrize(
    ("given", "variables", "url"),
    [
        ({}, {}, "https://s3.us-east-1.amazonaws.com/b"),
        ({}, {"AWS_DEFAULT_REGION": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com/b"),
        ({"region": "eu-north-1"}, {"AWS_REGION": "x"}, "https://s3.eu-north-1.amazonaws.com/b"),
        ({"endpoint": "http://h:1/"}, {"AWS_ENDPOINT_URL": "http://x"}, "http://h:1/b"),
        ({}, {"AWS_ENDPOINT_URL_S3": "http://h", "AWS_ENDPOINT": "http://x"}, "http://h/b"),
        (
            {"virtual_hosted_style_request": "true"},
            {"AWS_REGION": "r"},
            "https://b.s3.r.amazonaws.com",
        ),
        ({"endpoint": "http://b.h"}, {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"}, "http://b.h"),
    ],
)
def test_signed_requests_go_where_those_of_obstore_go(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], variables: dict[str, str], url: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert S3Address.of(Location("s3", "b"), given).url == url
