"""The server's own disk refuses: told at once as what it is, so that no client repeats it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmount_files.server.errors import ApiError
from trainmount_files.server.paths import parse_volume_path
from trainmount_files.server.staging import Staging
from trainmount_files.server.store import DirectoryStore

NOBODY = 65534


@contextlib.contextmanager
def as_somebody_else() -> Iterator[None]:
    """This thread's files are a stranger's; an ordinary user is one already by the modes."""
    libc = ctypes.CDLL(None)
    if os.geteuid() == 0:
        libc.setfsuid(NOBODY)
    try:
        yield
    finally:
        libc.setfsuid(os.geteuid())


def test_a_directory_that_the_server_may_not_write_is_permission_denied(tmp_path: Path) -> None:
    volume = tmp_path / "main" / "default" / "data"
    volume.mkdir(parents=True)
    store = DirectoryStore(tmp_path, Staging(tmp_path, fsync=False))
    tmp_path.chmod(0o755)
    volume.chmod(0o555)
    try:
        with as_somebody_else(), pytest.raises(ApiError) as refused:
            store.make_directory(parse_volume_path("/Volumes/main/default/data/runs"))
    finally:
        volume.chmod(0o755)
        store.close()
    assert (refused.value.status, refused.value.code) == (403, "PERMISSION_DENIED")
    assert "/Volumes/main/default/data/runs" in refused.value.message
