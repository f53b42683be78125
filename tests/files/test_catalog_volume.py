"""Everything below `/Volumes` as one tree, against the local server and against a scripted Unity
Catalog on a bad day.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.files.conftest import OPTIONS, TOKEN, Request, Scripted, ScriptedServer

from trainmount_files import (
    AlreadyExists,
    ByteRange,
    InvalidRequest,
    IsADirectory,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unsupported,
    Volume,
    VolumeError,
    list_directory,
    open_volume,
)
from trainmount_files.catalog import CatalogVolume
from trainmount_files.files_api import Credentials
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.transfer import download_file
from trainmount_files.volume import AbandonsUploads, ReadsToFile, TakesFileParts

CATALOG = "/api/2.1/unity-catalog/"


@pytest.fixture
def tree(server: LocalServer, tmp_path: Path) -> Iterator[CatalogVolume]:
    """`main.default.data` of the fixture, and two more volumes."""
    for name in ("main/default/other", "main/empty", "second/s/v"):
        (tmp_path / "served" / name).mkdir(parents=True)
    volume = CatalogVolume("/Volumes", Credentials(host=server.url, token=TOKEN), OPTIONS)
    yield volume
    volume.close()


def names(volume: Volume, path: str = "") -> list[str]:
    return [entry.name for entry in list_directory(volume, path)]


def content(volume: Volume, path: str) -> bytes:
    found = volume.stat(path)
    buffer = bytearray(found.size_bytes)
    volume.read_into(path, ByteRange(0, found.size_bytes), buffer, version=found.version)
    return bytes(buffer)


def asked(server: LocalServer) -> int:
    """Requests that Unity Catalog was sent."""
    return int(server.statistics()["requests"].get("unity_catalog", 0))


def test_the_levels_above_a_volume_are_directories(tree: CatalogVolume) -> None:
    assert names(tree) == ["main", "second"]
    assert names(tree, "main") == ["default", "empty"]
    assert names(tree, "main/default") == ["data", "other"]
    assert names(tree, "main/empty") == []
    assert names(tree, "main/default/data") == []
    for path in ("", "main", "main/default", "main/default/data"):
        assert tree.stat(path).is_directory
        assert tree.stat(path).path == path
        assert tree.stat(path).size_bytes == 0
    assert [entry.path for entry in list_directory(tree, "second/s")] == ["second/s/v"]


@pytest.mark.parametrize(
    ("root", "below"),
    [
        ("/Volumes", "main/default/data/"),
        ("/Volumes/main", "default/data/"),
        ("/Volumes/main/default", "data/"),
        ("/Volumes/main/default/data", ""),
    ],
)
def test_a_file_in_a_volume_is_reached_from_each_level(
    server: LocalServer, served: Path, tmp_path: Path, root: str, below: str
) -> None:
    volume = CatalogVolume(root, Credentials(host=server.url, token=TOKEN), OPTIONS)
    path = f"{below}a b/file"
    assert isinstance(volume, ReadsToFile)
    assert volume.put(path, b"0123456789").path == path
    assert (served / "a b" / "file").read_bytes() == b"0123456789"
    assert content(volume, path) == b"0123456789"
    assert [entry.path for entry in list_directory(volume, f"{below}a b")] == [path]
    local = tmp_path / "local"
    local.write_bytes(b"x" * 100_000)
    with local.open("rb") as source:
        assert volume.upload(f"{below}big", source, 100_000).size_bytes == 100_000
    download_file(volume, f"{below}big", tmp_path / "down", range_bytes=30_000)
    assert (tmp_path / "down").read_bytes() == b"x" * 100_000
    upload = volume.start_upload(f"{below}parts")
    upload.put_part(1, b"parts")
    upload.complete()
    assert content(volume, f"{below}parts") == b"parts"
    assert volume.rename(f"{below}parts", f"{below}d/moved").path == f"{below}d/moved"
    volume.delete(f"{below}d/moved")
    volume.remove_directory(f"{below}d")
    volume.make_directory(f"{below}e/f")
    assert sorted(each.name for each in served.iterdir()) == ["a b", "big", "e"]
    volume.close()


@pytest.mark.parametrize(
    ("root", "below"), [("/Volumes", "main/default/data/"), ("/Volumes/main/default/data", "")]
)
def test_an_upload_goes_by_parts_of_a_local_file_and_can_be_freed_by_its_token(
    server: LocalServer, served: Path, tmp_path: Path, root: str, below: str
) -> None:
    credentials = Credentials(host=server.url, token=TOKEN)
    volume, other = (CatalogVolume(root, credentials, OPTIONS) for _ in range(2))
    local = tmp_path / "local"
    local.write_bytes(os.urandom(50_000))
    with local.open("rb") as source:
        upload = volume.start_upload(f"{below}file")
        assert isinstance(upload, TakesFileParts)
        upload.put_file_part(2, source.fileno(), ByteRange(30_000, 50_000))
        upload.put_file_part(1, source.fileno(), ByteRange(0, 30_000))
        assert upload.complete().size_bytes == 50_000
        assert (served / "file").read_bytes() == local.read_bytes()
        dead = volume.start_upload(f"{below}dead")
        assert isinstance(dead, TakesFileParts)
        dead.put_file_part(1, source.fileno(), ByteRange(0, 50_000))
        with pytest.raises(InvalidRequest, match="fewer than 60000 bytes"):
            dead.put_file_part(2, source.fileno(), ByteRange(50_000, 60_000))
    assert isinstance(volume, AbandonsUploads)
    assert server.statistics()["open_uploads"] == 1
    token = volume.token_of(dead)
    assert other.abandon_upload(f"{below}dead", token)
    assert server.statistics()["open_uploads"] == server.statistics()["staged_bytes"] == 0
    # Nothing is left of what is complete, or gone already.
    assert other.abandon_upload(f"{below}dead", token)
    assert other.abandon_upload(f"{below}file", volume.token_of(upload))
    assert (served / "file").read_bytes() == local.read_bytes()
    other.close()
    volume.close()


def test_open_volume_takes_every_level(server: LocalServer, served: Path) -> None:
    (served / "file").write_bytes(b"1234567")
    for url, path in (
        ("/Volumes", "main/default/data/file"),
        ("/Volumes/", "main/default/data/file"),
        ("dbfs:/Volumes/main", "default/data/file"),
        ("/Volumes/main/default/", "data/file"),
        ("dbfs:/Volumes/main/default/data", "file"),
    ):
        volume = open_volume(url, host=server.url, token=TOKEN)
        assert content(volume, path) == b"1234567"
        assert volume.url == url.removeprefix("dbfs:").rstrip("/")
        volume.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("/Workspace/Users/me/x", "workspace files are no volume"),
        ("dbfs:/tmp/x", "only dbfs:/Volumes"),
        ("dbfs:/databricks-datasets", "only dbfs:/Volumes"),
        ("/dbfs/mnt/x", "DBFS is no volume"),
        ("/Volumes/c/../x", "must be /Volumes"),
        ("/Volumes//s", "must be /Volumes"),
        ("/Volumesx", "must be /Volumes"),
    ],
)
def test_what_is_no_volume_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        open_volume(url)


def test_what_is_missing_is_not_found_at_each_level(tree: CatalogVolume) -> None:
    for path in ("nope", "nope/s", "nope/s/v", "main/nope", "main/nope/v", "main/default/nope"):
        with pytest.raises(NotFound, match=r"^stat nope|^stat main/.*nope"):
            tree.stat(path)
        with pytest.raises(NotFound):
            tree.list_page(path)
        with pytest.raises(NotFound):
            tree.delete(path)
        with pytest.raises(NotFound):
            tree.read_into(path, ByteRange(0, 1), bytearray(1))
        with pytest.raises(NotFound):
            tree.remove_directory(path)
    with pytest.raises(NotFound):
        tree.stat("main/default/nope/file")
    with pytest.raises(NotFound):
        tree.put("main/default/nope/file", b"1")


def test_a_name_in_upper_case_is_told_the_stored_one(tree: CatalogVolume) -> None:
    with pytest.raises(NotFound, match="there is no catalog Main; it is called main"):
        tree.stat("Main")
    with pytest.raises(NotFound, match="there is no catalog Main; it is called main"):
        tree.list_page("Main")
    with pytest.raises(NotFound, match="there is no volume DATA; it is called data"):
        tree.stat("main/default/DATA")


@pytest.mark.parametrize("path", [".git", "main/.hidden", "main/default/a b", "x.chunks/y/z"])
def test_a_name_that_no_object_can_have_costs_no_request(
    tree: CatalogVolume, server: LocalServer, path: str
) -> None:
    with pytest.raises(NotFound, match="can be called"):
        tree.stat(path)
    assert server.statistics()["requests"] == {}


def test_objects_cannot_be_made_removed_or_written(tree: CatalogVolume) -> None:
    for path in ("main/default/new", "main/new", "new"):
        with pytest.raises(Unsupported, match="is made in Unity Catalog"):
            tree.make_directory(path)
        with pytest.raises(Unsupported, match="files are inside volumes"):
            tree.put(path, b"1")
        with pytest.raises(Unsupported, match="files are inside volumes"):
            tree.start_upload(path)
    for path, kind in (("main", "catalog"), ("main/empty", "schema"), ("second/s/v", "volume")):
        with pytest.raises(Unsupported, match=f"is a {kind}, which is dropped in Unity Catalog"):
            tree.remove_directory(path)
        tree.make_directory(path)
        with pytest.raises(IsADirectory, match=f"is a {kind}"):
            tree.put(path, b"1")
        with pytest.raises(AlreadyExists, match=f"is a {kind}"):
            tree.put(path, b"1", overwrite=False)
        with pytest.raises(IsADirectory, match=f"is a {kind}"):
            tree.delete(path)
        with pytest.raises(IsADirectory, match=f"is a {kind}"):
            tree.read_into(path, ByteRange(0, 0), bytearray())
        with pytest.raises(IsADirectory, match=f"is a {kind}"):
            tree.rename(path, "main/default/data/file")
    with pytest.raises(InvalidRequest):
        tree.remove_directory("")
    assert names(tree) == ["main", "second"]


def test_a_file_is_not_moved_to_another_volume(tree: CatalogVolume) -> None:
    tree.put("main/default/data/file", b"1")
    with pytest.raises(
        Unsupported, match=r"from /Volumes/main/default/data to /Volumes/second/s/v"
    ):
        tree.rename("main/default/data/file", "second/s/v/file")
    with pytest.raises(Unsupported, match="files are inside volumes"):
        tree.rename("main/default/data/file", "second/s/file")
    assert content(tree, "main/default/data/file") == b"1"
    assert names(tree, "second/s/v") == []


def test_a_look_at_an_object_costs_no_request_while_its_list_is_fresh(
    tree: CatalogVolume, server: LocalServer
) -> None:
    assert names(tree) == ["main", "second"]
    assert asked(server) == 1
    for _ in range(3):
        tree.stat("main")
        names(tree)
        with pytest.raises(NotFound):
            tree.stat("third")
    assert asked(server) == 1
    tree.stat("main/default")
    tree.stat("main/empty")
    assert asked(server) == 2
    tree.put("main/default/data/file", b"1")
    content(tree, "main/default/data/file")
    assert asked(server) == 2


def test_threads_that_need_the_same_list_ask_once(tree: CatalogVolume, server: LocalServer) -> None:
    server.inject(Fault(route="unity_catalog", latency_ms=50))
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(names(tree))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["main", "second"]] * 8
    assert asked(server) == 1


def test_a_list_is_asked_for_again_when_it_is_old(server: LocalServer, tmp_path: Path) -> None:
    credentials = Credentials(host=server.url, token=TOKEN)
    volume = CatalogVolume("/Volumes/main", credentials, OPTIONS, keep_seconds=0)
    assert names(volume) == ["default"]
    (tmp_path / "served" / "main" / "new").mkdir()
    assert names(volume) == ["default", "new"]
    volume.close()


def test_passing_trouble_is_ridden_out_and_lasting_trouble_is_told(
    tree: CatalogVolume, server: LocalServer
) -> None:
    server.inject(Fault(route="unity_catalog", status=503, count=2))
    assert names(tree) == ["main", "second"]
    server.inject(Fault(route="unity_catalog", status=503))
    with pytest.raises(Unavailable, match="list main: HTTP 503"):
        tree.list_page("main")
    server.inject()
    assert names(tree, "main") == ["default", "empty"]


def test_a_wrong_token_is_told_at_each_level(server: LocalServer) -> None:
    volume = CatalogVolume("/Volumes", Credentials(host=server.url, token="wrong"), OPTIONS)
    for call in (volume.list_page, volume.stat):
        for path in ("main", "main/default/data/file"):
            with pytest.raises(Unauthenticated):
                call(path)
    volume.close()


def test_calls_after_close_raise_at_each_level(tree: CatalogVolume) -> None:
    assert names(tree) == ["main", "second"]
    tree.close()
    for path in ("", "main", "main/default/data/file"):
        with pytest.raises(ValueError, match="closed"):
            tree.stat(path)
    with pytest.raises(ValueError, match="closed"):
        tree.list_page("")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_asks_anew_and_a_spawned_one_gets_the_token(
    tree: CatalogVolume, server: LocalServer, tmp_path: Path
) -> None:
    assert names(tree) == ["main", "second"]
    (tmp_path / "served" / "third").mkdir()
    # Held while the child is forked: it must not inherit it locked.
    with tree._objects.get()._lock:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = int(names(tree) != ["main", "second", "third"])
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert names(tree) == ["main", "second"]
    context = multiprocessing.get_context("spawn")
    spawned = context.Process(target=tree.put, args=("main/default/data/from-child", b"1"))
    spawned.start()
    spawned.join(60)
    assert spawned.exitcode == 0
    assert tree.stat("main/default/data/from-child").size_bytes == 1
    pickled = pickle.dumps(tree)
    assert TOKEN.encode() not in pickled
    assert pickle.loads(pickled).url == "/Volumes"


@dataclass
class Metastore:
    """A Unity Catalog that answers as a test says: by call and the question's parents."""

    answers: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """`("schemas", "c")` -> a page, a list of pages (tokens are the test's), or a status."""

    def __call__(self, request: Request) -> Scripted:
        parts = urlsplit(request.target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        assert parts.path.startswith(CATALOG)
        parents = [query[n] for n in ("catalog_name", "schema_name") if n in query]
        answer = self.answers[(parts.path.removeprefix(CATALOG), *parents)]
        if isinstance(answer, int):
            code = "PERMISSION_DENIED" if answer == 403 else "DOES_NOT_EXIST"
            error = {"error_code": code, "message": f"the token {TOKEN} may not"}
            return Scripted(status=answer, body=json.dumps(error).encode())
        if isinstance(answer, list):
            answer = answer[int(query.get("page_token", "p0")[1:])]
        if isinstance(answer, bytes):
            return Scripted(body=answer)
        return Scripted(body=json.dumps(answer).encode())


MakeTree = Callable[..., tuple[ScriptedServer, CatalogVolume]]


@pytest.fixture
def metastore() -> Iterator[MakeTree]:
    with ExitStack() as stack:

        def make(answers: dict[tuple[str, ...], Any]) -> tuple[ScriptedServer, CatalogVolume]:
            server = stack.enter_context(ScriptedServer(Metastore(answers)))
            credentials = Credentials(host=server.url, token=TOKEN)
            volume = CatalogVolume("/Volumes", credentials, OPTIONS)
            stack.callback(volume.close)
            return server, volume

        yield make


def objects(*named: str) -> list[dict[str, str]]:
    return [{"name": name} for name in named]


@pytest.mark.parametrize(
    ("key", "parents", "path"),
    [("catalogs", (), ""), ("schemas", ("c",), "c"), ("volumes", ("c", "s"), "c/s")],
)
def test_short_and_empty_pages_with_a_token_are_followed(
    metastore: MakeTree, key: str, parents: tuple[str, ...], path: str
) -> None:
    pages = [
        {key: objects("a", "d", "b"), "next_page_token": "p1"},
        {"next_page_token": "p2"},
        {key: objects("e", "c"), "next_page_token": ""},
    ]
    server, volume = metastore({(key, *parents): pages})
    assert names(volume, path) == ["a", "b", "c", "d", "e"]
    assert len(server.requests) == 3
    queries = [parse_qs(urlsplit(request.target).query) for request in server.requests]
    assert [query.get("page_token") for query in queries] == [None, ["p1"], ["p2"]]
    assert all(query["include_browse"] == ["true"] for query in queries)


def test_a_token_that_repeats_is_an_error_and_no_loop(metastore: MakeTree) -> None:
    pages = [
        {"catalogs": objects("a"), "next_page_token": "p1"},
        {"catalogs": objects("b"), "next_page_token": "p1"},
    ]
    server, volume = metastore({("catalogs",): pages})
    with pytest.raises(Unavailable, match="repeated a page token"):
        volume.list_page("")
    assert len(server.requests) == 2


def test_ten_thousand_volumes_come_in_pages_from_one_answer(metastore: MakeTree) -> None:
    expected = [f"v{number:05}" for number in range(10_000)]
    server, volume = metastore({("volumes", "c", "s"): {"volumes": objects(*expected)}})
    first = volume.list_page("c/s")
    assert len(first.entries) == 1000
    assert names(volume, "c/s") == expected
    assert volume.stat("c/s/v09999").is_directory
    assert len(server.requests) == 1


def test_a_schema_that_may_not_be_listed_leaves_the_others(metastore: MakeTree) -> None:
    _, volume = metastore(
        {
            ("catalogs",): {"catalogs": objects("locked", "open")},
            ("schemas", "locked"): 403,
            ("schemas", "open"): {"schemas": objects("information_schema", "s")},
            ("volumes", "open", "s"): {"volumes": objects("v")},
        }
    )
    assert names(volume) == ["locked", "open"]
    for call in (lambda: volume.list_page("locked"), lambda: volume.stat("locked/s")):
        with pytest.raises(PermissionDenied, match="HTTP 403"):
            call()
    assert names(volume, "open") == ["s"]
    assert names(volume, "open/s") == ["v"]
    with pytest.raises(NotFound, match="there is no schema information_schema"):
        volume.stat("open/information_schema")


def test_a_refusal_is_remembered_for_a_moment(metastore: MakeTree) -> None:
    server, volume = metastore({("schemas", "locked"): 403, ("schemas", "gone"): 404})
    for _ in range(3):
        with pytest.raises(PermissionDenied, match=r"^stat locked/a: "):
            volume.stat("locked/a")
        with pytest.raises(PermissionDenied, match=r"^list locked: "):
            volume.list_page("locked")
        with pytest.raises(NotFound, match=r"^stat gone/a: "):
            volume.stat("gone/a")
    assert len(server.requests) == 2


def test_what_may_only_be_browsed_is_not_listed_and_told_apart_from_missing(
    metastore: MakeTree,
) -> None:
    listed = [{"name": "mine", "updated_at": 1_700_000_000_123}]
    listed += [{"name": "theirs", "browse_only": True}]  # type: ignore[dict-item]
    _, volume = metastore({("catalogs",): {"catalogs": listed}})
    assert names(volume) == ["mine"]
    assert volume.stat("mine").mtime_ns == 1_700_000_000_123_000_000
    with pytest.raises(PermissionDenied, match="the catalog theirs may only be browsed"):
        volume.stat("theirs")
    with pytest.raises(NotFound):
        volume.stat("nobodys")


@pytest.mark.parametrize(
    "page",
    [b"<html>Sign in</html>", {"catalogs": "x"}, {"next_page_token": 3}],
)
def test_an_answer_that_is_no_list_never_looks_like_an_empty_one(
    metastore: MakeTree, page: Any
) -> None:
    _, volume = metastore({("catalogs",): page})
    with pytest.raises(Unavailable, match="the answer is no"):
        volume.list_page("")


def test_an_empty_object_is_an_empty_list(metastore: MakeTree) -> None:
    _, volume = metastore({("catalogs",): {}})
    assert names(volume) == []


def test_a_name_that_could_leave_the_tree_is_left_out(
    metastore: MakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    listed = [*objects("..", "a/b", "", "good", "x.y"), {"title": "no name"}, 3]
    _, volume = metastore({("catalogs",): {"catalogs": listed}})
    assert names(volume) == ["good"]
    assert len(caplog.records) == 6


def test_no_token_is_in_any_message(metastore: MakeTree) -> None:
    server, volume = metastore({("catalogs",): 403})
    with pytest.raises(VolumeError) as refused:
        volume.list_page("")
    assert TOKEN not in str(refused.value)
    assert TOKEN not in repr(volume)
    assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"


def test_chunks_work_in_a_tree_of_volumes(
    server: LocalServer, tree: CatalogVolume, tmp_path: Path
) -> None:
    volume = open_volume("/Volumes", host=server.url, token=TOKEN, chunk_above_bytes=1000)
    local = tmp_path / "local"
    local.write_bytes(b"x" * 2500)
    with local.open("rb") as source:
        volume.upload("second/s/v/big", source, 2500)
    assert content(volume, "second/s/v/big") == b"x" * 2500
    assert names(volume, "second/s/v") == ["big"]
    assert names(tree, "second/s/v") == ["big.chunks"]
    before = asked(server)
    for path in ("second", "second/s", "second/s/v"):
        assert volume.stat(path).is_directory
    assert asked(server) - before == 3
    with pytest.raises(NotFound, match=r"^put second/s/new: part 1: no volume can be called"):
        volume.put("second/s/new", b"1" * 2500)
    with pytest.raises(Unsupported, match="files are inside volumes"):
        volume.put("second/s/new", b"1")
    with pytest.raises(Unsupported, match="is made in Unity Catalog"):
        volume.make_directory("second/new")
    volume.close()
