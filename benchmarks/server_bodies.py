"""The local Files API server itself: bytes out, bytes in, many small requests, and both at once.

Against nginx, which serves the same files from the same disk to the same program (`wire`), and for
uploads also against a loop from socket to file. Without nginx on the machine nothing is measured.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from measure import (
    MIB,
    Comparison,
    Program,
    Sample,
    compare,
    finish_program,
    peak_mib_of,
    reset_peak,
    run_program,
    say,
    start_program,
    take_turns,
)
from places import ROOT, Store, serving, write_blocks
from topics import Setting, as_rate

__all__ = ["run"]

_NUM_CONNECTIONS: Final = 8
_RANGE_BYTES: Final = 8 * MIB
_SMALL_BYTES: Final = 10_000
_NUM_ENTRIES: Final = 1000
_LATENCY_SECONDS: Final = 3.0

# No fsync, as our side has none unless a line says so; what else it has is what Debian gives it.
_NGINX: Final = """\
daemon off;
worker_processes 1;
{user}
pid {folder}/pid;
error_log {folder}/log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 100000000;
    client_max_body_size 0;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        root {root};
        location / {{
            dav_methods PUT DELETE;
            create_full_put_path on;
            autoindex on;
            autoindex_format json;
        }}
    }}
}}
"""


@dataclass(frozen=True, kw_only=True)
class _Server:
    """One side, from the client's view."""

    name: str
    url: str
    pid: int
    """The process that does the work."""
    directory: Path
    """What it serves, on disk."""
    files: str = ""
    """Prefix of the paths of files."""
    directories: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def sample(
        self, program: str, target: str, arguments: Mapping[str, object], *, per: int = 1
    ) -> Sample:
        """Run a program of `wire` on it; with the server's own peak of memory. The time is divided
        by `per`."""
        reset_peak(self.pid)
        given = {"url": self.url, "target": target, "headers": dict(self.headers), **arguments}
        timing = run_program(Program(module="wire", name=program, arguments=given))
        return Sample(
            seconds=timing.seconds / per,
            peak_mib=timing.peak_mib,
            daemon_mib=peak_mib_of(self.pid),
        )


def run(setting: Setting) -> list[Comparison]:
    if shutil.which("nginx") is None:
        say("server_bodies: skipped, nginx is not installed (Debian: apt-get install nginx-light)")
        return []
    source = setting.folder / "source"
    write_blocks(source, 2 * setting.read_mib * MIB)
    with (
        serving(setting.folder / "store") as store,
        serving(setting.folder / "durable", fsync=True) as durable,
        _nginx(setting.folder / "nginx") as nginx,
    ):
        ours, synced = _ours("server", store), _ours("server, fsync", durable)
        for server in (ours, synced, nginx):
            (server.directory / "big").hardlink_to(source)
            (server.directory / "small").write_bytes(os.urandom(_SMALL_BYTES))
            (server.directory / "many").mkdir()
            for number in range(_NUM_ENTRIES):
                (server.directory / "many" / f"sample-{number:06}").touch()
        return [
            *_downloads(setting, ours, nginx),
            *_uploads(setting, ours, synced, nginx),
            *_small(setting, ours, synced, nginx),
            *_latency(setting, ours, nginx),
        ]


def _downloads(setting: Setting, ours: _Server, nginx: _Server) -> list[Comparison]:
    size = 2 * setting.read_mib * MIB
    arguments = {"size_bytes": size, "num_connections": _NUM_CONNECTIONS}

    def read_whole(server: _Server) -> Sample:
        return server.sample("read_whole", f"{server.files}/big", arguments)

    def read_ranges(server: _Server) -> Sample:
        more = {"range_bytes": _RANGE_BYTES}
        return server.sample("read_ranges", f"{server.files}/big", arguments | more)

    what = f"server: download {size // MIB} MiB, 8 connections"
    whole = _turns(setting, read_whole, ours, nginx)
    ranges = _turns(setting, read_ranges, ours, nginx)
    return [
        compare(f"{what}, all of it on each", "nginx", *whole, as_rate(size * _NUM_CONNECTIONS)),
        compare(f"{what}, ranges of 8 MiB", "nginx", *ranges, as_rate(size)),
    ]


def _uploads(setting: Setting, ours: _Server, synced: _Server, nginx: _Server) -> list[Comparison]:
    size = setting.write_mib * MIB // 2
    arguments = {"size_bytes": size, "num_connections": _NUM_CONNECTIONS}

    def upload(server: _Server) -> Sample:
        sample = server.sample("upload", f"{server.files}/up", arguments)
        stored = list(server.directory.glob("up-*"))
        if [one.stat().st_size for one in stored] != [size] * _NUM_CONNECTIONS:
            raise RuntimeError(f"{server.name} has not stored what was sent")
        for one in stored:
            one.unlink()
        return sample

    folder = setting.folder / "received"
    folder.mkdir()

    def loop(_round: int) -> Sample:
        ready = folder / "ready"
        ready.unlink(missing_ok=True)
        given = {"folder": str(folder), "ready": str(ready), **arguments}
        program = Program(module="wire", name="receive_to_files", arguments=given)
        process = start_program(program)
        while not ready.exists():
            time.sleep(0.005)
        given = {"url": ready.read_text(), "target": "/x", "headers": {}, **arguments}
        sent = run_program(Program(module="wire", name="upload", arguments=given))
        loop_mib = finish_program(program, process).peak_mib
        return Sample(seconds=sent.seconds, peak_mib=sent.peak_mib, daemon_mib=loop_mib)

    samples = take_turns(
        {
            "server": lambda _round: upload(ours),
            "server, fsync": lambda _round: upload(synced),
            "nginx": lambda _round: upload(nginx),
            "loop": loop,
        },
        setting.repeats,
    )
    unit = as_rate(size * _NUM_CONNECTIONS)
    what = f"server: upload {size // MIB} MiB on each of 8 connections"
    bare = "a thread a connection from socket to file, no HTTP"
    return [
        compare(what, "nginx", samples["server"], samples["nginx"], unit),
        compare(what, bare, samples["server"], samples["loop"], unit),
        compare(
            f"{what}, fsync", "nginx, no fsync", samples["server, fsync"], samples["nginx"], unit
        ),
    ]


