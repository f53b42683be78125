"""A directory and the Files API behind one fixture, and a server whose faults are on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmount_files import Volume
from trainmount_files.directory import DirectoryVolume
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.options import FilesApiOptions
from trainmount_files.retry import RetryPolicy
from trainmount_files.sdk import Credentials
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
    retry=RetryPolicy(deadline_seconds=5, first_delay_seconds=0.01, max_delay_seconds=0.05),
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
