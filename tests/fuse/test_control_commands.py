"""Commands on a mount, from the call to the daemon's parts and back; no kernel takes part."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from trainmount_files.errors import PermissionDenied, Unavailable
from trainmount_fuse.control import actions, client, commands
from trainmount_fuse.control.commands import Commands
from trainmount_fuse.control.protocol import ControlError, control_address
from trainmount_fuse.control.refreshing import StaleNames
from trainmount_fuse.control.server import serve_control
from trainmount_fuse.control.warming import Warming
from trainmount_fuse.request_counts import RequestCounter
from trainmount_fuse.session.registry import MountRecord
from trainmount_fuse.session.wire import connect, listen, receive, send


class Kernel:
    """Notes what it was told to forget."""

    def __init__(self) -> None:
        self.stale: list[StaleNames] = []

    async def forget(self, stale: StaleNames) -> None:
        self.stale.append(stale)


class Served:
    """A node whose commands are answered."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.kernel = Kernel()
        self.holder = listen(node.settings.state_dir / "holder.sock")
        self.requests = RequestCounter()
        settings = node.settings
        record = MountRecord(
            mountpoint=Path("/mnt/somewhere"),
            source=settings.source,
            holder_pid=os.getpid(),
            device_minor=0,
            holder_socket=settings.state_dir / "holder.sock",
            cache_dir=settings.cache_dir,
            state_dir=settings.state_dir,
        )
        address = control_address(settings.state_dir)
        self.mount = client.Mount(record.mountpoint, record.source, address, record)

    async def ask(self, request: str, *patterns: str, **details: Any) -> client.Answer:
        call = partial(client.ask, self.mount, request, patterns, **details)
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)

    async def wait_listening(self) -> None:
        address = self.mount.address
        await self.node.settled(address.exists, "the daemon listens")

    @property
    def num_fetched(self) -> int:
        return sum(len(one) for one in self.node.volume.fetched_ranges)


@asynccontextmanager
async def serving(node: Any) -> AsyncIterator[Served]:
    served = Served(node)
    answers = Commands(node.fs, served.requests, served.kernel)
    with served.holder:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_control, answers, node.settings)
            await served.wait_listening()
            yield served
            nursery.cancel_scope.cancel()


def _fill(world: Any, **sizes: int) -> None:
    for name, size in sizes.items():
        path = world.remote / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))


async def test_what_is_warm_is_read_without_the_store(world):
    _fill(world, d__a=100_000, d__e__b=5_000, d__empty=0, other=9_000)
    node = await world.node()
    async with serving(node) as served:
        seen: list[Mapping[str, Any]] = []
        answer = await served.ask("warm", "d", note=seen.append)
        assert answer.result["num_done"] == 3
        assert answer.result["num_bytes"] == answer.result["num_bytes_found"] == 105_000
        assert (answer.result["num_unfit"], answer.failed) == (0, [])
        fetched = served.num_fetched
        assert fetched == 105_000
        assert await node.read("d/a") == (world.remote / "d/a").read_bytes()
        assert await node.read("d/e/b") == (world.remote / "d/e/b").read_bytes()
        assert served.num_fetched == fetched
        again = await served.ask("warm", "d", "d/a", "d/**")
        assert again.result["num_done"] == 3
        assert served.num_fetched == fetched


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.tar", {"a.tar", "b.tar"}),
        ("[ab].t?r", {"a.tar", "b.tar"}),
        ("d/*", {"d/c.tar", "d/e/x.tar", "d/e/f/y.tar"}),
        ("**/*.tar", {"a.tar", "b.tar", "d/c.tar", "d/e/x.tar", "d/e/f/y.tar"}),
        ("d/**", {"d/c.tar", "d/e/x.tar", "d/e/f/y.tar"}),
        ("*/e/*.tar", {"d/e/x.tar"}),
        ("/d/./e//f/", {"d/e/f/y.tar"}),
        ("odd[1]", {"odd[1]"}),
        (".hidden*", {".hidden"}),
    ],
)
async def test_a_pattern_means_what_it_means_to_a_shell(world, pattern, found):
    names = ("a.tar", "b.tar", "d/c.tar", "d/e/x.tar", "d/e/f/y.tar", "odd[1]", ".hidden")
    for name in names:
        (world.remote / name).parent.mkdir(parents=True, exist_ok=True)
        (world.remote / name).write_bytes(b"x")
    node = await world.node()
    async with serving(node) as served:
        answer = await served.ask("warm", pattern)
        assert (answer.result["num_done"], answer.failed) == (len(found), [])
        before = served.num_fetched
        for name in found:
            await node.read(name)
        assert served.num_fetched == before == len(found)


