"""Large files on a real Files API that refuses them, seen by two mounts."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN
from tests.fuse.conftest import Node

from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.server.settings import ServerSettings
from trainmount_fuse.settings import MountSettings

MIB = 1 << 20
OLD = os.urandom(10 * MIB)


@pytest.fixture
def served(tmp_path: Path) -> Path:
    directory = tmp_path / "served" / "main" / "default" / "data"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def server(tmp_path: Path, served: Path) -> Iterator[LocalServer]:
    settings = ServerSettings(
        directory=tmp_path / "served", token=TOKEN, min_part_bytes=1, fsync=False
    )
    with LocalServer(settings) as running:
        yield running


async def _node(server: LocalServer, folder: Path) -> Any:
    settings = MountSettings(
        source=ROOT,
        cache_dir=folder / "cache",
        state_dir=folder / "state",
        mount_id="mount-0",
        free_disk_floor_bytes=0,
        stream_from_bytes=MIB,
    )
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), OPTIONS)
    node = Node(volume, settings)  # type: ignore[arg-type]
    await node.fs.start()
    return node


@pytest.mark.parametrize(
    ("faults", "number"),
    [
        # Whole files, too: what is refused in parts is tried in one piece.
        ((Fault(route="presigned_put", status=403), Fault(route="put_file", status=403)), "EACCES"),
        ((Fault(route="complete_upload", status=500),), "EIO"),
    ],
)
async def test_an_overwrite_that_is_refused_is_an_error_at_close_and_leaves_the_old_file(
    server: LocalServer,
    served: Path,
    tmp_path: Path,
    world: Any,
    faults: tuple[Fault, ...],
    number: str,
) -> None:
    (served / "f").write_bytes(OLD)
    a, b = await _node(server, tmp_path / "a"), await _node(server, tmp_path / "b")
    fh = await a.open("f", os.O_WRONLY | os.O_TRUNC)
    server.inject(*faults)
    for offset in range(0, 4 * MIB, MIB // 4):
        await a.fs.write(fh, offset, os.urandom(MIB // 4))
    refused = await world.errno_from(a.close(fh), transfer=True)
    server.inject()
    assert errno.errorcode[refused] == number
    assert (served / "f").read_bytes() == OLD
    assert (await a.read("f") == OLD, await b.read("f") == OLD) == (True, True)
    assert [one.size_bytes for one in a.fs.failed_files()] == [4 * MIB]
    await a.settled(lambda: server.statistics()["open_uploads"] == 0, "no upload is left")
    assert server.statistics()["staged_bytes"] == 0
    for node in (a, b):
        node.volume.close()
