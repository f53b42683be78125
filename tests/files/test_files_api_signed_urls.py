"""Signed URLs among many readers: one question, one answer, nobody held up by another's."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN, MakeVolume, Request, Scripted, ScriptedServer
from tests.files.test_files_api_downloads import DATA, exact, read

from trainmount_files import ByteRange, Cancelled, LocalError, Unauthenticated, VolumeError
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.files_api.signed_urls import parse_signed_url

PATIENCE_SECONDS = 60.0
NUM_READERS = 8

QUESTION = "/api/2.0/fs/create-download-url"


@pytest.fixture
def at() -> Iterator[MakeVolume]:
    """Makes a scripted server, and a volume at it that reads by signed URLs."""
    with ExitStack() as stack:

        def make(script: Callable[[Request], Scripted]) -> tuple[ScriptedServer, FilesApiVolume]:
            server = stack.enter_context(ScriptedServer(script))
            volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), OPTIONS)
            stack.callback(volume.close)
            return server, volume

        yield make


class GivesUp(threading.Event):
    """Is set when it has been looked at so often, as by somebody who waits."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    def is_set(self) -> bool:
        self._looks -= 1
        return super().is_set() or self._looks < 0


class Reader:
    """Reads the start of the file in a thread of its own and keeps how that ended."""

    def __init__(self, volume: FilesApiVolume, cancel: threading.Event | None = None) -> None:
        self.cancel = cancel or threading.Event()
        self.content = bytearray(100)
        self.error: VolumeError | None = None
        self._thread = threading.Thread(target=self._run, args=(volume,))
        self._thread.start()

    def _run(self, volume: FilesApiVolume) -> None:
        try:
            volume.read_into("file", ByteRange(0, 100), self.content, cancel=self.cancel)
        except VolumeError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the read hangs"


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_readers_that_wait_for_one_url_share_its_refusal(at: MakeVolume, status: int) -> None:
    asked = threading.Semaphore(0)
    answer = threading.Event()

    def script(request: Request) -> Scripted:
        if request.method == "GET":
            return exact(request)
        asked.release()
        assert answer.wait(PATIENCE_SECONDS)
        # One 5xx is asked again; a wait beyond the patience for this question ends that.
        return Scripted(status=status, headers={"Retry-After": "60"})

    server, volume = at(script)
    readers = [Reader(volume) for _ in range(NUM_READERS)]
    assert asked.acquire(timeout=PATIENCE_SECONDS)
    # All of them wait for the one question by now, or come later and find its answer.
    answer.set()
    for reader in readers:
        reader.join()
        assert reader.error is None
        assert reader.content == DATA[:100]
    late = len(server.asked("POST", QUESTION)) - 1
    # A file that is not there is not remembered: who came after the answer has asked again.
    assert late == 0 if status != 404 else late < NUM_READERS


def test_a_refusal_is_remembered_though_the_bytes_cannot_be_had_without(at: MakeVolume) -> None:
    server, volume = at(lambda _: Scripted(status=403))
    for _ in range(3):
        with pytest.raises(VolumeError, match="HTTP 403"):
            read(volume, 0, 100)
    assert len(server.asked("POST", QUESTION)) == 1
    assert len(server.asked("GET", "/")) == 3


def test_a_file_that_was_not_there_is_asked_for_again(at: MakeVolume) -> None:
    server, volume = at(lambda _: Scripted(status=404))
    for _ in range(3):
        with pytest.raises(VolumeError, match="HTTP 404"):
            read(volume, 0, 100)
    assert len(server.asked("POST", QUESTION)) == 3


def test_one_readers_wait_for_a_url_is_no_reason_for_another_not_to_be_cancelled(
    at: MakeVolume,
) -> None:
    asked = threading.Event()
    answer = threading.Event()

    def script(request: Request) -> Scripted:
        if request.method == "POST":
            asked.set()
            answer.wait(PATIENCE_SECONDS)
            return Scripted(status=403)
        return exact(request)

    _, volume = at(script)
    first = Reader(volume)
    assert asked.wait(PATIENCE_SECONDS)
    second = Reader(volume, GivesUp(looks=10))
    second.join()
    # The first one's question is still under way.
    assert not answer.is_set()
    assert isinstance(second.error, Cancelled)
    third = Reader(volume)
    answer.set()
    first.join()
    third.join()
    assert (first.error, third.error) == (None, None)
    assert first.content == third.content == DATA[:100]


def test_who_gives_up_while_asking_leaves_the_question_to_the_next(at: MakeVolume) -> None:
    asked = threading.Semaphore(0)

    def script(request: Request) -> Scripted:
        if request.method == "POST":
            asked.release()
            if len(server.asked("POST", QUESTION)) == 1:
                assert first.cancel.wait(PATIENCE_SECONDS)
                return Scripted(hang_up=True)
            url = f"http://{request.headers['host']}/signed"
            return Scripted(body=json.dumps({"url": url, "headers": []}).encode())
        return exact(request)

    server, volume = at(script)
    first = Reader(volume)
    assert asked.acquire(timeout=PATIENCE_SECONDS)
    second = Reader(volume)
    first.cancel.set()
    first.join()
    second.join()
    assert isinstance(first.error, Cancelled)
    assert second.error is None
    assert second.content == DATA[:100]
    assert len(server.asked("GET", "/signed")) == 1