async def test_what_is_not_there_is_named_and_the_rest_is_done(world):
    _fill(world, a=10)
    node = await world.node()
    async with serving(node) as served:
        answer = await served.ask("warm", "a", "missing", "no/*.such", "../up")
        assert answer.result["num_done"] == 1
        assert {one["path"]: one["reason"] for one in answer.failed} == {
            "missing": "no such file or directory",
            "no/*.such": "nothing matches it",
            "../up": "must not contain '..'",
        }


async def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_done(world):
    _fill(world, a=10, b=20, c=30)
    node = await world.node()

    def refuse(operation: str, path: str) -> None:
        if operation == "read" and path == "b":
            raise PermissionDenied("read", path, "not yours")

    node.volume.fault = refuse
    async with serving(node) as served:
        answer = await served.ask("warm", "*")
        assert answer.result["num_done"] == 2
        assert answer.failed == [{"path": "b", "reason": "not yours"}]


async def test_a_store_that_is_down_ends_it_with_one_line(world):
    _fill(world, **{f"f{number}": 10 for number in range(40)})
    node = await world.node()

    def refuse(operation: str, path: str) -> None:
        if operation == "read":
            raise Unavailable("read", path, "no answer")

    node.volume.fault = refuse
    async with serving(node) as served:
        with pytest.raises(ControlError, match=r"^/mnt/somewhere: read f\d+: no answer$"):
            await served.ask("warm", "*")


async def test_what_does_not_fit_is_left_out_and_nothing_warm_is_thrown_out(world):
    _fill(world, **{f"f{number}": 100_000 for number in range(10)})
    node = await world.node(cache_size_bytes=409_600, prefetch_fetch_bytes=32_768)
    async with serving(node) as served:
        answer = await served.ask("warm", "*")
        assert (answer.result["num_done"], answer.result["num_unfit"]) == (4, 6)
        assert answer.result["unfit_bytes"] == 600_000
        assert answer.result["full_reason"].startswith("the cache is too small for all")
        assert len(answer.failed) == 6
        assert served.num_fetched == 400_000
        assert node.fs.cache_statistics().evicted_bytes == 0


async def test_at_the_reserve_of_the_disk_nothing_is_fetched_and_local_bytes_stay(
    world, monkeypatch
):
    _fill(world, **{f"f{number}": 100_000 for number in range(3)})
    node = await world.node(free_disk_floor_bytes=0)

    def refuse(operation: str, path: str) -> None:
        if operation == "upload":
            raise Unavailable("upload", path, "the store is down")

    node.volume.fault = refuse
    with pytest.raises(Unavailable):
        await node.write("local", b"x" * 50_000)
    await node.crash()
    await node.settled(lambda: len(node.fs.failed_files()) == 1, "the upload failed again")
    # The disk is full to the reserve.
    object.__setattr__(node.fs.core.settings, "free_disk_floor_bytes", 1 << 60)
    async with serving(node) as served:
        answer = await served.ask("warm", "f*")
        assert (answer.result["num_done"], answer.result["num_unfit"]) == (0, 3)
        assert answer.result["full_reason"] == "the disk of the cache is at its reserve"
        assert served.num_fetched == 0
        status = await served.ask("status")
        (kept,) = status.files
        assert Path(kept["local_path"]).read_bytes() == b"x" * 50_000


