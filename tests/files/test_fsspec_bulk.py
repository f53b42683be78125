"""Many files at once: in few requests, several at a time, with what failed named at the end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.callbacks import Callback
from tests.files.conftest import ROOT, TOKEN

from trainmount_files import PermissionDenied
from trainmount_files.filesystem import VolumesFileSystem
from trainmount_files.server import LocalServer
from trainmount_files.server.faults import Fault


@pytest.fixture
def fs(server: LocalServer) -> VolumesFileSystem:
    return VolumesFileSystem(host=server.url, token=TOKEN, skip_instance_cache=True)


def fill(directory: Path, num_files: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        (directory / f"{number:05}").write_bytes(b"x")


def requests_of(server: LocalServer, call: Callable[[], object]) -> dict[str, int]:
    before = server.statistics()["requests"]
    call()
    after = server.statistics()["requests"]
    return {
        route: num - before.get(route, 0)
        for route, num in after.items()
        if num != before.get(route, 0)
    }


def test_files_are_found_with_nothing_but_listings(
    fs: VolumesFileSystem, server: LocalServer, served: Path
) -> None:
    fill(served / "dir", 2500)
    fill(served / "dir" / "sub", 10)
    path = f"{ROOT}/dir"
    assert len(fs.find(path)) == 2510
    # Pages of 1000.
    assert requests_of(server, lambda: fs.find(path)) == {"list_directory": 4}
    assert requests_of(server, lambda: fs.du(path)) == {"list_directory": 4}
    assert requests_of(server, lambda: fs.glob(f"{path}/*7")) == {"list_directory": 3}


def test_a_tree_is_moved_in_as_few_requests_as_it_has_files(
    fs: VolumesFileSystem, server: LocalServer, tmp_path: Path
) -> None:
    fill(tmp_path / "src", 60)
    put = requests_of(server, lambda: fs.put(f"{tmp_path}/src/", f"{ROOT}/dst", recursive=True))
    assert put == {"put_file": 60, "make_directory": 1, "head_file": 1, "head_directory": 1}
    got = requests_of(server, lambda: fs.get(f"{ROOT}/dst/", f"{tmp_path}/back", recursive=True))
    assert got == {"list_directory": 1, "get_file": 60}
    read = requests_of(server, lambda: fs.cat(f"{ROOT}/dst/*0"))
    # One for whether the pattern is a name.
    assert read == {"list_directory": 1, "head_file": 7, "head_directory": 1, "get_file": 6}
    removed = requests_of(server, lambda: fs.rm(f"{ROOT}/dst", recursive=True))
    assert removed == {"list_directory": 1, "delete_file": 60, "remove_directory": 1}


class Together(VolumesFileSystem):
    """Lets files go in fours only; four that do not come together are an error."""

    barrier = threading.Barrier(4, timeout=60)

    def _store(self, *args: Any, **kwargs: Any) -> None:
        self.barrier.wait()
        super()._store(*args, **kwargs)

    def _fetch(self, *args: Any, **kwargs: Any) -> None:
        self.barrier.wait()
        super()._fetch(*args, **kwargs)

    def rm_file(self, path: str) -> None:
        self.barrier.wait()
        super().rm_file(path)


def test_files_are_moved_several_at_once(server: LocalServer, tmp_path: Path) -> None:
    fs = Together(host=server.url, token=TOKEN, skip_instance_cache=True)
    fill(tmp_path / "src", 8)
    fs.put(f"{tmp_path}/src/", f"{ROOT}/dst", recursive=True)
    fs.get(f"{ROOT}/dst/", f"{tmp_path}/back", recursive=True)
    assert len(list((tmp_path / "back").iterdir())) == 8
    fs.rm(f"{ROOT}/dst", recursive=True)
    assert fs.find(ROOT) == []


def test_a_callback_sees_files_and_bytes(fs: VolumesFileSystem, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    sizes = {name: (index + 1) * 100_000 for index, name in enumerate("abcd")}
    for name, size in sizes.items():
        (tmp_path / "src" / name).write_bytes(os.urandom(size))
    for transfer in (
        lambda seen: fs.put(f"{tmp_path}/src/", f"{ROOT}/dst", recursive=True, callback=seen),
        lambda seen: fs.get(f"{ROOT}/dst/", f"{tmp_path}/b", recursive=True, callback=seen),
    ):
        seen = Seen()
        transfer(seen)
        assert (seen.size, seen.value) == (4, 4)
        assert {name: (child.size, child.value) for name, child in seen.children.items()} == {
            name: (size, size) for name, size in sizes.items()
        }
    one = Callback()
    fs.get_file(f"{ROOT}/dst/d", f"{tmp_path}/one", callback=one)
    assert (one.size, one.value) == (400_000, 400_000)
    with (tmp_path / "into").open("wb") as file:
        fs.get_file(f"{ROOT}/dst/d", file, callback=Callback())
    assert (tmp_path / "into").read_bytes() == (tmp_path / "src/d").read_bytes()


class Seen(Callback):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.children: dict[str, Callback] = {}

    def branched(self, path_1: str, path_2: str, **kwargs: object) -> Callback:
        return self.children.setdefault(path_1.rpartition("/")[2], Callback())


def test_what_could_not_be_removed_is_named_and_all_else_is_gone(
    fs: VolumesFileSystem, server: LocalServer, served: Path
) -> None:
    fill(served / "a" / "b", 300)
    fill(served / "a" / "b" / "empty", 0)
    fill(served / "a" / "b2", 1)
    kept = ["00007", "00150", "00299"]
    server.inject(
        *(Fault(route="delete_file", path=f"*/a/b/{name}", status=403) for name in kept),
        Fault(route="delete_file", path="*/a/b/00100", status=503, count=1, retry_after="0"),
    )
    with pytest.raises(PermissionError, match="3 of 300 could not be removed") as error:
        fs.rm(f"{ROOT}/a/b", recursive=True)
    for name in kept:
        assert f"{ROOT}/a/b/{name}: delete: " in str(error.value)
    causes = error.value.__cause__.exceptions  # type: ignore[union-attr]
    assert {cause.filename for cause in causes} == {f"{ROOT}/a/b/{name}" for name in kept}
    assert {type(cause.__cause__) for cause in causes} == {PermissionDenied}
    assert fs.find(f"{ROOT}/a", withdirs=True) == [
        f"{ROOT}/a",
        f"{ROOT}/a/b",
        *(f"{ROOT}/a/b/{name}" for name in kept),
        f"{ROOT}/a/b2",
        f"{ROOT}/a/b2/00000",
    ]
    server.inject()
    fs.rm(f"{ROOT}/a/b", recursive=True)
    assert fs.ls(f"{ROOT}/a", detail=False) == [f"{ROOT}/a/b2"]


def test_files_that_cannot_be_copied_are_named_and_the_others_copied(
    fs: VolumesFileSystem, server: LocalServer, served: Path, tmp_path: Path
) -> None:
    fill(served / "src", 20)
    server.inject(
        *(Fault(route="get_file", path=f"*/{name}", status=403) for name in ("00003", "00007"))
    )
    with pytest.raises(PermissionError, match="2 of 20 could not be fetched") as error:
        fs.get(f"{ROOT}/src/", f"{tmp_path}/dst", recursive=True)
    assert "00003" in str(error.value)
    assert "00007" in str(error.value)
    assert len(list((tmp_path / "dst").iterdir())) == 18


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(
    fs: VolumesFileSystem, server: LocalServer, served: Path, tmp_path: Path
) -> None:
    fill(served / "src" / "sub", 1)
    server.inject(Fault(route="list_directory", path="*/sub", status=403))
    for call in (
        lambda: fs.find(f"{ROOT}/src"),
        lambda: fs.rm(f"{ROOT}/src", recursive=True),
        lambda: fs.get(f"{ROOT}/src", f"{tmp_path}/dst", recursive=True),
        lambda: fs.du(f"{ROOT}/src"),
    ):
        with pytest.raises(PermissionError):
            call()


def test_a_refused_identity_ends_the_whole_at_once(
    fs: VolumesFileSystem, server: LocalServer, served: Path
) -> None:
    fill(served / "src", 500)
    server.inject(Fault(route="delete_file", status=401))

    def refused() -> None:
        with pytest.raises(PermissionError):
            fs.rm(f"{ROOT}/src", recursive=True)

    used = requests_of(server, refused)
    assert used["delete_file"] <= 16 * 4
    assert len(fs.find(f"{ROOT}/src")) == 500
