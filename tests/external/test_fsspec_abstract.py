"""fsspec's own suite for filesystems, over a volume of the Files API and over a directory."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

from trainmount_files.filesystem import VolumesFileSystem
from trainmount_files.server import LocalServer, ServerSettings

TOKEN = "dapi-0123456789abcdef"
ROOT = "/Volumes/main/default/data"


@pytest.fixture(scope="module")
def remote_fs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VolumesFileSystem]:
    """One server for all: each test has a directory of its own."""
    directory = tmp_path_factory.mktemp("served")
    (directory / "main" / "default" / "data").mkdir(parents=True)
    settings = ServerSettings(directory=directory, token=TOKEN, min_part_bytes=1, fsync=False)
    with LocalServer(settings) as server:
        yield VolumesFileSystem(host=server.url, token=TOKEN, skip_instance_cache=True)


class Fixtures(AbstractFixtures):
    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return posixpath.join

    @pytest.fixture
    def local_path(self, tmp_path: Path) -> str:
        (tmp_path / "local").mkdir()
        return str(tmp_path / "local")


class FilesApiFixtures(Fixtures):
    @pytest.fixture
    def fs(self, remote_fs: VolumesFileSystem) -> VolumesFileSystem:
        return remote_fs

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return f"{ROOT}/{tmp_path.name}"


class DirectoryFixtures(Fixtures):
    @pytest.fixture
    def fs(self, tmp_path: Path) -> VolumesFileSystem:
        (tmp_path / "plain").mkdir()
        return VolumesFileSystem(root=(tmp_path / "plain").as_uri(), skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self) -> str:
        return "/"


class TestFilesApiCopy(AbstractCopyTests, FilesApiFixtures): ...


class TestFilesApiGet(AbstractGetTests, FilesApiFixtures): ...


class TestFilesApiPut(AbstractPutTests, FilesApiFixtures): ...


class TestFilesApiOpen(AbstractOpenTests, FilesApiFixtures): ...


class TestFilesApiPipe(AbstractPipeTests, FilesApiFixtures): ...


class TestDirectoryCopy(AbstractCopyTests, DirectoryFixtures): ...


class TestDirectoryGet(AbstractGetTests, DirectoryFixtures): ...


class TestDirectoryPut(AbstractPutTests, DirectoryFixtures): ...


class TestDirectoryOpen(AbstractOpenTests, DirectoryFixtures): ...


class TestDirectoryPipe(AbstractPipeTests, DirectoryFixtures): ...