async def test_ten_thousand_small_files_are_warm_after_one_request_each(world):
    folder = world.remote / "many"
    folder.mkdir()
    for number in range(10_000):
        (folder / str(number)).write_bytes(b"%d" % number)
    node = await world.node(num_worker_threads=4)
    async with serving(node) as served:
        answer = await served.ask("warm", "many/")
        assert (answer.result["num_done"], answer.failed) == (10_000, [])
        assert node.volume.calls["read"] == 10_000
        assert await node.read("many/77") == b"77"
        assert node.volume.calls["read"] == 10_000


async def test_a_client_that_goes_away_ends_what_it_asked_for(world, monkeypatch):
    _fill(world, **{f"f{number}": 10 for number in range(100)})
    node = await world.node()
    began, may_go_on = threading.Event(), threading.Event()
    runs: list[Warming] = []

    def warming(core: Any, cancel: threading.Event) -> Warming:
        runs.append(Warming(core, cancel))
        return runs[-1]

    monkeypatch.setattr(commands, "Warming", warming)

    def hold(operation: str, _path: str) -> None:
        if operation == "read":
            began.set()
            may_go_on.wait(30)

    node.volume.fault = hold
    async with serving(node) as served:
        peer = await trio.to_thread.run_sync(connect, served.mount.address, 5.0)
        send(peer, {"request": "warm", "patterns": ["*"], "is_whole": True})
        await node.settled(began.is_set, "the first file is on its way")
        peer.close()
        await node.settled(lambda: runs[0]._crew.stop.is_set(), "the daemon noticed")
        num_begun = node.volume.calls["read"]
        may_go_on.set()
        await node.settled(lambda: not _crew_threads(), "all threads have ended")
        assert node.volume.calls["read"] == num_begun < 100


def _crew_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("trainmount-tree")]


async def test_two_warm_at_once_fetch_each_block_once(world):
    _fill(world, **{f"f{number}": 50_000 for number in range(20)})
    node = await world.node()
    async with serving(node) as served, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(served.ask, "warm", "*")
    assert served.num_fetched == 20 * 50_000


async def test_evicting_frees_the_cache_and_readers_fetch_again(world):
    _fill(world, a=40_000, b=40_000)
    node = await world.node()
    async with serving(node) as served:
        await served.ask("warm", "*")
        fh = await node.open("a")
        assert await node.read_handle(fh) == (world.remote / "a").read_bytes()
        answer = await served.ask("evict", "a")
        assert (answer.result["num_done"], answer.result["freed_bytes"]) == (1, 40_000)
        assert node.fs.cache_statistics().cached_bytes == 40_000
        assert await node.read_handle(fh) == (world.remote / "a").read_bytes()
        await node.close(fh)
        assert served.num_fetched == 120_000


async def test_warm_while_the_same_is_evicted_ends_and_names_what_is_gone(world):
    _fill(world, **{f"f{number}": 20_000 for number in range(30)})
    node = await world.node()
    evict_at = 10

    def evict(operation: str, _path: str) -> None:
        if operation == "read" and node.volume.calls["read"] == evict_at:
            trio.from_thread.run(served.ask, "evict", "*", trio_token=token)

    token = trio.lowlevel.current_trio_token()
    node.volume.fault = evict
    async with serving(node) as served:
        answer = await served.ask("warm", "*")
        gone = {one["path"] for one in answer.failed}
        assert answer.result["num_done"] == 30
        assert 0 < len(gone) < 30
        assert {one["reason"] for one in answer.failed} == {
            "was thrown out again, for other files needed the room"
        }
        for number in range(30):
            name, before = f"f{number}", served.num_fetched
            assert await node.read(name) == (world.remote / name).read_bytes()
            assert (served.num_fetched > before) is (name in gone)


