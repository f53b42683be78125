"""What the databricks command line's `fs` commands do on the wire, by its documented behaviour.

The program itself is not run, since its licence is for use with the service alone: each test sends
what one command sends, in that order, and looks for the answers by which the command tells its
cases apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import urllib3

from trainmount_files.server import LocalServer, ServerSettings

TOKEN = "dapi-token-of-the-tests"
ROOT = "/Volumes/main/default/data"

Ask = Callable[..., urllib3.BaseHTTPResponse]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """`ask(method, kind, path, …)` for `kind` of `files` and `directories`."""
    settings = ServerSettings(
        directory=tmp_path, token=TOKEN, volumes=("main.default.data",), fsync=False
    )
    with LocalServer(settings) as server, urllib3.PoolManager(retries=False) as pool:

        def call(
            method: str, kind: str, path: str, query: str = "", **options: Any
        ) -> urllib3.BaseHTTPResponse:
            url = f"{server.url}/api/2.0/fs/{kind}{quote(path)}{query}"
            headers = {"Authorization": f"Bearer {TOKEN}"}
            return pool.request(method, url, headers=headers, **options)

        yield call


def names(ask: Ask, path: str) -> list[tuple[str, bool]]:
    listing = ask("GET", "directories", path)
    assert listing.status == 200
    return [(entry["name"], entry["is_directory"]) for entry in listing.json()["contents"]]


def reason(answer: urllib3.BaseHTTPResponse) -> tuple[int, str, str]:
    error = answer.json()
    return answer.status, error["error_code"], error["details"][0]["reason"]


def copy(ask: Ask, path: str, body: bytes, *, overwrite: bool) -> urllib3.BaseHTTPResponse:
    """`fs cp FILE dbfs:PATH`: the parent must be there, which the API itself would not ask for."""
    parent = path.rpartition("/")[0]
    answer = ask("HEAD", "directories", parent)
    if answer.status != 200:
        return answer
    return ask("PUT", "files", path, f"?overwrite={str(overwrite).lower()}", body=body)


def remove_recursively(ask: Ask, path: str) -> None:
    """`fs rm -r`: files first, then directories from below."""
    for name, is_directory in names(ask, path):
        if is_directory:
            remove_recursively(ask, f"{path}/{name}")
        else:
            assert ask("DELETE", "files", f"{path}/{name}").status == 204
    assert ask("DELETE", "directories", path).status == 204


def test_cp_refuses_a_missing_parent_and_what_is_there_unless_told_otherwise(ask: Ask) -> None:
    assert copy(ask, f"{ROOT}/none/file", b"x", overwrite=False).status == 404
    assert copy(ask, f"{ROOT}/file", b"first", overwrite=False).status == 204
    refused = copy(ask, f"{ROOT}/file", b"second", overwrite=False)
    assert (refused.status, refused.json()["error_code"]) == (409, "ALREADY_EXISTS")
    assert copy(ask, f"{ROOT}/file", b"third", overwrite=True).status == 204
    assert ask("GET", "files", f"{ROOT}/file").data == b"third"


def test_cp_into_a_directory_finds_out_that_it_is_one(ask: Ask) -> None:
    ask("PUT", "directories", f"{ROOT}/folder")
    copy(ask, f"{ROOT}/file", b"x", overwrite=False)

    assert ask("HEAD", "directories", f"{ROOT}/folder").status == 200
    assert ask("HEAD", "directories", f"{ROOT}/folder/").status == 200
    assert ask("HEAD", "directories", f"{ROOT}/file").status == 404
    assert ask("HEAD", "files", f"{ROOT}/file").status == 200
    assert ask("HEAD", "files", f"{ROOT}/folder").status == 404
    answer = ask("PUT", "files", f"{ROOT}/folder", "?overwrite=true", body=b"x")
    assert reason(answer) == (400, "INVALID_PARAMETER_VALUE", "FILES_API_PATH_IS_DIRECTORY")


def test_cp_r_makes_each_directory_and_then_its_files(ask: Ask) -> None:
    tree = {"a b/one": b"1", "a b/c%d/two": b"2", "three": b"3"}
    for name, body in tree.items():
        parent = f"{ROOT}/copied/{name}".rpartition("/")[0]
        assert ask("PUT", "directories", parent).status == 204
        assert copy(ask, f"{ROOT}/copied/{name}", body, overwrite=False).status == 204

    assert names(ask, f"{ROOT}/copied") == [("a b", True), ("three", False)]
    assert names(ask, f"{ROOT}/copied/a b") == [("c%d", True), ("one", False)]
    for name, body in tree.items():
        assert ask("GET", "files", f"{ROOT}/copied/{name}").data == body


def test_ls_tells_sizes_and_milliseconds_and_refuses_a_file(ask: Ask) -> None:
    copy(ask, f"{ROOT}/file", b"12345", overwrite=False)

    (entry,) = ask("GET", "directories", ROOT).json()["contents"]

    assert entry["path"] == f"{ROOT}/file"
    assert (entry["file_size"], entry["is_directory"]) == (5, False)
    assert entry["last_modified"] > 1_500_000_000_000
    for path in (f"{ROOT}/file", f"{ROOT}/none", "/Volumes/main/default/none"):
        answer = ask("GET", "directories", path)
        assert reason(answer) == (404, "NOT_FOUND", "FILES_API_DIRECTORY_IS_NOT_FOUND")


def test_mkdir_makes_parents_again_and_again_but_not_over_a_file(ask: Ask) -> None:
    assert ask("PUT", "directories", f"{ROOT}/a/b/c").status == 204
    assert ask("PUT", "directories", f"{ROOT}/a/b/c").status == 204
    copy(ask, f"{ROOT}/a/file", b"x", overwrite=False)
    assert ask("PUT", "directories", f"{ROOT}/a/file").status == 409


def test_rm_takes_a_file_an_empty_directory_and_with_r_a_tree(ask: Ask) -> None:
    ask("PUT", "directories", f"{ROOT}/tree/empty")
    copy(ask, f"{ROOT}/tree/file", b"x", overwrite=False)

    answer = ask("DELETE", "directories", f"{ROOT}/tree")
    assert reason(answer) == (400, "INVALID_PARAMETER_VALUE", "FILES_API_DIRECTORY_IS_NOT_EMPTY")
    remove_recursively(ask, f"{ROOT}/tree")
    answer = ask("DELETE", "directories", f"{ROOT}/tree")
    assert reason(answer) == (404, "NOT_FOUND", "FILES_API_DIRECTORY_IS_NOT_FOUND")
    answer = ask("DELETE", "files", f"{ROOT}/tree/file")
    assert reason(answer) == (404, "NOT_FOUND", "FILES_API_FILE_NOT_FOUND")
    assert names(ask, ROOT) == []


def test_cat_gets_the_file_and_a_missing_one_is_told(ask: Ask) -> None:
    copy(ask, f"{ROOT}/file", b"content", overwrite=False)

    assert ask("GET", "files", f"{ROOT}/file").data == b"content"
    answer = ask("GET", "files", f"{ROOT}/none")
    assert reason(answer) == (404, "NOT_FOUND", "FILES_API_FILE_NOT_FOUND")
