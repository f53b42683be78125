"""A directory is published whole, or nothing of it is seen."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.files.conftest import ROOT, TOKEN

import trainmount_files
from trainmount_files import (
    AlreadyExists,
    Cancelled,
    FileStat,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    Unsupported,
    Volume,
    fetch,
    publish,
)
from trainmount_files.directory import DirectoryVolume
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.trees.fetch import opened

MANIFEST = ".trainmount-manifest.json"
CLAIM = ".trainmount-publishing"


def content_of(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def paths_in(volume: Volume, path: str) -> set[str]:
    """Files below a directory; none where it is not there."""
    try:
        entries = volume.list_page(path).entries
    except NotFound:
        return set()
    inner = [
        paths_in(volume, entry.path) if entry.is_directory else {entry.path} for entry in entries
    ]
    return set().union(*inner)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    (root / "shards/deep").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "weights").write_bytes(os.urandom(2_500_000))
    for number in range(20):
        (root / f"shards/deep/s{number}").write_bytes(b"s" * number)
    return root


def test_what_was_published_is_fetched_over_every_kind_of_volume(
    volume: Volume, model: Path, tmp_path: Path
) -> None:
    published = publish(model, "models/v1", volume=volume)
    fetched = fetch("models/v1", tmp_path / "in/here", volume=volume)

    assert fetched == published
    assert content_of(tmp_path / "in/here") == content_of(model)
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["here"]
    assert published.size_bytes == 2_500_000 + sum(range(20))


def test_the_manifest_is_the_same_for_the_same_files(
    remote: FilesApiVolume, served: Path, model: Path
) -> None:
    publish(model, "a", volume=remote)
    publish(model, "b", volume=remote, parallelism=1)

    text = (served / "a" / MANIFEST).read_text()
    assert text == (served / "b" / MANIFEST).read_text()
    document = json.loads(text)
    assert document["version"] == 1
    assert document["empty_directories"] == ["empty"]
    assert {
        "path": "shards/deep/s3",
        "size_bytes": 3,
        "sha256": hashlib.sha256(b"sss").hexdigest(),
    } in (document["files"])
    assert [file["path"] for file in document["files"]] == sorted(
        file["path"] for file in document["files"]
    )
    assert not (served / "a" / CLAIM).exists()


def test_by_a_url_the_volume_is_opened_and_closed(
    server: LocalServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", server.url)
    monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
    (tmp_path / "disk").mkdir()
    disk = (tmp_path / "disk").as_uri()

    publish(model, f"{ROOT}/models/v1")
    fetch(f"{ROOT}/models/v1/", tmp_path / "one")
    publish(model, f"{disk}/v%201/")
    fetch(f"{disk}/v%201", tmp_path / "two")

    assert content_of(tmp_path / "one") == content_of(model) == content_of(tmp_path / "two")
    assert (tmp_path / "disk/v 1" / MANIFEST).exists()


@pytest.mark.parametrize("there", [MANIFEST, CLAIM, "stranger"])
def test_an_occupied_destination_is_refused_before_any_work(
    server: LocalServer, remote: FilesApiVolume, model: Path, there: str
) -> None:
    remote.put(f"a/{there}", b"{}")
    before = server.statistics()["requests"].get("put_file", 0)

    with pytest.raises(AlreadyExists, match="replace=True"):
        publish(model, "a", volume=remote)

    assert server.statistics()["requests"]["put_file"] == before
    assert paths_in(remote, "a") == {f"a/{there}"}


def test_a_file_at_the_destination_is_refused_even_with_replace(
    remote: FilesApiVolume, model: Path
) -> None:
    remote.put("a", b"")

    with pytest.raises(AlreadyExists, match="a file is at the path"):
        publish(model, "a", volume=remote, replace=True)


def test_replace_leaves_nothing_of_what_was_there(
    volume: Volume, model: Path, tmp_path: Path
) -> None:
    publish(model, "a", volume=volume)
    (model / "weights").unlink()
    (model / "new").write_bytes(b"new")

    publish(model, "a", volume=volume, replace=True)
    fetch("a", tmp_path / "out", volume=volume)

    assert content_of(tmp_path / "out") == content_of(model)
    assert "a/weights" not in paths_in(volume, "a")


def test_a_publication_that_fails_is_never_seen_and_can_be_made_again(
    server: LocalServer, remote: FilesApiVolume, model: Path, tmp_path: Path
) -> None:
    server.inject(Fault(route="put_file", path="*/s7", status=403))

    with pytest.raises(PermissionDenied):
        publish(model, "a", volume=remote)

    assert f"a/{MANIFEST}" not in paths_in(remote, "a")
    with pytest.raises(NotFound, match="nothing is published there, or not yet"):
        fetch("a", tmp_path / "out", volume=remote)
    assert not (tmp_path / "out").exists()
    server.inject()
    with pytest.raises(AlreadyExists, match="of an earlier try"):
        publish(model, "a", volume=remote)
    publish(model, "a", volume=remote, replace=True)
    fetch("a", tmp_path / "out", volume=remote)
    assert content_of(tmp_path / "out") == content_of(model)


def test_of_two_publishers_at_once_one_wins_and_its_tree_is_whole(
    volume: Volume, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{name}-{number}").write_bytes(name.encode())
            (tmp_path / name / f"both-{number}").write_bytes(name.encode())
    together = threading.Barrier(2)
    ends: dict[str, Any] = {}

    def run(name: str) -> None:
        together.wait()
        try:
            ends[name] = publish(tmp_path / name, "a", volume=volume, parallelism=2)
        except AlreadyExists as error:
            ends[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    winners = [name for name, end in ends.items() if not isinstance(end, AlreadyExists)]
    assert len(winners) == 1
    fetch("a", tmp_path / "out", volume=volume)
    assert content_of(tmp_path / "out") == content_of(tmp_path / winners[0])


def test_a_publisher_that_was_replaced_meanwhile_publishes_nothing(
    tmp_path: Path, model: Path
) -> None:
    class Taken(DirectoryVolume):
        def upload(self, path: str, *arguments: Any, **named: Any) -> FileStat:
            self.put(f"a/{CLAIM}", b"another")
            return super().upload(path, *arguments, **named)

    (tmp_path / "volume").mkdir()
    volume = Taken(tmp_path / "volume")

    with pytest.raises(PreconditionFailed, match="nothing was published"):
        publish(model, "a", volume=volume)

    assert f"a/{MANIFEST}" not in paths_in(volume, "a")
    assert (tmp_path / "volume/a" / CLAIM).read_bytes() == b"another"


def test_a_publisher_that_is_killed_has_published_nothing(
    server: LocalServer, remote: FilesApiVolume, served: Path, model: Path, tmp_path: Path
) -> None:
    server.inject(Fault(route="put_file", path="*/weights", latency_ms=60_000))
    program = (
        "import pathlib; from trainmount_files import publish;"
        f"publish(pathlib.Path({str(model)!r}), {ROOT + '/a'!r})"
    )
    environment = {**os.environ, "DATABRICKS_HOST": server.url, "DATABRICKS_TOKEN": TOKEN}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    while not (served / "a/shards/deep/s19").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    server.inject()

    with pytest.raises(NotFound):
        fetch("a", tmp_path / "out", volume=remote)
    with pytest.raises(AlreadyExists, match="a publisher was killed there"):
        publish(model, "a", volume=remote)
    publish(model, "a", volume=remote, replace=True)
    fetch("a", tmp_path / "out", volume=remote)
    assert content_of(tmp_path / "out") == content_of(model)


@pytest.mark.parametrize("damage", ["bytes", "shorter", "gone", "large bytes"])
def test_a_publication_that_was_damaged_is_not_fetched(
    remote: FilesApiVolume, served: Path, model: Path, tmp_path: Path, damage: str
) -> None:
    publish(model, "a", volume=remote)
    file = served / ("a/weights" if damage == "large bytes" else "a/shards/deep/s5")
    if damage == "gone":
        file.unlink()
    elif damage == "shorter":
        file.write_bytes(b"ss")
    else:
        file.write_bytes(b"t" * file.stat().st_size)

    with pytest.raises(NotFound if damage == "gone" else PreconditionFailed):
        fetch("a", tmp_path / "out", volume=remote)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "served"]


def test_an_occupied_directory_is_refused_before_any_request(
    server: LocalServer, remote: FilesApiVolume, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()

    with pytest.raises(AlreadyExists, match="something is there"):
        fetch("a", tmp_path / "out", volume=remote)

    assert server.statistics()["requests"] == {}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"version": 2, "files": [], "empty_directories": []}', Unsupported),
        ("no json", InvalidRequest),
        ("[]", InvalidRequest),
        ('{"version": 1}', InvalidRequest),
        (
            '{"version": 1, "empty_directories": [], "files": [{"path": "../x", "size_bytes": 1, '
            '"sha256": "' + "0" * 64 + '"}]}',
            InvalidRequest,
        ),
        ('{"version": 1, "files": [], "empty_directories": ["/abs"]}', InvalidRequest),
    ],
)
def test_a_manifest_that_is_none_of_ours_is_refused(
    remote: FilesApiVolume, tmp_path: Path, text: str, error: type[Exception]
) -> None:
    remote.put(f"a/{MANIFEST}", text.encode())

    with pytest.raises(error):
        fetch("a", tmp_path / "out", volume=remote)

    assert not (tmp_path / "out").exists()


def test_what_cannot_be_published_as_it_is_is_refused(
    remote: FilesApiVolume, tmp_path: Path
) -> None:
    for name in ("link", "reserved", "gone"):
        (tmp_path / name).mkdir()
    (tmp_path / "link/x").symlink_to("/etc")
    (tmp_path / "reserved" / MANIFEST).touch()
    (tmp_path / "gone").rmdir()

    with pytest.raises(InvalidRequest, match="symbolic link"):
        publish(tmp_path / "link", "a", volume=remote)
    with pytest.raises(InvalidRequest, match="kept for the publication"):
        publish(tmp_path / "reserved", "b", volume=remote)
    with pytest.raises(NotFound):
        publish(tmp_path / "gone", "c", volume=remote)
    assert paths_in(remote, "") == set()


def test_a_file_that_changes_while_it_is_published_fails_it(tmp_path: Path, model: Path) -> None:
    class Slow(DirectoryVolume):
        def upload(self, path: str, *arguments: Any, **named: Any) -> FileStat:
            stored = super().upload(path, *arguments, **named)
            if path == "a/weights":
                with (model / "weights").open("ab") as file:
                    file.write(b"more")
            return stored

    (tmp_path / "volume").mkdir()
    volume = Slow(tmp_path / "volume")

    with pytest.raises(PreconditionFailed, match="changed while it was published"):
        publish(model, "a", volume=volume)

    assert f"a/{MANIFEST}" not in paths_in(volume, "a")


def test_a_cancelled_fetch_leaves_nothing(
    remote: FilesApiVolume, model: Path, tmp_path: Path
) -> None:
    publish(model, "a", volume=remote)
    cancel = threading.Event()
    cancel.set()

    with pytest.raises(Cancelled):
        fetch("a", tmp_path / "out", volume=remote, cancel=cancel)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "served"]


def test_the_package_offers_both_without_loading_them() -> None:
    program = (
        "import sys, trainmount_files; print('trainmount_files.trees' in sys.modules);"
        "print(trainmount_files.publish.__name__, trainmount_files.fetch.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["False", "publish", "fetch"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trainmount_files.nothing  # noqa: B018


def test_places_may_be_text_and_errors_name_the_whole_place(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/f").write_text("1")
    (tmp_path / "store").mkdir()
    place = (tmp_path / "store").as_uri() + "/v1"

    publish(str(tmp_path / "model"), place)
    fetch(place, str(tmp_path / "out"))

    assert (tmp_path / "out/f").read_text() == "1"
    with pytest.raises(AlreadyExists, match="publish v1: something is published there"):
        publish(tmp_path / "model", place)

    def fail() -> None:
        with opened("/Volumes/main/default/data/v1", None) as (_, path):
            raise AlreadyExists("publish", path, "something is there")

    with pytest.raises(AlreadyExists, match="publish /Volumes/main/default/data/v1: something"):
        fail()
