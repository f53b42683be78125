"""Giving up: whoever cancels, closes or interrupts gets out at once, though the store is silent."""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN

from trainmount_files import ByteRange, Cancelled, FileStat, VolumeError
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.transfer import (
    download_file,
    iterate,
    open_reader,
    open_writer,
    upload_file,
    upload_stream,
)
from trainmount_files.transfer.workers import Workers

DATA = bytes(range(256)) * 1200
KNOWN = FileStat("file", is_directory=False, size_bytes=len(DATA), mtime_ns=0, version="307200-0")
PATIENCE_SECONDS = 40.0
"""Far below the minute of silence that ends a request by itself."""


class Silent:
    """Listens, takes whatever is sent, and never says a word."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def has_a_caller(self) -> bool:
        return bool(self._connections)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._connections.append(self._listener.accept()[0])

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    yield server
    server.close()


@pytest.fixture
def mute(silent: Silent) -> Iterator[FilesApiVolume]:
    """A volume whose store is silent; every patience of ours is a minute or more."""
    options = replace(OPTIONS, retry=replace(OPTIONS.retry, deadline_seconds=300))
    volume = FilesApiVolume(ROOT, Credentials(host=silent.url, token=TOKEN), options)
    yield volume
    volume.close()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    (tmp_path / "local").write_bytes(DATA)
    return tmp_path / "local"


def read(volume: FilesApiVolume, cancel: threading.Event, local: Path) -> object:
    buffer = bytearray(100)
    return volume.read_into("file", ByteRange(0, 100), buffer, version=None, cancel=cancel)


def upload(volume: FilesApiVolume, cancel: threading.Event, local: Path) -> object:
    with local.open("rb") as source:
        return volume.upload("file", source, len(DATA), cancel=cancel)


def upload_small(volume: FilesApiVolume, cancel: threading.Event, local: Path) -> object:
    with local.open("rb") as source:
        return volume.upload("file", source, 1000, cancel=cancel)


def begin(volume: FilesApiVolume, cancel: threading.Event, local: Path) -> object:
    return volume.start_upload("file", cancel=cancel)


def download(volume: FilesApiVolume, cancel: threading.Event, local: Path) -> object:
    target = local.with_name("copy")
    return download_file(volume, "file", target, known=KNOWN, range_bytes=50_000, cancel=cancel)


def upload_whole(volume: FilesApiVolume, cancel: threading.Event, local: Path) -> object:
    return upload_file(volume, local, "file", cancel=cancel)


def stream(volume: FilesApiVolume, cancel: threading.Event, local: Path) -> object:
    return upload_stream(volume, "file", io.BytesIO(DATA * 100), cancel=cancel)


def iterate_over(volume: FilesApiVolume, cancel: threading.Event, local: Path) -> object:
    return list(iterate(volume, "file", known=KNOWN, block_bytes=10_000, cancel=cancel))


def read_on(volume: FilesApiVolume, cancel: threading.Event, local: Path) -> object:
    with open_reader(volume, "file", known=KNOWN, cancel=cancel) as reader:
        return reader.read(1000)


Call = Callable[[FilesApiVolume, threading.Event, Path], object]
CALLS: list[Call] = [
    read,
    upload,
    upload_small,
    begin,
    download,
    upload_whole,
    stream,
    iterate_over,
    read_on,
]


class Caller:
    """Runs a call in a thread and keeps how it ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(call,))
        self.thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive(), "the call hangs"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + PATIENCE_SECONDS
    while not condition():
        assert monotonic() < deadline
        sleep(0.01)


EARLIER: set[threading.Thread] = set()
"""Threads of other tests: a bucket's lives as long as the process."""


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    EARLIER.clear()
    EARLIER.update(threading.enumerate())


def threads_of_ours() -> list[str]:
    new = set(threading.enumerate()) - EARLIER
    return [one.name for one in new if one.name.startswith("trainmount-")]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_waits_for_a_silent_store_ends_when_it_is_cancelled(
    silent: Silent, mute: FilesApiVolume, local: Path, call: Call
) -> None:
    cancel = threading.Event()
    caller = Caller(lambda: call(mute, cancel, local))
    wait_until(lambda: silent.has_a_caller)
    began = monotonic()
    cancel.set()
    caller.join()
    assert monotonic() - began < PATIENCE_SECONDS
    assert isinstance(caller.error, Cancelled)
    assert [one.name for one in local.parent.iterdir()] == ["local"]
    # The thread that watches goes by itself.
    wait_until(lambda: threads_of_ours() == [])


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_waits_for_a_silent_store_ends_when_the_volume_is_closed(
    silent: Silent, mute: FilesApiVolume, local: Path, call: Call
) -> None:
    caller = Caller(lambda: call(mute, threading.Event(), local))
    wait_until(lambda: silent.has_a_caller)
    mute.close()
    caller.join()
    assert isinstance(caller.error, VolumeError | ValueError)
    assert [one.name for one in local.parent.iterdir()] == ["local"]
    wait_until(lambda: threads_of_ours() == [])


