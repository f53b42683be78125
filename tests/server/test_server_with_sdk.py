"""The unmodified Databricks SDK against the server: what it promises to its users holds."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import (
    AlreadyExists,
    BadRequest,
    InvalidParameterValue,
    NotFound,
    Unauthenticated,
)

from trainmount_files.server import LocalServer
from trainmount_files.server.faults import Fault

TOKEN = "dapi-token-of-the-tests"
ROOT = "/Volumes/main/default/data"
MIB = 1 << 20


def pattern(size: int) -> bytes:
    block = bytes(range(256)) * 4096
    whole = (block * (size // len(block) + 1))[:size]
    return hashlib.sha256(str(size).encode()).digest() + whole[32:]


def download(client: WorkspaceClient, path: str) -> bytes:
    response = client.files.download(path)
    assert response.contents is not None
    with response.contents as contents:
        return b"".join(iter(lambda: contents.read(MIB), b""))


@pytest.mark.parametrize("size", [0, 1, 300_000, 5 * MIB])
def test_a_small_file_comes_back_as_it_went(client: WorkspaceClient, size: int) -> None:
    client.files.upload(f"{ROOT}/some/where/file.bin", io.BytesIO(pattern(size)[:size]))

    assert download(client, f"{ROOT}/some/where/file.bin") == pattern(size)[:size]
    assert client.files.get_metadata(f"{ROOT}/some/where/file.bin").content_length == size


@pytest.mark.parametrize("parallel", [True, False])
def test_a_large_file_goes_up_in_parts_and_comes_down_in_ranges(
    client: WorkspaceClient, server: LocalServer, tmp_path: Path, parallel: bool
) -> None:
    source = tmp_path / "source"
    source.write_bytes(pattern(17 * MIB + 123))

    client.files.upload_from(f"{ROOT}/large", str(source), use_parallel=parallel)
    client.files.download_to(f"{ROOT}/large", str(tmp_path / "back"), use_parallel=parallel)

    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    requests = server.statistics()["requests"]
    assert requests["presigned_put"] == 4
    assert "put_file" not in requests
    assert server.statistics()["staged_bytes"] == 0


def test_a_stream_of_unknown_size_becomes_one_file(client: WorkspaceClient) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    client.files.upload(f"{ROOT}/streamed", Pipe(pattern(12 * MIB)))

    assert download(client, f"{ROOT}/streamed") == pattern(12 * MIB)


@pytest.mark.parametrize("size", [10, 12 * MIB])
def test_overwrite_false_keeps_what_is_there(client: WorkspaceClient, size: int) -> None:
    client.files.upload(f"{ROOT}/kept", io.BytesIO(b"first"))

    with pytest.raises(AlreadyExists):
        client.files.upload(f"{ROOT}/kept", io.BytesIO(bytes(size)), overwrite=False)

    assert download(client, f"{ROOT}/kept") == b"first"
    client.files.upload(f"{ROOT}/kept", io.BytesIO(b"second"), overwrite=True)
    assert download(client, f"{ROOT}/kept") == b"second"


def test_what_is_missing_is_not_found(client: WorkspaceClient) -> None:
    with pytest.raises(NotFound):
        client.files.download(f"{ROOT}/nothing")
    with pytest.raises(NotFound):
        client.files.get_metadata(f"{ROOT}/nothing")
    with pytest.raises(NotFound):
        client.files.delete(f"{ROOT}/nothing")
    with pytest.raises(NotFound):
        list(client.files.list_directory_contents(f"{ROOT}/nothing"))
    with pytest.raises(NotFound, match=r"main\.default\.other"):
        client.files.upload("/Volumes/main/default/other/file", io.BytesIO(b"x"))


def test_directories_are_made_listed_and_removed(client: WorkspaceClient) -> None:
    client.files.create_directory(f"{ROOT}/a/b")
    client.files.create_directory(f"{ROOT}/a/b")
    client.files.upload(f"{ROOT}/a/file", io.BytesIO(b"12345"))

    entries = {entry.name: entry for entry in client.files.list_directory_contents(f"{ROOT}/a")}

    assert set(entries) == {"b", "file"}
    assert entries["b"].is_directory
    assert entries["file"].file_size == 5
    assert entries["file"].last_modified is not None
    assert entries["file"].last_modified > 1_500_000_000_000  # milliseconds
    with pytest.raises(InvalidParameterValue) as refusal:
        client.files.delete_directory(f"{ROOT}/a")
    reasons = [detail.reason for detail in refusal.value.get_error_info()]
    assert reasons == ["FILES_API_DIRECTORY_IS_NOT_EMPTY"]
    client.files.delete_directory(f"{ROOT}/a/b")
    with pytest.raises(NotFound):
        client.files.get_directory_metadata(f"{ROOT}/a/b")
    client.files.get_directory_metadata(f"{ROOT}/a/")


def test_2500_entries_come_in_three_pages_each_once(
    client: WorkspaceClient, server: LocalServer, served: Path
) -> None:
    folder = served / "main/default/data/many"
    folder.mkdir()
    for index in range(2500):
        (folder / f"{index}").touch()

    names = [entry.name for entry in client.files.list_directory_contents(f"{ROOT}/many")]

    assert sorted(names) == sorted(str(index) for index in range(2500))
    assert server.statistics()["requests"]["list_directory"] == 3


ODD_NAMES = ["a b", "a+b", "a%20b", "100%", "a#b", "a?b=c", "[x]", "lit%2Fslash", "tab\tnew\nline"]
ODD_NAMES += ["café", "cafe\u0301", "'\"\\<>|*;&"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_encoded_and_decoded_once(client: WorkspaceClient, name: str) -> None:
    client.files.upload(f"{ROOT}/odd/{name}", io.BytesIO(name.encode()))

    assert [entry.name for entry in client.files.list_directory_contents(f"{ROOT}/odd")] == [name]
    assert download(client, f"{ROOT}/odd/{name}") == name.encode()
    client.files.delete(f"{ROOT}/odd/{name}")
    assert list(client.files.list_directory_contents(f"{ROOT}/odd")) == []


def test_a_wrong_token_is_unauthenticated(server: LocalServer, client: WorkspaceClient) -> None:
    wrong = WorkspaceClient(host=server.url, token="wrong")

    with pytest.raises(Unauthenticated):
        list(wrong.files.list_directory_contents(ROOT))


def test_catalogs_schemas_and_volumes_are_listed(client: WorkspaceClient, served: Path) -> None:
    (served / "main/other/second").mkdir(parents=True)

    assert [catalog.name for catalog in client.catalogs.list()] == ["main"]
    assert [schema.name for schema in client.schemas.list("main")] == ["default", "other"]
    assert [volume.name for volume in client.volumes.list("main", "other")] == ["second"]
    assert client.volumes.read("main.default.data").full_name == "main.default.data"
    with pytest.raises(NotFound):
        client.volumes.read("main.default.missing")
    with pytest.raises(NotFound):
        list(client.schemas.list("missing"))


def test_a_file_below_a_file_is_refused(client: WorkspaceClient) -> None:
    client.files.upload(f"{ROOT}/p", io.BytesIO(b"file"))

    with pytest.raises(BadRequest):
        client.files.upload(f"{ROOT}/p/f", io.BytesIO(b"x"))
    with pytest.raises(AlreadyExists):
        client.files.create_directory(f"{ROOT}/p")


def test_the_sdk_resumes_a_download_that_is_cut(
    client: WorkspaceClient, server: LocalServer
) -> None:
    client.files.upload(f"{ROOT}/cut", io.BytesIO(pattern(5 * MIB)))
    server.inject(Fault(route="presigned_get", count=1, cut_after_bytes=3 * MIB))

    assert download(client, f"{ROOT}/cut") == pattern(5 * MIB)
    assert server.statistics()["requests"]["presigned_get"] == 2


def test_the_sdk_retries_what_is_unavailable_for_a_moment(
    client: WorkspaceClient, server: LocalServer
) -> None:
    server.inject(Fault(route="put_file", count=1, status=503, retry_after="1"))

    client.files.upload(f"{ROOT}/retried", io.BytesIO(b"content"))

    assert download(client, f"{ROOT}/retried") == b"content"


def test_the_sdk_asks_for_another_url_when_one_has_expired(
    client: WorkspaceClient, server: LocalServer
) -> None:
    server.inject(Fault(route="presigned_put", count=1, expired_url=True))

    client.files.upload(f"{ROOT}/late", io.BytesIO(pattern(12 * MIB)))

    assert download(client, f"{ROOT}/late") == pattern(12 * MIB)
    assert "put_file" not in server.statistics()["requests"]
