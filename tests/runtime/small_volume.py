"""A local Files API server, and volumes of it with parts so small that little data has many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainmount.checkpoint.layout import BLOCK_BYTES
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.options import FilesApiOptions
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.retry import RetryPolicy
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.settings import ServerSettings

VOLUME = "/Volumes/main/default/saved"
TOKEN = "dapi-0123456789abcdef"

OPTIONS = FilesApiOptions(
    part_size_bytes=BLOCK_BYTES,
    min_part_bytes=1,
    retry=RetryPolicy(deadline_seconds=2, first_delay_seconds=0.01, max_delay_seconds=0.02),
)


@dataclass(frozen=True)
class Served:
    server: LocalServer

    directory: Path
    """What the server has of `VOLUME`."""

    def open(self, url: str, **options: object) -> FilesApiVolume:
        return FilesApiVolume(url, Credentials(host=self.server.url, token=TOKEN), OPTIONS)


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    directory = folder / VOLUME.removeprefix("/Volumes/")
    directory.mkdir(parents=True)
    settings = ServerSettings(directory=folder, token=TOKEN, min_part_bytes=1, fsync=False)
    with LocalServer(settings) as server:
        yield Served(server, directory)