def test_calls_without_a_way_to_cancel_end_when_the_volume_is_closed(
    silent: Silent, mute: FilesApiVolume
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: mute.stat("file"),
        lambda: mute.list_page(""),
        lambda: mute.put("file", DATA),
        lambda: mute.delete("file"),
        lambda: mute.make_directory("dir"),
    ]
    callers = [Caller(call) for call in calls]
    wait_until(lambda: len(silent._connections) == len(calls))
    mute.close()
    for caller in callers:
        caller.join()
        assert isinstance(caller.error, Cancelled | ValueError)


def test_a_connection_that_nobody_answers_is_given_up_when_it_is_cancelled() -> None:
    # A full backlog: the handshake of the next connection is never finished.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    address = listener.getsockname()
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(address)
        fillers.append(filler)
    url = f"http://127.0.0.1:{address[1]}"
    transport = replace(OPTIONS.transport, connect_timeout_seconds=300)
    volume = FilesApiVolume(
        ROOT, Credentials(host=url, token=TOKEN), replace(OPTIONS, transport=transport)
    )
    cancel = threading.Event()
    caller = Caller(lambda: read(volume, cancel, Path()))
    sleep(0.2)
    cancel.set()
    caller.join()
    assert isinstance(caller.error, Cancelled)
    volume.close()
    for sock in (*fillers, listener):
        sock.close()


