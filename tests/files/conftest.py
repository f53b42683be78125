"""Every kind of volume behind one fixture, and a server whose faults are on purpose.

With `--real-bucket` the fixture is a bucket of a real S3 server, with `--volume URL` a directory of
whatever volume is there: `pytest tests/files/test_volume_contract.py --volume /Volumes/c/s/v`.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hypothesis
import pytest
from tests.external.s3_server import BUCKET, S3Server, running_s3_server

from trainmount_files import NotFound, Volume, list_directory, open_volume
from trainmount_files.bucket import BucketOptions, BucketVolume, Location
from trainmount_files.catalog import CatalogVolume
from trainmount_files.chunks import ChunkedVolume
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
def server(tmp_path: Path, served: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    served.mkdir(parents=True)
    # At the end it does not wait for the requests that a fault holds up.
    monkeypatch.setattr("trainmount_files.server.embedded._STOP_SECONDS", 0.05)
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


KINDS = ["directory", "files-api", "files-api-direct", "bucket"]
"""What every contract test runs over; the last keeps its keys in memory."""

WRAPPING_KINDS = ["catalog", "chunked"]
"""What the volume suite runs over besides: volumes that hand most calls to one of the others."""

BUCKET_OPTIONS = BucketOptions(
    part_size_bytes=16 << 10,
    window_bytes=64 << 10,
    held_back_bytes=64 << 10,
    page_entries=100,
    retry=OPTIONS.retry,
)

REAL_BUCKET_OPTIONS = BucketOptions(
    # S3 takes no smaller parts.
    part_size_bytes=5 << 20,
    parallelism=2,
    window_bytes=10 << 20,
    held_back_bytes=10 << 20,
    page_entries=100,
    retry=RetryPolicy(deadline_seconds=10, first_delay_seconds=0.05, max_delay_seconds=0.5),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-bucket", action="store_true", help="the volume suite over an S3 server it starts"
    )
    parser.addoption(
        "--examples",
        type=int,
        default=12,
        help="inputs of a property that does not say how many it needs; 200 for a long look",
    )
    parser.addoption(
        "--volume",
        metavar="URL",
        help="the volume suite over a new directory in this volume, which it removes afterwards",
    )


def pytest_configure(config: pytest.Config) -> None:
    examples = config.getoption("--examples", default=12)
    hypothesis.settings.register_profile("files", max_examples=examples)
    hypothesis.settings.load_profile("files")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "volume" in metafunc.fixturenames:
        config = metafunc.config
        is_suite = metafunc.module.__name__.endswith("test_volume_contract")
        kinds = [*KINDS, *(WRAPPING_KINDS if is_suite else ())]
        if config.getoption("--volume", default=None):
            kinds = ["given"]
        elif config.getoption("--real-bucket", default=False):
            kinds = ["s3"]
        metafunc.parametrize("volume", kinds, indirect=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with running_s3_server() as server:
        yield server


@pytest.fixture
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Volume]:
    """An empty volume of each kind."""
    name = f"trainmount-{uuid.uuid4().hex}"
    opened: Volume
    files: LocalServer
    match request.param:
        case "directory":
            (tmp_path / "plain").mkdir()
            opened = DirectoryVolume(tmp_path / "plain")
        case "bucket":
            opened = BucketVolume(Location("memory", name, "a/prefix"), BUCKET_OPTIONS)
        case "s3":
            server: S3Server = request.getfixturevalue("s3_server")
            options = replace(REAL_BUCKET_OPTIONS, storage=server.storage)
            opened = BucketVolume(Location("s3", BUCKET, name), options)
        case "chunked":
            (tmp_path / "plain").mkdir()
            opened = ChunkedVolume(
                DirectoryVolume(tmp_path / "plain"), max_object_bytes=8192, chunk_bytes=4000
            )
        case "catalog":
            files = request.getfixturevalue("server")
            opened = CatalogVolume(ROOT, Credentials(host=files.url, token=TOKEN), OPTIONS)
        case "given":
            with given_volume(request.config.getoption("--volume"), name) as opened:
                yield opened
            return
        case kind:
            files = request.getfixturevalue("server")
            direct = 1 << 30 if kind == "files-api-direct" else 0
            opened = FilesApiVolume(
                ROOT,
                Credentials(host=files.url, token=TOKEN),
                replace(OPTIONS, direct_read_max_bytes=direct),
            )
    yield opened
    opened.close()


@contextmanager
def given_volume(url: str, name: str) -> Iterator[Volume]:
    """A new directory of a real volume."""
    around = open_volume(url)
    around.make_directory(name)
    opened = open_volume(f"{url.rstrip('/')}/{name}")
    try:
        yield opened
    finally:
        opened.close()
        remove_tree(around, name)
        around.close()


def remove_tree(volume: Volume, path: str) -> None:
    for entry in list(list_directory(volume, path)):
        if entry.is_directory:
            remove_tree(volume, entry.path)
        else:
            volume.delete(entry.path)
    # A bucket's directory may be gone with its last file.
    with suppress(NotFound):
        volume.remove_directory(path)


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
                if "Transfer-Encoding" in answer.headers:
                    # The body is written as it is to be sent.
                    pass
                elif "Content-Length" not in answer.headers:
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
