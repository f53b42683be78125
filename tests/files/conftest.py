"""A directory and the Files API behind one fixture, and a server whose faults are on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trainmount_files import Volume
from trainmount_files.directory import DirectoryVolume
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.options import FilesApiOptions
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.retry import RetryPolicy
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.settings import ServerSettings

TOKEN = "dapi-0123456789abcdef"
ROOT = "/Volumes/main/default/data"

OPTIONS = FilesApiOptions(
    multipart_threshold_bytes=64 << 10,
    part_size_bytes=16 << 10,
    min_part_bytes=1,
    parallelism=4,
    direct_read_max_bytes=0,
    retry=RetryPolicy(deadline_seconds=2, first_delay_seconds=0.01, max_delay_seconds=0.05),
)
"""Small sizes and short waits; every read by a signed URL."""


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """The directory of the volume at the server."""
    return tmp_path / "served" / "main" / "default" / "data"


@pytest.fixture
def server(tmp_path: Path, served: Path) -> Iterator[LocalServer]:
    served.mkdir(parents=True)
    settings = ServerSettings(
        directory=tmp_path / "served", token=TOKEN, min_part_bytes=1, fsync=False
    )
    with LocalServer(settings) as running:
        yield running


@pytest.fixture
def remote(server: LocalServer) -> Iterator[FilesApiVolume]:
    """A volume of the Files API at `server`."""
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), OPTIONS)
    yield volume
    volume.close()


@pytest.fixture(params=["directory", "files-api", "files-api-direct"])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Volume]:
    """An empty volume of each kind."""
    if request.param == "directory":
        (tmp_path / "plain").mkdir()
        yield DirectoryVolume(tmp_path / "plain")
        return
    server: LocalServer = request.getfixturevalue("server")
    direct = 1 << 30 if request.param == "files-api-direct" else 0
    options = FilesApiOptions(
        multipart_threshold_bytes=OPTIONS.multipart_threshold_bytes,
        part_size_bytes=OPTIONS.part_size_bytes,
        min_part_bytes=1,
        direct_read_max_bytes=direct,
        retry=OPTIONS.retry,
    )
    opened = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    yield opened
    opened.close()


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a scripted server was asked."""

    method: str
    target: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """What it answers. Without a Content-Length among the headers the body's own is sent."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    hang_up: bool = False
    """Close the connection with no answer."""


class ScriptedServer:
    """A server that a test writes answer by answer, for what no real one does on purpose."""

    def __init__(self, script: Callable[[Request], Scripted]) -> None:
        self.requests: list[Request] = []
        self.sent_bytes = 0
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with suppress(ConnectionError):
                    super().handle_one_request()

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(
                    method=self.command,
                    target=self.path,
                    headers=headers,
                    body=self.rfile.read(length),
                )
                scripted.requests.append(request)
                self.write(script(request))

            def write(self, answer: Scripted) -> None:
                self.close_connection = answer.hang_up
                if answer.hang_up:
                    return
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in answer.headers:
                    self.send_header("Content-Length", str(len(answer.body)))
                elif int(answer.headers["Content-Length"]) > len(answer.body):
                    self.close_connection = True
                self.end_headers()
                for start in range(0, len(answer.body), 1 << 16):
                    piece = answer.body[start : start + (1 << 16)]
                    self.wfile.write(piece)
                    scripted.sent_bytes += len(piece)

            def log_message(self, *_: object) -> None:
                pass

        for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
            setattr(Handler, f"do_{method}", Handler.answer)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def asked(self, method: str, prefix: str) -> list[Request]:
        return [
            request
            for request in self.requests
            if request.method == method and request.target.startswith(prefix)
        ]

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


MakeVolume = Callable[[Callable[[Request], Scripted]], tuple[ScriptedServer, FilesApiVolume]]


@pytest.fixture
def scripted() -> Iterator[MakeVolume]:
    """Makes a scripted server, and a volume at it that reads without signed URLs."""
    with ExitStack() as stack:

        def make(script: Callable[[Request], Scripted]) -> tuple[ScriptedServer, FilesApiVolume]:
            server = stack.enter_context(ScriptedServer(script))
            options = replace(OPTIONS, direct_read_max_bytes=1 << 30)
            opened = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
            stack.callback(opened.close)
            return server, opened

        yield make
