"""Every call of the client with every fault of a bad day: a seeded part of the whole matrix, which
`tests/external` runs.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest
import trustme
from tests.files.conftest import OPTIONS, ROOT, TOKEN
from tests.files.fault_cells import ROWS, Cell, Crew, Scene, all_cells, leftover_threads
from tests.files.fault_schedule import Schedule
from tests.files.fault_table import FAULTS, refused_port
from tests.files.faulty_wire import Answer, Deed, FaultyWire, Rule

from trainmount_files import InvalidRequest, Unavailable, VolumeError, list_directory
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.retry import RetryPolicy
from trainmount_files.server.embedded import LocalServer

SEED = 20261130

NUM_RANDOM = 10


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    before = set(threading.enumerate())
    open_before = num_descriptors()
    crew = Crew(tmp_path, 8)
    yield crew
    crew.close()
    assert leftover_threads(before) == []
    deadline = monotonic() + 5
    while num_descriptors() > open_before and monotonic() < deadline:
        sleep(0.01)
    assert num_descriptors() <= open_before


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def chosen() -> list[Cell]:
    """Each row and each fault at least once, and some more; the same ones each time."""
    chance = random.Random(SEED)
    cells = all_cells()
    chance.shuffle(cells)
    cells.sort(key=lambda cell: cell.fault.name == "huge")
    rows, faults, picked, rest = set(), set(), [], []
    for cell in cells:
        row, fault = (cell.row.name, cell.row.route), (cell.fault.name, cell.fault.error)
        is_new = row not in rows or fault not in faults
        rows.add(row)
        faults.add(fault)
        (picked if is_new else rest).append(cell)
    return picked + rest[:NUM_RANDOM]


def test_a_sample_of_calls_and_faults_never_gives_a_wrong_byte_and_the_right_error(
    crew: Crew,
) -> None:
    cells = chosen()
    assert {cell.row.name for cell in cells} == {row.name for row in ROWS}
    assert {cell.fault.name for cell in cells} == {fault.name for fault in FAULTS}
    assert crew.run(cells) == []


def test_clients_at_random_on_a_bad_wire_see_only_whole_versions(server: LocalServer) -> None:
    with FaultyWire(server.url, SEED) as wire:
        schedule = Schedule(wire, SEED)
        schedule.run(num_clients=4, num_steps=20, probability=0.02)
    assert schedule.problems == []
    assert schedule.num_reads > 15
    assert schedule.num_writes > 15
    wait_for_nothing_staged(server)


@pytest.mark.parametrize("kind", ["refused", "no name", "untrusted"])
def test_a_host_that_cannot_be_spoken_to_is_told_by_every_call(
    kind: str, tmp_path: Path, untrusted: str
) -> None:
    hosts = {
        "refused": f"http://127.0.0.1:{refused_port()}",
        "no name": "http://no-such-host.invalid",
        "untrusted": untrusted,
    }
    expected = InvalidRequest if kind == "untrusted" else Unavailable
    options = replace(OPTIONS, retry=RetryPolicy(deadline_seconds=0.1, first_delay_seconds=0.01))
    volume = FilesApiVolume(ROOT, Credentials(host=hosts[kind], token=TOKEN), options)
    local = tmp_path / "local"
    local.write_bytes(bytes(100_000))
    scene = Scene(volume, "dir/name", local, tmp_path)
    calls = {row.name: row.call for row in ROWS}
    if kind == "no name":
        # Some resolvers take their time to know nothing.
        calls = {name: calls[name] for name in ("stat", "read by signed URL", "upload")}
    for name, call in calls.items():
        with pytest.raises(VolumeError) as caught:
            call(scene)
        assert type(caught.value) is expected, name
        assert TOKEN not in str(caught.value)
        assert "dir/name" in str(caught.value)
    volume.close()


@pytest.fixture
def untrusted(tmp_path: Path) -> Iterator[str]:
    """A TLS server whose certificate nobody trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            with suppress(OSError):
                connection, _ = listener.accept()
                with suppress(OSError), connection, context.wrap_socket(connection, True):
                    pass

    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        done.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def listing_of(contents: list[dict[str, object]], token: str | None) -> Rule:
    document = json.dumps({"contents": contents, "next_page_token": token}).encode()
    answer = Answer(200, "OK").with_body(document).encode()
    return Rule(lambda _seen, _forward: Deed(answer), frozenset({"list_directory"}))


@pytest.fixture
def at_wire(server: LocalServer) -> Iterator[tuple[FaultyWire, FilesApiVolume]]:
    with FaultyWire(server.url) as wire:
        volume = FilesApiVolume(ROOT, Credentials(host=wire.url, token=TOKEN), OPTIONS)
        yield wire, volume
        volume.close()


def test_a_page_token_that_comes_again_ends_the_listing(
    at_wire: tuple[FaultyWire, FilesApiVolume],
) -> None:
    wire, volume = at_wire
    wire.set(listing_of([{"name": "a", "file_size": 1}], "again"))
    with pytest.raises(Unavailable, match="repeated a page token"):
        list(list_directory(volume, ""))
    assert wire.counts()["list_directory"] == 2


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/abs", "a\0b", None, 5, ["x"]])
def test_a_name_that_could_leave_the_directory_is_never_an_entry(
    at_wire: tuple[FaultyWire, FilesApiVolume], name: object
) -> None:
    wire, volume = at_wire
    wire.set(listing_of([{"name": name, "file_size": 1}, {"name": "good", "file_size": 2}], None))
    page = volume.list_page("dir")
    assert [entry.path for entry in page.entries] == ["dir/good"]


@pytest.mark.parametrize(
    "entry",
    [
        {"file_size": "12"},
        {"file_size": -1},
        {"file_size": 1.5},
        {"file_size": [1]},
        {"last_modified": "now"},
        {"last_modified": {"a": 1}},
        {"last_modified": 1e400},
    ],
)
def test_a_listing_with_a_size_or_a_time_that_is_no_number_is_refused(
    at_wire: tuple[FaultyWire, FilesApiVolume], entry: dict[str, object]
) -> None:
    wire, volume = at_wire
    wire.set(listing_of([{"name": "a", **entry}], None))
    with pytest.raises(Unavailable, match="no listing"):
        volume.list_page("dir")


def test_a_retry_after_is_waited_for_and_one_beyond_the_deadline_is_not(
    at_wire: tuple[FaultyWire, FilesApiVolume],
) -> None:
    wire, _ = at_wire
    options = replace(OPTIONS, retry=RetryPolicy(deadline_seconds=6))
    volume = FilesApiVolume(ROOT, Credentials(host=wire.url, token=TOKEN), options)
    volume.put("file", b"1")

    def refuse(value: str) -> Rule:
        answer = Answer(503).header("Retry-After", value).header("Content-Length", "0").encode()
        return Rule(lambda _seen, _forward: Deed(answer), frozenset({"head_file"}), count=1)

    wire.set(refuse("1"))
    assert volume.stat("file").size_bytes == 1
    first, second = [seen.at for seen in wire.seen]
    assert second - first >= 1
    wire.set(refuse("86400"))
    with pytest.raises(Unavailable, match="HTTP 503"):
        volume.stat("file")
    assert wire.counts() == {"head_file": 1}
    volume.close()


def wait_for_nothing_staged(server: LocalServer) -> None:
    deadline = monotonic() + 10
    while server.statistics()["staged_bytes"] and monotonic() < deadline:
        sleep(0.02)
    assert server.statistics()["staged_bytes"] == 0
