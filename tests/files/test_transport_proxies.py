"""Through a proxy of the environment: its credentials go to it alone, targets into no log."""

from __future__ import annotations

import base64
import logging

import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN, Request, Scripted, ScriptedServer

from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials


def test_a_proxy_of_the_environment_is_used_and_its_password_is_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def script(request: Request) -> Scripted:
        return Scripted(body=b'{"contents": [{"name": "file", "file_size": 1}]}')

    with ScriptedServer(script) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("http://", "http://me:pass%40word@"))
        monkeypatch.delenv("no_proxy", raising=False)
        credentials = Credentials(host="http://workspace.example", token=TOKEN)
        volume = FilesApiVolume(ROOT, credentials, OPTIONS)
        assert [entry.path for entry in volume.list_page("").entries] == ["file"]
        volume.close()
        (request,) = proxy.requests
    assert request.target.startswith(f"http://workspace.example/api/2.0/fs/directories{ROOT}?")
    said = base64.b64decode(request.headers["proxy-authorization"].partition(" ")[2])
    assert said == b"me:pass@word"
    assert "pass" not in caplog.text
    assert "/api/" not in caplog.text


def test_a_host_that_needs_no_proxy_is_reached_straight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ScriptedServer(lambda _: Scripted(body=b"{}")) as server:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), OPTIONS)
        assert volume.list_page("").entries == ()
        volume.close()
