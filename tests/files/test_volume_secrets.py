"""No token, signature or upload session in any message, log line, repr or pickle."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN, MakeVolume, Request, Scripted
from tests.files.fault_cells import ROWS, Scene

from trainmount_files import ByteRange, VolumeError
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.api import Call
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.redaction import one_line
from trainmount_files.retry import RetryPolicy
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault

SIGNATURE = "sig-5ecre7-51gna7ure"
IMPATIENT = replace(OPTIONS, retry=RetryPolicy(deadline_seconds=0.1, first_delay_seconds=0.05))
SESSION = "upload-5ecre7-5e5510n"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Everything that was logged, at DEBUG, by anybody."""
    caplog.set_level(logging.DEBUG)
    for name in ("urllib3", "urllib3.connectionpool", "databricks.sdk", "trainmount_files"):
        caplog.set_level(logging.DEBUG, logger=name)

    def collect() -> str:
        return "\n".join(f"{r.getMessage()} {vars(r)}" for r in caplog.records)

    return collect


def everything_about(error: VolumeError) -> str:
    links: list[str] = []
    current: BaseException | None = error
    while current is not None:
        links += [str(current), repr(current), repr(current.args)]
        current = current.__cause__ or current.__context__
    told = traceback.TracebackException.from_exception(error, capture_locals=False)
    return "\n".join([*links, *told.format()])


def hostile_store(fail: Scripted) -> Callable[[Request], Scripted]:
    """Gives signed URLs and sessions, then fails, repeating every secret it knows."""

    def script(request: Request) -> Scripted:
        base = f"http://{request.headers['host']}/signed/{SIGNATURE}?X-Signature={SIGNATURE}"
        if "create-download-url" in request.target:
            return Scripted(body=json.dumps({"url": base, "headers": []}).encode())
        if "initiate-upload" in request.target:
            answer = {"multipart_upload": {"session_token": SESSION}}
            return Scripted(body=json.dumps(answer).encode())
        if "create-upload-part-urls" in request.target:
            number = json.loads(request.body)["start_part_number"]
            url = {"part_number": number, "url": base, "headers": []}
            return Scripted(body=json.dumps({"upload_part_urls": [url]}).encode())
        return fail

    return script


def echo(request: Request) -> bytes:
    """What the request itself tells of secrets, in words that do not look like any: only who knows
    them can leave them out.
    """
    asked = request.target + request.body.decode("latin-1") + str(request.headers)
    known = [secret for secret in (TOKEN, SIGNATURE, SESSION) if secret in asked]
    return json.dumps({"error_code": "X", "message": f"no {' nor '.join(known)} here"}).encode()


MESSAGE = (
    f"refused Bearer {TOKEN} for https://store/x?X-Signature={SIGNATURE} "
    f"session_token={SESSION} Signature: {SIGNATURE}"
)
ECHO = json.dumps({"error_code": "PERMISSION_DENIED", "message": MESSAGE}).encode()
XML = f"<Error><Code>AccessDenied</Code><Message>{MESSAGE}</Message></Error>".encode()


@pytest.mark.parametrize(
    "fail",
    [
        Scripted(hang_up=True),
        Scripted(status=403, body=ECHO),
        Scripted(status=403, body=XML),
        Scripted(status=503, body=ECHO),
    ],
    ids=["reset", "json", "xml", "throttled"],
)
def test_a_failing_store_cannot_make_us_tell(
    scripted: MakeVolume, said: Callable[[], str], tmp_path: Path, fail: Scripted
) -> None:
    server, _ = scripted(hostile_store(fail))
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), IMPATIENT)
    local = tmp_path / "local"
    local.write_bytes(bytes(100_000))
    begun = volume.start_upload("dir/name")

    def send_file() -> None:
        with local.open("rb") as source:
            volume.upload("dir/name", source, 100_000)

    calls: dict[str, Callable[[], object]] = {
        "stat": lambda: volume.stat("dir/name"),
        "read": lambda: volume.read_into("dir/name", ByteRange(0, 10), bytearray(10)),
        "put": lambda: volume.put("dir/name", b"1"),
        "upload": send_file,
        "list": lambda: volume.list_page("dir/name"),
        "part": lambda: begun.put_part(1, b"1"),
    }
    for name, call in calls.items():
        with pytest.raises(VolumeError) as caught:
            call()
        text = everything_about(caught.value)
        for secret in (TOKEN, SIGNATURE, SESSION):
            assert secret not in text, name
        assert "dir/name" in str(caught.value)
    begun.abort()
    volume.close()
    logged = said()
    assert '"POST /<redacted>' in logged
    for secret in (TOKEN, SIGNATURE, SESSION):
        assert secret not in logged


def error_of_call(call: Callable[[Scene], object], scene: Scene) -> VolumeError | None:
    try:
        call(scene)
    except VolumeError as error:
        return error
    return None


