"""Two nodes with a mount each of one volume of the local Files API, for all tests of a module."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.mount.conftest import FilesServer, MountProcess, make_mounts, wait_until

OLD = (10**9, 10**9)
"""A time that leaves no doubt about a version of the Files API, whose versions are seconds."""


class Nodes:
    """Mounts `a` and `b`, and the server behind both."""

    def __init__(self, server: FilesServer, faults: Path, start: Callable[..., MountProcess]):
        self.server = server
        self.start = start
        self._faults = faults
        self.a, self.b = (self.mount(name) for name in ("a", "b"))

    def mount(self, name: str, *options: str, **others: Any) -> MountProcess:
        """Another mount of the volume."""
        environment = self.server.environment()
        return self.start(
            self.server.source, *options, name=name, environment=environment, **others
        )

    def refuse(self, *routes: str, **rule: Any) -> None:
        """From now on the server answers so (server/faults.py); without routes, as it should."""
        self._faults.write_text(json.dumps([{"route": route, **rule} for route in routes]))

    def requests(self) -> Counter[str]:
        """Those that the server has had, by route."""
        asked = urllib.request.Request(
            f"{self.server.url}/admin/statistics", headers={"Authorization": "Bearer right"}
        )
        with urllib.request.urlopen(asked) as answer:
            return Counter(json.load(answer)["requests"])


@dataclass(frozen=True)
class Place:
    """One directory of the volume: below mounts A and B, and in the store."""

    a: Path
    b: Path
    store: Path

    def stored(self, name: str, data: bytes) -> Path:
        """A file that is in the store since long; as seen on A."""
        path = self.store / name
        path.write_bytes(data)
        os.utime(path, OLD)
        return self.a / name


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("semantics")
    faults = folder / "faults.json"
    faults.write_text("[]")
    server = FilesServer(folder)
    server.start("--admin", "--no-fsync", "--faults", str(faults))
    try:
        with make_mounts(folder) as start:
            yield Nodes(server, faults, start)
    finally:
        server.stop()


@pytest.fixture
def place(nodes: Nodes, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A directory of the test's own, so that no mount remembers anything of it."""
    name = request.node.name[:80]
    made = Place(nodes.a.mountpoint / name, nodes.b.mountpoint / name, nodes.server.volume / name)
    made.store.mkdir()
    wait_until(lambda: made.a.exists() and made.b.exists(), "the directory")
    yield made
    nodes.refuse()


def errno_of(function: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The name of the error; empty for none."""
    try:
        function(*arguments, **options)
    except OSError as error:
        return _name_of(error.errno or 0)
    return ""


def libc(name: str, *arguments: Any) -> str:
    """As `errno_of`, of a function that Python does not have."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) == 0:
        return ""
    return _name_of(ctypes.get_errno())


def _name_of(number: int) -> str:
    # Linux has two names for it.
    return "EOPNOTSUPP" if number == errno.EOPNOTSUPP else errno.errorcode[number]


def renameat2(source: Path, target: Path, flags: int) -> str:
    here = ctypes.c_int(-100)
    return libc("renameat2", here, os.fsencode(source), here, os.fsencode(target), flags)


def run(*command: object) -> str:
    """What a program prints; it must end well and complain of nothing."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), command
    return done.stdout


def trainmount(command: str, *arguments: object) -> str:
    return run(sys.executable, "-m", "trainmount_fuse", command, *arguments)


def local_files(mount: MountProcess) -> list[tuple[str, str]]:
    """What `trainmount status` tells of files whose bytes are not, or not as they should be, in
    the store: states and paths."""
    (status,) = json.loads(trainmount("status", mount.mountpoint, "-o", "json"))["mounts"]
    return [(one["state"], one["path"]) for one in status["files"]]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below, with its bytes."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }
