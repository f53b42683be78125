"""Saves that fail, or whose process is killed, at each write of the storage layer: the checkpoint
before loads, or the new one, and never something of both. With EVERY_POINT in the environment, at
every single one; a minute longer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from tests.runtime import saving_deaths
from tests.runtime.small_volume import VOLUME, Served, serving
from torch.distributed.checkpoint.api import CheckpointException

from trainmount.checkpoint import volume_store
from trainmount.data import UCVolumeWriter
from trainmount_files.server.faults import Fault

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PROGRAM = Path(saving_deaths.__file__)
ROOT = PROGRAM.parent.parent.parent


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


def points(path: str, *host: str) -> dict[str, list[dict[str, Any]]]:
    """What a save came to, for each of its writes at which it ended in each way."""
    output = subprocess.run(
        [sys.executable, str(PROGRAM), path, *host],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    found: dict[str, list[dict[str, Any]]] = json.loads(output)
    assert list(found) == list(saving_deaths.WAYS)
    for each in found.values():
        assert each.pop()["ended"] == "over"
    return found


def check(found: list[dict[str, Any]], endings: set[str]) -> None:
    """Each save left one of the two whole: the new one if it succeeded, else the old one unless
    the commit was reached.
    """
    assert {point["ended"] for point in found} <= endings
    old = [point["found"] == [point["before"]] for point in found]
    new = [point["found"] == [point["before"] + 0.5] for point in found]
    assert [one or other for one, other in zip(old, new, strict=True)] == [True] * len(found)
    last_old = max(number for number, is_old in enumerate(old) if is_old)
    for number, (point, is_new) in enumerate(zip(found, new, strict=True)):
        if point["ended"] == "saved":
            assert is_new
        else:
            assert is_new == (number > last_old)


def test_a_save_into_a_directory_that_ends_at_any_write_leaves_one_whole_checkpoint(
    tmp_path: Path,
) -> None:
    found = points(str(tmp_path / "saved"))
    assert len(found["kill before"]) > 25
    # What comes after the commit is only the removal of the old one.
    assert [point["found"] == [point["before"]] for point in found["kill before"][:20]] == [
        True
    ] * 20
    check(found["kill before"], {"killed"})
    check(found["fail before"], {"failed", "saved"})
    check(found["fail after"], {"failed", "saved"})


def test_a_save_into_a_volume_that_ends_at_any_request_leaves_one_whole_checkpoint(
    served: Served,
) -> None:
    found = points(f"{VOLUME}/killed", served.server.url)
    assert len(found["kill before"]) > 12
    check(found["kill before"], {"killed"})
    check(found["fail before"], {"failed", "saved"})
    check(found["fail after"], {"failed", "saved"})


# At the server


FAULTS: dict[str, dict[str, Any]] = {
    "refused": {"status": 403},
    "down": {"status": 503, "count": 40},
    "lost": {"lose_reply": True, "count": 1},
    "lost thrice": {"lose_reply": True, "count": 3},
}

ROUTES = [
    "put_file",
    "initiate_upload",
    "create_upload_part_urls",
    "presigned_put",
    "complete_upload",
    "delete_file",
    "remove_directory",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_the_server_does_to_a_request_a_save_is_whole_or_absent(
    fault: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_store, "open_volume", served.open)
    path = f"{VOLUME}/{fault.replace(' ', '-')}"
    saving_deaths.save(path, 0.0)
    before = 0.0
    for number, route in enumerate(ROUTES, start=1):
        # Not the first of each kind, so that something is stored already.
        skip = int(route in {"put_file", "create_upload_part_urls", "presigned_put"})
        served.server.inject(Fault(route=route, skip=skip, **FAULTS[fault]))
        possible = [[before], [float(number)]]
        try:
            saving_deaths.save(path, number)
        except CheckpointException:
            assert fault != "lost"
        else:
            possible = [[float(number)]]
        served.server.inject()
        found = saving_deaths.load(path)
        assert found in possible
        before = found[0]


def test_a_flipped_byte_in_any_file_is_refused_and_the_file_is_named(tmp_path: Path) -> None:
    writer = UCVolumeWriter(tmp_path, thread_count=2)
    dcp.save(saving_deaths.state(1.0), storage_writer=writer)
    files = sorted((tmp_path / writer.generation).iterdir())
    assert [file.name for file in files] == [
        "commit.json",
        "metadata",
        "r00000-000.bin",
        "r00000-001.bin",
    ]
    for file in files:
        whole = file.read_bytes()
        for at in (0, len(whole) // 3, len(whole) - 1):
            damaged = bytearray(whole)
            damaged[at] ^= 1
            file.write_bytes(damaged)
            with pytest.raises(CheckpointException) as failure:
                saving_deaths.load(str(tmp_path), generation=writer.generation)
            assert str(file) in str(failure.value)
        file.write_bytes(whole)
    assert saving_deaths.load(str(tmp_path)) == [1.0]