def test_a_connection_that_was_cut_off_serves_nobody_else(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    remote.put("file", DATA)
    server.inject(Fault(route="presigned_get", latency_ms=60_000, count=3))
    for _ in range(3):
        cancel = threading.Event()
        caller = Caller(lambda: read(remote, cancel, Path()))  # noqa: B023 - joined below
        sleep(0.1)
        cancel.set()
        caller.join()
        assert isinstance(caller.error, Cancelled)
    buffer = bytearray(len(DATA))
    remote.read_into("file", ByteRange(0, len(DATA)), buffer, cancel=threading.Event())
    assert buffer == DATA


@pytest.mark.parametrize("route", ["presigned_put", "complete_upload"])
def test_an_upload_that_is_cancelled_in_its_midst_is_aborted(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path, route: str
) -> None:
    server.inject(Fault(route=route, latency_ms=60_000, skip=2 if route == "presigned_put" else 0))
    cancel = threading.Event()
    caller = Caller(lambda: upload(remote, cancel, local))
    wait_until(lambda: server.statistics()["requests"].get(route, 0) > 0)
    sleep(0.1)
    cancel.set()
    caller.join()
    assert isinstance(caller.error, Cancelled)
    assert not (served / "file").exists()
    assert server.statistics()["open_uploads"] == 0


@pytest.mark.parametrize("route", ["presigned_put", "complete_upload"])
def test_a_volume_that_is_closed_aborts_the_uploads_under_way(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path, route: str
) -> None:
    server.inject(Fault(route=route, latency_ms=60_000, skip=2 if route == "presigned_put" else 0))
    caller = Caller(lambda: upload(remote, threading.Event(), local))
    wait_until(lambda: server.statistics()["requests"].get(route, 0) > 0)
    remote.close()
    # Before `close` returns: whoever closes a volume may end the process next.
    assert server.statistics()["open_uploads"] == 0
    caller.join()
    assert isinstance(caller.error, Cancelled)
    assert not (served / "file").exists()
    assert server.statistics()["requests"]["abort_upload"] == 1
    wait_until(lambda: threads_of_ours() == [])


def test_a_volume_that_is_closed_aborts_what_is_only_begun(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    begun = remote.start_upload("begun")
    begun.put_part(1, DATA)
    writer = open_writer(remote, "written", part_bytes=1000)
    writer.write(bytes(2500))
    done = remote.start_upload("done")
    done.put_part(1, b"content")
    done.complete()
    assert server.statistics()["open_uploads"] == 2
    remote.close()
    assert server.statistics()["open_uploads"] == 0
    assert server.statistics()["requests"]["abort_upload"] == 2
    with pytest.raises(VolumeError):
        begun.put_part(2, DATA)
    with pytest.raises(VolumeError):
        writer.close()
    begun.abort()
    assert server.statistics()["requests"]["abort_upload"] == 2


def test_a_volume_that_is_closed_waits_for_an_abort_that_is_on_its_way(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    server.inject(Fault(route="abort_upload", latency_ms=500))
    begun = remote.start_upload("file")
    caller = Caller(begun.abort)
    wait_until(lambda: server.statistics()["requests"].get("abort_upload", 0) == 1)
    remote.close()
    assert server.statistics()["open_uploads"] == 0
    caller.join()
    assert caller.error is None
    assert server.statistics()["requests"]["abort_upload"] == 1


def test_a_volume_whose_store_is_silent_is_closed_within_the_time_a_person_waits(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    server.inject(Fault(route="abort_upload", latency_ms=60_000))
    begun = [remote.start_upload(f"file-{number}") for number in range(8)]
    caller = Caller(remote.close)
    caller.join()
    assert caller.error is None
    assert len(begun) == 8
    # The time is for all of them together; who would come after it is not waited for.
    assert server.statistics()["requests"]["abort_upload"] == 1


PROGRAM = """
import os, sys
from dataclasses import replace
from pathlib import Path
from tests.files.conftest import OPTIONS, ROOT, TOKEN
from trainmount_files.files_api import Credentials, FilesApiVolume
from trainmount_files.transfer import download_file, upload_file
volume = FilesApiVolume(ROOT, Credentials(host=sys.argv[1], token=TOKEN), OPTIONS)
# Not print: several threads say it at once, and an interrupt may come in the midst of it.
say = lambda _: os.write(1, b"going\\n")
if sys.argv[2] == "down":
    download_file(volume, "file", Path(sys.argv[3]), range_bytes=20_000, progress=say)
else:
    upload_file(volume, Path(sys.argv[3]), "new", progress=say)
"""


@pytest.mark.parametrize("direction", ["down", "up"])
def test_an_interrupt_in_the_midst_of_eight_threads_ends_the_program_and_leaves_nothing(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path, direction: str
) -> None:
    remote.put("file", DATA)
    route = "presigned_get" if direction == "down" else "presigned_put"
    server.inject(Fault(route=route, latency_ms=60_000, skip=3))
    target = local if direction == "up" else local.with_name("copy")
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, server.url, direction, str(target)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "going\n"
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=PATIENCE_SECONDS)
    assert program.returncode == -signal.SIGINT, said
    assert "KeyboardInterrupt" in said
    assert sorted(one.name for one in local.parent.iterdir()) == ["local", "served"]
    assert not (served / "new").exists()
    assert server.statistics()["open_uploads"] == 0


def test_a_writer_waits_for_a_slow_store_and_stops_waiting_when_it_is_cancelled(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    server.inject(Fault(route="presigned_put", latency_ms=60_000, skip=1))
    cancel = threading.Event()
    writer = open_writer(remote, "file", part_bytes=1000, parallelism=2, cancel=cancel)
    caller = Caller(lambda: [writer.write(bytes(1000)) for _ in range(100)])
    wait_until(lambda: server.statistics()["requests"].get("presigned_put", 0) == 3)
    assert writer.tell() <= 4000
    cancel.set()
    caller.join()
    assert isinstance(caller.error, Cancelled)
    assert server.statistics()["open_uploads"] == 0


def test_a_store_that_falls_silent_holds_a_cancelled_upload_no_longer_than_a_person_waits(
    remote: FilesApiVolume, server: LocalServer, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where nobody waits it may take its time.
    monkeypatch.setattr("trainmount_files.files_api.multipart.ABORT_SECONDS", 300.0)
    server.inject(
        Fault(route="presigned_put", latency_ms=60_000, skip=2),
        Fault(route="abort_upload", latency_ms=60_000),
    )
    cancel = threading.Event()
    caller = Caller(lambda: upload(remote, cancel, local))
    wait_until(lambda: server.statistics()["requests"].get("presigned_put", 0) > 2)
    cancel.set()
    caller.join()
    assert isinstance(caller.error, Cancelled)
    assert server.statistics()["requests"]["abort_upload"] == 1


def test_threads_that_an_interrupt_kept_from_starting_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(1, "interrupted")

    def interrupted(_thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workers.submit(int)
    assert workers.close(wait_seconds=1)