async def test_flush_uploads_what_is_dirty_and_what_failed_before(world):
    node = await world.node()
    is_down = True

    def refuse(operation: str, path: str) -> None:
        if operation == "upload" and is_down:
            raise Unavailable("upload", path, "the store is down")

    node.volume.fault = refuse
    with pytest.raises(Unavailable):
        await node.write("failed", b"failed bytes")
    await node.settled(lambda: node.fs.failed_files() != [], "the file is set aside")
    fh = await node.open("open", os.O_CREAT | os.O_WRONLY)
    await node.fs.write(fh, 0, b"open bytes")
    async with serving(node) as served:
        answer = await served.ask("flush")
        assert answer.result == {"num_dirty": 2, "num_left": 2}
        assert sorted(one["path"] for one in answer.failed) == ["failed", "open"]
        assert all("the store is down" in one["reason"] for one in answer.failed)
        assert all(Path(one["bytes"]).exists() for one in answer.failed)
        is_down = False
        answer = await served.ask("flush")
        assert answer.result == {"num_dirty": 2, "num_left": 0}
        assert world.remote_files() == {"failed": b"failed bytes", "open": b"open bytes"}
        assert await node.read("failed") == b"failed bytes"
    await node.close(fh)


async def test_status_tells_what_is_here_and_why(world):
    node = await world.node(read_only=False)

    def refuse(operation: str, path: str) -> None:
        if operation == "upload":
            raise PermissionDenied("upload", path, "not yours")

    node.volume.fault = refuse
    with pytest.raises(PermissionDenied):
        await node.write("refused", b"x" * 300)
    await node.settled(lambda: node.fs.failed_files() != [], "the file is set aside")
    fh = await node.open("open", os.O_CREAT | os.O_WRONLY)
    await node.fs.write(fh, 0, b"y" * 200)
    async with serving(node) as served:
        answer = await served.ask("status")
        result = answer.result
        assert result["daemon_pid"] == os.getpid()
        assert (result["num_dirty_files"], result["num_failed_files"]) == (1, 1)
        assert result["cache"]["directory"] == str(node.settings.cache_dir)
        assert result["memory"]["limit_bytes"] == node.settings.memory_bytes
        assert result["memory"]["resident_bytes"] > 1 << 20
        assert [(one["path"], one["state"], one["size_bytes"]) for one in answer.files] == [
            ("open", "dirty", 200),
            ("refused", "failed", 300),
        ]
        assert "not yours" in answer.files[1]["reason"]
        assert Path(answer.files[1]["local_path"]).read_bytes() == b"x" * 300


async def test_refresh_asks_the_store_again_here_and_in_the_kernel(world):
    _fill(world, d__a=10, d__b=10, e__c=10)
    ages = dict.fromkeys(("entry", "attr", "directory", "negative", "open"), 3600.0)
    node = await world.node(**{f"{name}_timeout_seconds": age for name, age in ages.items()})
    assert set(await node.entries("d")) == {"a", "b"}
    assert not await node.exists("d/new")
    assert (await node.stat("e/c")).size == 10
    d = (await node.stat("d")).ino
    _fill(world, d__a=20, d__new=30, e__c=20)
    assert (await node.stat("d/a")).size == 10
    assert not await node.exists("d/new")
    assert (await node.stat("e/c")).size == 10
    async with serving(node) as served:
        await served.ask("refresh", "d/a")
        assert (await node.stat("d/a")).size == 20
        (stale,) = served.kernel.stale
        assert (stale.is_everything, stale.names[0][:2]) == (False, (d, b"a"))
        await served.ask("refresh", "d")
        assert (await node.stat("d/new")).size == 30
        assert set(await node.entries("d")) == {"a", "b", "new"}
        assert (await node.stat("e/c")).size == 10
        await served.ask("refresh")
        assert served.kernel.stale[-1].is_everything
        assert (await node.stat("e/c")).size == 20


async def test_refresh_keeps_cached_bytes_and_open_files(world):
    _fill(world, a=10_000)
    node = await world.node()
    data = (world.remote / "a").read_bytes()
    fh = await node.open("a")
    assert await node.read_handle(fh) == data
    async with serving(node) as served:
        await served.ask("refresh")
        assert await node.read_handle(fh) == data
        assert await node.read("a") == data
        assert served.num_fetched == 10_000
    await node.close(fh)


