"""The whole matrix of calls and faults, and long runs of clients at random on a bad wire."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.files.conftest import TOKEN
from tests.files.fault_cells import ROWS, Crew, Row, all_cells, leftover_threads
from tests.files.fault_schedule import Schedule
from tests.files.faulty_wire import FaultyWire

from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.settings import ServerSettings


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    before = set(threading.enumerate())
    crew = Crew(tmp_path_factory.mktemp("crew"), 12)
    yield crew
    crew.close()
    assert leftover_threads(before) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} at {row.route}")
def test_no_fault_of_a_request_gives_a_wrong_byte_or_another_error(crew: Crew, row: Row) -> None:
    assert crew.run([cell for cell in all_cells() if cell.row is row]) == []


@pytest.mark.parametrize(("seed", "probability"), [(1, 0.01), (2, 0.02), (3, 0.04), (4, 0.08)])
def test_clients_at_random_see_only_whole_versions_for_long(
    tmp_path: Path, seed: int, probability: float
) -> None:
    (tmp_path / "main" / "default" / "data").mkdir(parents=True)
    settings = ServerSettings(directory=tmp_path, token=TOKEN, min_part_bytes=1, fsync=False)
    with LocalServer(settings) as server, FaultyWire(server.url, seed) as wire:
        schedule = Schedule(wire, seed)
        schedule.run(num_clients=6, num_steps=60, probability=probability)
    assert schedule.problems == []
    assert schedule.num_reads > 60
