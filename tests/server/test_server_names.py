"""Names: eight that are easily encoded twice, those that a disk folds, and links swapped in."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import urllib3

from trainmount_files.server import LocalServer, ServerSettings
from trainmount_files.server.errors import ApiError
from trainmount_files.server.folding import Folding
from trainmount_files.server.paths import parse_volume_path
from trainmount_files.server.staging import Staging
from trainmount_files.server.store import DirectoryStore

TOKEN = "dapi-token-of-the-tests"
ROOT = "/Volumes/main/default/data"
FILES = f"/api/2.0/fs/files{ROOT}"
DIRECTORIES = f"/api/2.0/fs/directories{ROOT}"
VOLUME = "main/default/data"
NAMES = ["a b", "a+b", "a%20b", "100%", "a#b", "a?b=c", "[x]", "lit%2Fslash"]
COMPOSED, DECOMPOSED = "caf\u00e9.txt", "cafe\u0301.txt"

Http = Callable[..., urllib3.BaseHTTPResponse]


def test_eight_names_are_eight_files_by_every_verb(http: Http, served: Path) -> None:
    for name in NAMES:
        encoded = quote(name, safe="")
        assert http("PUT", f"{FILES}/{encoded}", body=name.encode()).status == 204
    listed = http("GET", DIRECTORIES).json()["contents"]
    assert {entry["name"] for entry in listed} == set(NAMES)
    assert {entry["path"] for entry in listed} == {f"{ROOT}/{name}" for name in NAMES}
    assert {path.name for path in (served / VOLUME).iterdir()} == set(NAMES)
    for name in NAMES:
        encoded = quote(name, safe="")
        assert http("GET", f"{FILES}/{encoded}").data == name.encode()
        assert http("HEAD", f"{FILES}/{encoded}").headers["Content-Length"] == str(len(name))
        query = quote(f"{ROOT}/{name}", safe="")
        url = http("POST", f"/api/2.0/fs/create-download-url?path={query}").json()["url"]
        assert http("GET", url).data == name.encode()
        assert http("DELETE", f"{FILES}/{encoded}").status == 204
    assert http("GET", DIRECTORIES).json()["contents"] == []


def test_two_spellings_of_one_word_are_two_files(http: Http, served: Path) -> None:
    for name in (COMPOSED, DECOMPOSED):
        http("PUT", f"{FILES}/{quote(name)}", body=name.encode())

    for name in (COMPOSED, DECOMPOSED):
        assert http("GET", f"{FILES}/{quote(name)}").data == name.encode()
    names = {os.fsencode(path.name) for path in (served / VOLUME).iterdir()}
    assert names == {COMPOSED.encode(), DECOMPOSED.encode()}


def folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


@pytest.fixture
def folding_store(tmp_path: Path) -> Iterator[DirectoryStore]:
    """Over a disk that finds a name by any spelling of it. What it would do with a file is not
    imitated: the store must not let it come to that.
    """

    def lookup(directory_fd: int, name: str) -> bool:
        return folded(name) in {folded(other) for other in os.listdir(directory_fd)}

    staging = Staging(tmp_path, fsync=False)
    folding = Folding(everywhere=True, lookup=lookup)
    store = DirectoryStore(tmp_path, staging, folding=folding)
    store.create_volume("main.default.data")
    yield store
    store.close()
    staging.close()


def put(store: DirectoryStore, tmp_path: Path, name: str, *, overwrite: bool = True) -> None:
    staging = Staging(tmp_path, fsync=False)
    with staging.temporary() as temporary:
        os.write(temporary.fd, name.encode())
        store.publish(temporary, parse_volume_path(f"{ROOT}/{name}"), overwrite=overwrite)
    staging.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [(COMPOSED, DECOMPOSED), ("file", "FILE"), ("Dir/a", "dir/b"), ("dir", "Dir")],
)
def test_a_disk_that_folds_names_refuses_the_second_spelling(
    folding_store: DirectoryStore, tmp_path: Path, first: str, second: str
) -> None:
    put(folding_store, tmp_path, first)
    put(folding_store, tmp_path, first)

    for overwrite in (True, False):
        with pytest.raises(ApiError) as refused:
            put(folding_store, tmp_path, second, overwrite=overwrite)
        assert (refused.value.status, refused.value.code) == (400, "INVALID_PARAMETER_VALUE")
        assert f"{ROOT}/{second}" in refused.value.message
    with pytest.raises(ApiError, match="not found"):
        folding_store.delete_file(parse_volume_path(f"{ROOT}/{second}"))
    with pytest.raises(ApiError, match="cannot hold this name"):
        folding_store.make_directory(parse_volume_path(f"{ROOT}/{second}"))
    assert (tmp_path / VOLUME / first).read_text() == first


def test_a_disk_that_keeps_names_apart_is_found_to(tmp_path: Path) -> None:
    assert Folding.probe(tmp_path)._everywhere is False
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_is_swapped_in_during_requests_leads_nowhere(
    http: Http, served: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("secret")
    volume = served / VOLUME
    (volume / "inside").mkdir()
    (volume / "inside/file").write_text("inside")
    place = volume / "swapped"
    (volume / "inside").rename(place)
    is_over = threading.Event()

    def swap() -> None:
        for index in itertools.count():
            if is_over.is_set():
                return
            # Requests make the directory anew, so each step may find another thing there.
            with contextlib.suppress(OSError):
                place.rename(volume / f"away-{index}")
            with contextlib.suppress(OSError):
                place.symlink_to(outside)
            with contextlib.suppress(OSError):
                place.unlink()

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = set()
    try:
        for index in range(60):
            body = http("GET", f"{FILES}/swapped/file").data
            assert b"secret" not in body
            listing = http("GET", f"{DIRECTORIES}/swapped")
            seen.add(listing.status)
            http("PUT", f"{FILES}/swapped/new-{index % 3}", body=b"mine")
            http("PUT", f"{DIRECTORIES}/swapped/directory")
            http("DELETE", f"{FILES}/swapped/file")
            if listing.status == 200:
                http("PUT", f"{FILES}/swapped/file", body=b"inside")
    finally:
        is_over.set()
        swapper.join()
    assert seen <= {200, 404}
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "secret"


def test_a_file_below_a_file_is_an_error_with_a_code(http: Http) -> None:
    http("PUT", f"{FILES}/p", body=b"file")

    for answer in (
        http("PUT", f"{FILES}/p/f", body=b"x"),
        http("PUT", f"{FILES}/p/f?overwrite=false", body=b"x"),
        http("PUT", f"{DIRECTORIES}/p/d"),
    ):
        assert answer.status in (400, 409)
        assert answer.json()["error_code"] in ("INVALID_PARAMETER_VALUE", "ALREADY_EXISTS")
    assert http("GET", f"{FILES}/p").data == b"file"


@pytest.fixture
def implicit(served: Path) -> Iterator[LocalServer]:
    settings = ServerSettings(
        directory=served,
        token=TOKEN,
        volumes=("main.default.data",),
        implicit_directories=True,
        fsync=False,
    )
    with LocalServer(settings) as server:
        yield server


def test_a_directory_that_came_with_a_file_goes_with_the_last_one(
    implicit: LocalServer, served: Path
) -> None:
    with urllib3.PoolManager(retries=False) as pool:

        def ask(method: str, target: str) -> int:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            return pool.request(method, implicit.url + target, headers=headers).status

        for name in ("a/b/one", "a/b/two", "made/c/one"):
            assert ask("PUT", f"{FILES}/{name}") == 204
        assert ask("PUT", f"{DIRECTORIES}/made") == 204
        assert ask("DELETE", f"{FILES}/a/b/one") == 204
        assert ask("HEAD", f"{DIRECTORIES}/a/b") == 200
        assert ask("DELETE", f"{FILES}/a/b/two") == 204
        assert ask("HEAD", f"{DIRECTORIES}/a/b") == 404
        assert ask("DELETE", f"{DIRECTORIES}/a") == 404
        # One that was made by name stays, and so does the volume.
        assert ask("DELETE", f"{FILES}/made/c/one") == 204
        assert ask("HEAD", f"{DIRECTORIES}/made/c") == 404
        assert ask("HEAD", f"{DIRECTORIES}/made") == 200
        assert ask("DELETE", f"{DIRECTORIES}/made") == 204
    assert (served / VOLUME).is_dir()
    assert list((served / VOLUME).iterdir()) == []
