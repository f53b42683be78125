"""What the databricks SDK promises to its users, as one program for every version of it.

`test_sdk_versions.py` runs it with the Python of a virtual environment that has one version of the
SDK and nothing of ours: `sdk_suite.py ROOT SCRATCH`. Each check is one line on stdout; the first
that fails ends it with a traceback.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
import sys
from typing import Any

from databricks.sdk import WorkspaceClient
from databricks.sdk.core import Config
from databricks.sdk.errors import AlreadyExists, DatabricksError, NotFound

MIB = 1 << 20
ODD_NAMES = [
    "a b",
    "a+b",
    "a%20b",
    "100%",
    "a#b",
    "a?b=c",
    "[x]",
    "lit%2Fslash",
    "café",
    "'\"<>|*;&",
]


class Pipe(io.RawIOBase):
    """Bytes that come once, with no size and no way back."""

    def __init__(self, content: bytes) -> None:
        self._rest = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        return self._rest.read(size)


def content(size: int) -> bytes:
    """Different in each megabyte, so that swapped parts are seen."""
    return b"".join(
        hashlib.sha256(b"%d" % index).digest() * (MIB // 32) for index in range(size // MIB + 1)
    )[:size]


def download(client: WorkspaceClient, path: str) -> bytes:
    response = client.files.download(path)
    assert response.contents is not None
    with response.contents as contents:
        return b"".join(iter(lambda: contents.read(4 * MIB), b""))


def expect(kind: type[Exception], function: Any, *args: Any, **options: Any) -> Any:
    try:
        function(*args, **options)
    except kind as error:
        return error
    raise AssertionError(f"{function} raised no {kind.__name__}")


def check_small_files(client: WorkspaceClient, root: str, scratch: pathlib.Path) -> None:
    for size in (0, 1, 100_000):
        client.files.upload(f"{root}/small/{size}", io.BytesIO(content(size)))
        assert download(client, f"{root}/small/{size}") == content(size)
        metadata = client.files.get_metadata(f"{root}/small/{size}")
        assert metadata.content_length == size
        assert metadata.last_modified.endswith(" GMT")
    client.files.upload(f"{root}/small/1", io.BytesIO(b"newer"), overwrite=True)
    assert download(client, f"{root}/small/1") == b"newer"
    client.files.delete(f"{root}/small/1")
    expect(NotFound, client.files.get_metadata, f"{root}/small/1")
    expect(NotFound, client.files.delete, f"{root}/small/1")


def check_overwrite_false(client: WorkspaceClient, root: str, scratch: pathlib.Path) -> None:
    client.files.upload(f"{root}/kept", io.BytesIO(b"first"), overwrite=False)
    expect(AlreadyExists, client.files.upload, f"{root}/kept", io.BytesIO(b"x"), overwrite=False)
    assert download(client, f"{root}/kept") == b"first"


def check_directories(client: WorkspaceClient, root: str, scratch: pathlib.Path) -> None:
    client.files.create_directory(f"{root}/d/e/f")
    client.files.create_directory(f"{root}/d/e/f")
    client.files.get_directory_metadata(f"{root}/d/e/f")
    refusal = expect(DatabricksError, client.files.delete_directory, f"{root}/d")
    assert refusal.error_code == "INVALID_PARAMETER_VALUE"
    reasons = [detail.reason for detail in refusal.get_error_info()]
    assert reasons == ["FILES_API_DIRECTORY_IS_NOT_EMPTY"], reasons
    for path in (f"{root}/d/e/f", f"{root}/d/e", f"{root}/d"):
        client.files.delete_directory(path)
    missing = expect(NotFound, client.files.delete_directory, f"{root}/d")
    reasons = [detail.reason for detail in missing.get_error_info()]
    assert reasons == ["FILES_API_DIRECTORY_IS_NOT_FOUND"], reasons
    expect(NotFound, client.files.get_directory_metadata, f"{root}/d")


def check_listing(client: WorkspaceClient, root: str, scratch: pathlib.Path) -> None:
    """The test has put 2,500 empty files into `many`."""
    for options in ({}, {"page_size": 700}):
        entries = list(client.files.list_directory_contents(f"{root}/many", **options))
        names = sorted(entry.name or "" for entry in entries)
        assert names == sorted(f"entry-{index}" for index in range(2500))
        assert {entry.file_size for entry in entries} == {0}
        assert not any(entry.is_directory for entry in entries)


def check_odd_names(client: WorkspaceClient, root: str, scratch: pathlib.Path) -> None:
    for name in ODD_NAMES:
        client.files.upload(f"{root}/odd/{name}", io.BytesIO(name.encode()))
    listed = [entry.name for entry in client.files.list_directory_contents(f"{root}/odd")]
    assert sorted(filter(None, listed)) == sorted(ODD_NAMES), listed
    for name in ODD_NAMES:
        assert download(client, f"{root}/odd/{name}") == name.encode()
        client.files.delete(f"{root}/odd/{name}")
    assert list(client.files.list_directory_contents(f"{root}/odd")) == []


def check_large_files(client: WorkspaceClient, root: str, scratch: pathlib.Path) -> None:
    source, back = scratch / "source", scratch / "back"
    source.write_bytes(content(60 * MIB))
    for parallel in (True, False):
        options = {"use_parallel": parallel}
        client.files.upload_from(f"{root}/large-{parallel}", str(source), **options)
        client.files.download_to(f"{root}/large-{parallel}", str(back), **options)
        assert back.read_bytes() == source.read_bytes()
    error = expect(
        AlreadyExists, client.files.upload_from, f"{root}/large-True", str(source), overwrite=False
    )
    assert error is not None
    assert download(client, f"{root}/large-True") == source.read_bytes()


def check_streams(client: WorkspaceClient, root: str, scratch: pathlib.Path) -> None:
    for size in (MIB, 55 * MIB):
        client.files.upload(f"{root}/streamed", Pipe(content(size)), overwrite=True)
        assert download(client, f"{root}/streamed") == content(size)
    client.files.upload(f"{root}/sequential", Pipe(content(55 * MIB)), use_parallel=False)
    assert download(client, f"{root}/sequential") == content(55 * MIB)


def main() -> int:
    root, scratch = sys.argv[1], pathlib.Path(sys.argv[2])
    config = Config(retry_timeout_seconds=60)
    client = WorkspaceClient(config=config)
    checks = [check_small_files, check_directories, check_listing, check_odd_names]
    checks += [check_overwrite_false]
    if hasattr(client.files, "upload_from"):
        checks += [check_large_files, check_streams]
    only = os.environ.get("SDK_SUITE_CHECKS")
    for check in checks:
        if only is None or check.__name__ in only.split(","):
            check(client, root, scratch)
            print(check.__name__, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