def test_a_store_that_is_silent_about_urls_is_read_without_them(
    at: MakeVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmount_files.files_api.signed_urls._SILENCE_SECONDS", 0.1)
    over = threading.Event()

    def script(request: Request) -> Scripted:
        if request.method == "POST":
            over.wait(PATIENCE_SECONDS)
            return Scripted(hang_up=True)
        return exact(request)

    _, volume = at(script)
    assert read(volume, 0, 100) == DATA[:100]
    over.set()


def test_a_url_whose_time_is_over_is_not_tried(at: MakeVolume) -> None:
    def script(request: Request) -> Scripted:
        if request.method == "GET":
            return exact(request)
        url = f"http://{request.headers['host']}/signed/{len(server.requests)}"
        return Scripted(body=json.dumps({"url": url, "headers": []}).encode())

    server, _ = at(script)
    options = replace(OPTIONS, url_lifetime_seconds=0.0)
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    for _ in range(2):
        assert read(volume, 0, 100) == DATA[:100]
    assert [request.target for request in server.asked("GET", "/")] == ["/signed/1", "/signed/3"]
    volume.close()


class Renewing(Credentials):
    """Has another token each time it is asked."""

    def __init__(self, host: str) -> None:
        super().__init__(host=host, token="unused")
        self.number = 0

    def headers(self) -> dict[str, str]:
        self.number += 1
        return {"Authorization": f"Bearer token-{self.number}"}


@pytest.mark.parametrize("refusals", [1, 2])
def test_a_read_whose_token_has_just_ended_is_sent_once_more_with_the_new_one(
    at: MakeVolume, refusals: int
) -> None:
    def script(request: Request) -> Scripted:
        return exact(request) if len(server.requests) > refusals else Scripted(status=401)

    server, _ = at(script)
    options = replace(OPTIONS, direct_read_max_bytes=1 << 30)
    volume = FilesApiVolume(ROOT, Renewing(server.url), options)
    if refusals == 1:
        assert read(volume, 0, 100) == DATA[:100]
    else:
        with pytest.raises(Unauthenticated):
            read(volume, 0, 100)
    sent = [request.headers["authorization"] for request in server.requests]
    assert len(sent) == len(set(sent)) == 2
    volume.close()


@pytest.mark.parametrize("refusals", [1, 2])
def test_a_call_whose_token_has_just_ended_is_sent_once_more_with_the_new_one(
    at: MakeVolume, refusals: int
) -> None:
    server, _ = at(lambda _: Scripted(status=200 if len(server.requests) > refusals else 401))
    volume = FilesApiVolume(ROOT, Renewing(server.url), OPTIONS)
    if refusals == 1:
        volume.make_directory("directory")
    else:
        with pytest.raises(Unauthenticated):
            volume.make_directory("directory")
    sent = [request.headers["authorization"] for request in server.requests]
    assert len(sent) == len(set(sent)) == 2
    volume.close()


def test_a_token_that_is_refused_and_the_only_one_is_sent_once(at: MakeVolume) -> None:
    server, _ = at(lambda _: Scripted(status=401))
    options = replace(OPTIONS, direct_read_max_bytes=1 << 30)
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    with pytest.raises(Unauthenticated):
        read(volume, 0, 100)
    assert len(server.requests) == 1
    volume.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOENT])
def test_a_rename_without_room_for_its_copy_is_a_local_error_and_leaves_both_files(
    remote: FilesApiVolume, served: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    remote.put("old", b"content")
    remote.put("new", b"before")

    def refuse() -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(LocalError) as caught:
        remote.rename("old", "new")
    assert (caught.value.errno, caught.value.operation, caught.value.path) == (
        number,
        "rename",
        "old",
    )
    assert (served / "old").read_bytes() == b"content"
    assert (served / "new").read_bytes() == b"before"


HEADERS_OF_OTHER_REQUESTS = [
    "authorization",
    "connection",
    "content-length",
    "Cookie",
    "Expect",
    "HOST",
    "If-Match",
    "If-Modified-Since",
    "If-None-Match",
    "If-Range",
    "If-Unmodified-Since",
    "Keep-Alive",
    "Proxy-Authorization",
    "Range",
    "TE",
    "Trailer",
    "Transfer-Encoding",
    "Upgrade",
]


@pytest.mark.parametrize("name", HEADERS_OF_OTHER_REQUESTS)
def test_a_urls_header_that_would_make_it_another_request_is_left_out(name: str) -> None:
    headers = [{"name": name, "value": "x"}, {"name": "x-ms-blob-type", "value": "BlockBlob"}]
    signed = parse_signed_url({"url": "http://host/x", "headers": headers})
    assert signed is not None
    assert dict(signed.headers) == {"x-ms-blob-type": "BlockBlob"}
