"""Signed URLs that live for a second and a token that ends, under programs that read and write."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
STREAM_MIB = int(os.environ.get("TRAINMOUNT_TEST_STREAM_MIB", "8"))
"""In CI a share; a long run has streams of 64."""

URL_SECONDS = 1
NUM_STREAMS = 8
NUM_FILES = 2
TOKENS = ("token-of-the-first-hour", "token-of-the-second-hour")


class TokenService:
    """Gives the token that is good now, for half a minute, as a workspace's metadata service."""

    def __init__(self) -> None:
        self.token = TOKENS[0]
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = {"access_token": service.token, "token_type": "Bearer"}
                body = json.dumps(answer | {"expires_on": time.time() + 30}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/token"


@pytest.fixture
def token_service() -> Iterator[TokenService]:
    service = TokenService()
    thread = threading.Thread(target=service.server.serve_forever)
    thread.start()
    yield service
    service.server.shutdown()
    thread.join()
    service.server.server_close()


def _asked(files_server: Any, token: str) -> Counter[str]:
    request = urllib.request.Request(
        f"{files_server.url}/admin/statistics", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request) as answer:
        return Counter(json.load(answer)["requests"])


def _stream(path: Path, offset: int, content: bytes) -> bool:
    """Read on from there to the end, then the rest, in small pieces; whether it is right."""
    found = memoryview(bytearray(len(content)))
    with path.open("rb", buffering=0) as file:
        for start, end in ((offset, len(content)), (0, offset)):
            file.seek(start)
            while start < end:
                start += file.readinto(found[start : min(start + MIB // 4, end)])
    return bytes(found) == content


@pytest.mark.timeout(300 + 4 * STREAM_MIB)
def test_streams_outlive_signed_urls_and_tokens_and_one_renewal_serves_all(
    start_mount: Any, files_server: Any, token_service: TokenService, tmp_path: Path
) -> None:
    contents = [os.urandom(STREAM_MIB * MIB) for _ in range(NUM_FILES)]
    for number, content in enumerate(contents):
        (files_server.volume / f"f{number}").write_bytes(content)
    faults = tmp_path / "faults.json"
    slow = [
        {"route": "presigned_get", "bandwidth_bytes_per_second": MIB},
        {"route": "presigned_put", "bandwidth_bytes_per_second": 8 * MIB},
    ]
    faults.write_text(json.dumps(slow))
    options = ("--faults", str(faults), "--admin", "--max-url-lifetime-seconds", str(URL_SECONDS))
    files_server.stop()
    files_server.start(*options, token=TOKENS[0])
    mount = start_mount(
        files_server.source,
        "--verbose",
        environment={
            "DATABRICKS_HOST": files_server.url,
            "DATABRICKS_AUTH_TYPE": "metadata-service",
            "DATABRICKS_METADATA_SERVICE_URL": token_service.url,
        },
    )
    # Above the size from which parts go while the file is written.
    written = os.urandom(max(STREAM_MIB, 56) * MIB)

    def write() -> bool:
        with (mount.mountpoint / "written").open("wb", buffering=0) as file:
            for start in range(0, len(written), MIB):
                file.write(written[start : start + MIB])
        return True

    began = time.monotonic()
    with ThreadPoolExecutor(NUM_STREAMS + 1) as threads:
        going = [
            threads.submit(
                _stream,
                mount.mountpoint / f"f{number % NUM_FILES}",
                number // NUM_FILES * len(contents[0]) // 4,
                contents[number % NUM_FILES],
            )
            for number in range(NUM_STREAMS)
        ]
        going.append(threads.submit(write))
        time.sleep(2 * URL_SECONDS)
        asked = _asked(files_server, TOKENS[0])
        # The first token ends here: a server that knows it no more.
        files_server.stop()
        token_service.token = TOKENS[1]
        files_server.start(*options, token=TOKENS[1])
        assert [one.result() for one in going] == [True] * (NUM_STREAMS + 1)
    seconds = time.monotonic() - began
    asked += _asked(files_server, TOKENS[1])
    print(f"{seconds:.1f} s, {asked['create_download_url']} URLs", dict(asked))
    # Each end of a URL costs one, whoever reads; the server's end is one more.
    assert asked["create_download_url"] <= NUM_FILES * (2 + seconds / URL_SECONDS)
    stored = hashlib.sha256((files_server.volume / "written").read_bytes()).hexdigest()
    assert stored == hashlib.sha256(written).hexdigest()
    assert mount.stop() == 0
    log = mount.log
    for secret in (*TOKENS, "Bearer", "/presigned", token_service.url):
        assert secret not in log