def _small(setting: Setting, ours: _Server, synced: _Server, nginx: _Server) -> list[Comparison]:
    count = setting.num_files
    unit = _as_requests

    def exchange(server: _Server, method: str, name: str, body_bytes: int = 0) -> Sample:
        arguments = {
            "method": method,
            "num_requests": count,
            "num_connections": _NUM_CONNECTIONS,
            "body_bytes": body_bytes,
        }
        return server.sample("exchange", f"{server.files}/{name}", arguments, per=count)

    def put(server: _Server) -> Sample:
        sample = exchange(server, "PUT", "put/{}", _SMALL_BYTES)
        shutil.rmtree(server.directory / "put")
        return sample

    def pages(server: _Server) -> Sample:
        target = f"{server.directories}/many/"
        num = max(count // 20, 1)
        arguments = {"method": "GET", "num_requests": num, "num_connections": _NUM_CONNECTIONS}
        return server.sample("exchange", target, arguments, per=num)

    asks: dict[str, Callable[[_Server], Sample]] = {
        "HEAD": lambda server: exchange(server, "HEAD", "small"),
        "GET 10 KB": lambda server: exchange(server, "GET", "small"),
        "list 1,000 entries": pages,
    }
    lines = []
    for what, ask in asks.items():
        samples, theirs = _turns(setting, ask, ours, nginx)
        lines.append(compare(f"server: {what}, 8 connections", "nginx", samples, theirs, unit))
    puts = take_turns(
        {
            "server": lambda _round: put(ours),
            "server, fsync": lambda _round: put(synced),
            "nginx": lambda _round: put(nginx),
        },
        setting.repeats,
    )
    what = "server: PUT 10 KB, 8 connections"
    lines.append(compare(what, "nginx", puts["server"], puts["nginx"], unit))
    synced_puts = puts["server, fsync"]
    lines.append(compare(f"{what}, fsync", "nginx, no fsync", synced_puts, puts["nginx"], unit))
    return lines


def _latency(setting: Setting, ours: _Server, nginx: _Server) -> list[Comparison]:
    """The median wait for HEAD, alone and while 8 connections download as fast as they can."""

    def wait(server: _Server) -> Sample:
        return server.sample("wait_times", f"{server.files}/small", {"seconds": _LATENCY_SECONDS})

    def busy(server: _Server) -> Sample:
        given = {
            "url": server.url,
            "target": f"{server.files}/big",
            "headers": dict(server.headers),
            "num_connections": _NUM_CONNECTIONS,
        }
        program = Program(module="wire", name="read_until_told", arguments=given)
        process = start_program(program)
        try:
            return wait(server)
        finally:
            finish_program(program, process)

    samples = take_turns(
        {
            "server, idle": lambda _round: wait(ours),
            "server, busy": lambda _round: busy(ours),
            "nginx, busy": lambda _round: busy(nginx),
        },
        setting.repeats,
    )
    what = "server: wait for HEAD while 8 connections download"
    unit = _as_milliseconds
    return [
        compare(what, "the same while nothing else goes on", *_pick(samples, "server, idle"), unit),
        compare(what, "nginx, likewise", *_pick(samples, "nginx, busy"), unit),
    ]


def _pick(samples: Mapping[str, list[Sample]], other: str) -> tuple[list[Sample], list[Sample]]:
    return samples["server, busy"], samples[other]


def _as_requests(seconds: float) -> str:
    return f"{1 / seconds:,.0f} requests/s"


def _as_milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _turns(
    setting: Setting, side: Callable[[_Server], Sample], ours: _Server, nginx: _Server
) -> tuple[list[Sample], list[Sample]]:
    samples = take_turns(
        {"server": lambda _round: side(ours), "nginx": lambda _round: side(nginx)},
        setting.repeats,
    )
    return samples["server"], samples["nginx"]


def _ours(name: str, store: Store) -> _Server:
    return _Server(
        name=name,
        url=store.url,
        pid=store.pid,
        directory=store.directory,
        files=f"/api/2.0/fs/files{ROOT}",
        directories=f"/api/2.0/fs/directories{ROOT}",
        headers={"Authorization": f"Bearer {store.environment['DATABRICKS_TOKEN']}"},
    )


@contextmanager
def _nginx(folder: Path) -> Iterator[_Server]:
    root = folder / "root"
    root.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    # Started by root it would become another user, who may not write here.
    user = "user root;" if os.geteuid() == 0 else ""
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, root=root, port=port, user=user))
    process = subprocess.Popen(["nginx", "-c", str(config), "-p", str(folder)])
    try:
        worker = _wait_worker(process, port)
        yield _Server(name="nginx", url=f"http://127.0.0.1:{port}", pid=worker, directory=root)
    finally:
        process.terminate()
        process.wait()


def _wait_worker(process: subprocess.Popen[bytes], port: int) -> int:
    """The process below nginx's first one, once it answers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while True:
        if process.poll() is not None:
            raise RuntimeError("nginx did not start")
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return int(children.read_text().split()[0])
        except (OSError, IndexError):
            time.sleep(0.01)