@pytest.mark.parametrize(
    "packet", [b"", b"no json", b"[]", b"{}", b'{"request": "warm", "patterns": 5}']
)
async def test_nonsense_on_the_socket_does_no_harm(world, packet):
    node = await world.node()
    async with serving(node) as served:
        with await trio.to_thread.run_sync(connect, served.mount.address, 5.0) as peer:
            peer.send(packet)
            assert await trio.to_thread.run_sync(peer.recv, 100) == b""
        assert (await served.ask("status")).result["source"] == node.settings.source


async def test_a_command_that_this_daemon_does_not_know_is_one_line(world):
    node = await world.node()
    async with serving(node) as served:
        with pytest.raises(ControlError, match="does not know the command 'polish'"):
            await served.ask("polish")


async def test_patterns_of_any_number_arrive_whole(world):
    _fill(world, a=10)
    node = await world.node()
    patterns = ["a", *(f"missing/{'x' * 200}/{number}" for number in range(2_000))]
    async with serving(node) as served:
        answer = await served.ask("warm", *patterns)
        assert answer.result["num_done"] == 1
        assert {one["path"] for one in answer.failed} == set(patterns[1:])


async def test_a_mount_that_nobody_registered_is_reached_by_its_socket(world):
    _fill(world, d__a=10)
    node = await world.node()
    async with serving(node) as served:
        call = partial(actions.change_cache, "warm", ["d/*"], served.mount.address)
        (one,) = await trio.to_thread.run_sync(call)
        assert one.answer.result["num_done"] == 1
        (status,) = await trio.to_thread.run_sync(actions.statuses, served.mount.address)
        assert (status["source"], status["files"]) == (node.settings.source, [])


async def test_the_socket_is_its_owners_alone(world):
    node = await world.node()
    async with serving(node) as served:
        assert served.mount.address.stat().st_mode & 0o777 == 0o600


async def test_a_daemon_that_dies_is_one_line_and_one_that_follows_is_asked_again(world):
    _fill(world, a=10)
    node = await world.node()
    address = control_address(node.settings.state_dir)
    served = Served(node)

    async def die_once() -> None:
        """Takes a request and closes."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(address))
        listener.listen()
        peer, _ = await trio.to_thread.run_sync(listener.accept)
        await trio.to_thread.run_sync(receive, peer)
        peer.close()
        listener.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(die_once)
        await served.wait_listening()
        with pytest.raises(client.DaemonEnded, match="ended before it had done it"):
            await served.ask("warm", "a")
    address.unlink()
    answers: list[client.Answer] = []

    async def warm() -> None:
        answers.append(await served.ask("warm", "a", may_repeat=True))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(die_once)
        await served.wait_listening()
        nursery.start_soon(warm)
        await node.settled(lambda: not _accepts(address), "the first daemon is gone")
        async with serving(node):
            await node.settled(lambda: answers != [], "the second one answered")
        nursery.cancel_scope.cancel()
    served.holder.close()
    assert answers[0].result["num_done"] == 1


async def test_a_mount_without_a_daemon_is_one_line_whatever_is_asked(world, monkeypatch):
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 0.3)
    served = Served(await world.node())
    served.holder.close()
    for may_repeat in (False, True):
        with pytest.raises(client.NoDaemon, match="no daemon of the mount answers"):
            await served.ask("refresh", may_repeat=may_repeat)


def _accepts(address: Path) -> bool:
    try:
        connect(address, 1.0).close()
    except OSError:
        return False
    return True


async def test_metrics_are_told_over_the_socket_and_over_http(world):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    node = await world.node(metrics_address=f"127.0.0.1:{port}")
    async with serving(node) as served:
        served.requests.note("read", 2_000_000)
        text = (await served.ask("metrics")).text
        assert 'trainmount_request_duration_seconds_count{operation="read"} 1' in text
        await node.settled(lambda: _accepts_tcp(port), "the port is open")
        answer = await trio.to_thread.run_sync(_http, port, "/metrics")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
        assert b'trainmount_request_duration_seconds_count{operation="read"} 1\n' in answer
        assert (await trio.to_thread.run_sync(_http, port, "/x")).startswith(b"HTTP/1.1 404")


def _accepts_tcp(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _http(port: int, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        received = b""
        while more := peer.recv(65536):
            received += more
        return received
