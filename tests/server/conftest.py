"""A server over a fresh directory, the unmodified Databricks SDK against it, and plain HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from databricks.sdk import WorkspaceClient
from databricks.sdk.core import Config

from trainmount_files.server import LocalServer, ServerSettings

TOKEN = "dapi-token-of-the-tests"
ROOT = "/Volumes/main/default/data"


def sdk_client(url: str, token: str = TOKEN) -> WorkspaceClient:
    config = Config(host=url, token=token, retry_timeout_seconds=10)
    # Small enough that megabytes are enough to see several parts.
    config.files_ext_multipart_upload_min_stream_size = 6 << 20
    config.files_ext_multipart_upload_part_size_options = [5 << 20]
    config.files_ext_multipart_upload_default_part_size = 5 << 20
    config.files_ext_parallel_download_min_file_size = 1 << 20
    config.files_ext_parallel_download_default_part_size = 1 << 20
    return WorkspaceClient(config=config)


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """The directory that is served."""
    directory = tmp_path / "served"
    directory.mkdir()
    return directory


@pytest.fixture
def server(served: Path) -> Iterator[LocalServer]:
    settings = ServerSettings(
        directory=served, token=TOKEN, volumes=("main.default.data",), admin=True, fsync=False
    )
    with LocalServer(settings) as running:
        yield running


@pytest.fixture
def client(server: LocalServer) -> WorkspaceClient:
    return sdk_client(server.url)


@pytest.fixture
def http(server: LocalServer) -> Iterator[Callable[..., urllib3.BaseHTTPResponse]]:
    """`http(method, target, …)` with the token; `target` is below the server's URL or a whole
    URL.
    """
    with urllib3.PoolManager(retries=False) as pool:

        def call(method: str, target: str, **options: Any) -> urllib3.BaseHTTPResponse:
            is_url = target.startswith("http")
            headers = {} if is_url else {"Authorization": f"Bearer {TOKEN}"}
            headers |= options.pop("headers", {})
            url = target if is_url else server.url + target
            return pool.request(method, url, headers=headers, **options)

        yield call


@pytest.fixture
def start_process(served: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """`start_process(*options)` starts a server of its own process; returns its pid and URL."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> tuple[int, str]:
        ready = tmp_path / f"ready-{len(processes)}"
        command = [sys.executable, "-m", "trainmount_files.server", str(served), "--no-fsync"]
        command += ["--volume", "main.default.data", "--ready-file", str(ready), *options]
        environment = {**os.environ, "TRAINMOUNT_SERVE_TOKEN": TOKEN}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert processes[-1].poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return processes[-1].pid, ready.read_text()

    yield start
    for process in processes:
        process.kill()
        process.wait()