@pytest.mark.parametrize(
    "fail",
    [Scripted(hang_up=True), Scripted(status=400), Scripted(status=503), Scripted()],
    ids=["reset", "refused", "throttled", "nonsense"],
)
def test_no_call_repeats_what_a_store_says_of_its_secrets(
    scripted: MakeVolume, said: Callable[[], str], tmp_path: Path, fail: Scripted
) -> None:
    def script(request: Request) -> Scripted:
        # A file is there, so that each way to read it is gone; each way to write fails.
        if request.method == "HEAD" and "/fs/files/" in request.target:
            return Scripted(headers={"Content-Length": "41000"}, body=b"")
        return hostile_store(replace(fail, body=echo(request)))(request)

    server, _ = scripted(script)
    options = replace(IMPATIENT, multipart_threshold_bytes=20_000)
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    local = tmp_path / "local"
    local.write_bytes(bytes(50_000))
    scene = Scene(volume, "dir/name", local, tmp_path)
    failed = 0
    for name, call in {row.name: row.call for row in ROWS}.items():
        error = error_of_call(call, scene)
        if error is not None:
            failed += 1
            text = everything_about(error)
            assert "dir/name" in str(error), name
            for secret in (TOKEN, SIGNATURE, SESSION):
                assert secret not in text, name
    assert failed > 5
    volume.close()
    logged = said()
    for secret in (TOKEN, SIGNATURE, SESSION):
        assert secret not in logged


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "-o", "json", f"{ROOT}/dir"],
        ["cp", "-o", "json", f"{ROOT}/dir/name", "back"],
        ["cp", "-o", "json", "local", f"{ROOT}/dir/name"],
    ],
    ids=["ls", "cp down", "cp up"],
)
def test_the_command_line_does_not_tell_either(
    scripted: MakeVolume, tmp_path: Path, arguments: list[str]
) -> None:
    server, _ = scripted(hostile_store(Scripted(status=403, body=ECHO)))
    (tmp_path / "local").write_bytes(bytes(100))
    variables = {"DATABRICKS_HOST": server.url, "DATABRICKS_TOKEN": TOKEN}
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "trainmount_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**kept, **variables},
    )
    assert done.returncode == 1
    assert "HTTP 403" in done.stdout + done.stderr
    for secret in (TOKEN, SIGNATURE, SESSION):
        assert secret not in done.stdout + done.stderr


def test_the_server_logs_neither_tokens_nor_signed_urls(
    server: LocalServer, remote: FilesApiVolume, said: Callable[[], str]
) -> None:
    remote.put("file", b"0123456789")
    api = remote.api
    call = Call(
        operation="read",
        path="file",
        method="POST",
        target="/create-download-url",
        query={"path": f"{ROOT}/file"},
    )
    signed = json.loads(api.call(call).unwrap().body)["url"]
    secret = signed.rpartition("/")[2]
    assert urllib.request.urlopen(signed).read() == b"0123456789"
    spoilt = [signed[:-1], signed + "0", signed.replace("/presigned/", "/presigned/%ff")]
    for url, headers in [
        *((url, {}) for url in spoilt),
        (signed, {"Authorization": f"Bearer {TOKEN}"}),
        (f"{server.url}/api/2.0/fs/files{ROOT}/file", {"Authorization": f"Bearer {TOKEN}x"}),
        (f"{server.url}/api/2.0/fs/files{ROOT}/no", {"Authorization": f"Bearer {TOKEN}"}),
    ]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, headers=headers))
        refused.value.close()
        assert 400 <= refused.value.code < 500
    server.inject(Fault(route="presigned_get", cut_after_bytes=3, count=1))
    remote.read_into("file", ByteRange(0, 10), bytearray(10))
    logged = said()
    assert TOKEN not in logged
    assert secret not in logged


def test_a_good_run_logs_no_secret_either(
    server: LocalServer, remote: FilesApiVolume, said: Callable[[], str], tmp_path: Path
) -> None:
    local = tmp_path / "local"
    local.write_bytes(bytes(100_000))
    with local.open("rb") as source:
        remote.upload("file", source, 100_000)
    remote.read_into("file", ByteRange(0, 10), bytearray(10))
    server.inject(Fault(route="presigned_get", expired_url=True, count=1))
    remote.read_into("file", ByteRange(0, 10), bytearray(10))
    logged = said()
    assert TOKEN not in logged
    assert "session_token" not in logged
    assert "/presigned" not in logged


def test_a_host_that_cannot_be_reached_is_an_error_without_the_token(
    said: Callable[[], str],
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        for host in (f"http://127.0.0.1:{port}", "http://no-such-host.invalid"):
            volume = FilesApiVolume(ROOT, Credentials(host=host, token=TOKEN), IMPATIENT)
            with pytest.raises(VolumeError) as caught:
                volume.stat("dir/name")
            text = everything_about(caught.value)
            assert TOKEN not in text
            assert str(caught.value).startswith("stat dir/name: ")
            volume.close()
    assert TOKEN not in said()


def test_no_object_shows_its_secret() -> None:
    credentials = Credentials(host="http://host", token=TOKEN)
    volume = FilesApiVolume(ROOT, credentials)
    assert TOKEN not in repr(credentials) + repr(volume)
    assert TOKEN.encode() not in pickle.dumps(volume)


@pytest.mark.parametrize(
    "text",
    [
        "see https://store/path/S3CR3T?x=S3CR3T#S3CR3T now",
        "Authorization: Bearer S3CR3T",
        "token dapiS3CR3T0123456789",
        '{"session_token": "S3CR3T", "sig":"S3CR3T"}',
        "X-Amz-Signature=S3CR3T&X-Amz-Credential=S3CR3T",
        "client_secret: S3CR3T, password=S3CR3T",
        "my own S3CR3T",
    ],
)
def test_what_looks_like_a_secret_is_cut_out(text: str) -> None:
    redacted = one_line(text, "own S3CR3T")
    assert "S3CR3T" not in redacted
    assert "<redacted>" in redacted


def test_a_message_is_one_bounded_line() -> None:
    assert one_line("a\r\n b\t c") == "a b c"
    assert len(one_line("x" * 10_000)) == 300
