"""Discovery of endpoints and HTTPS, by the unmodified SDK."""

from __future__ import annotations

import io
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
import urllib3
from databricks.sdk import WorkspaceClient
from databricks.sdk.core import Config
from databricks.sdk.errors import AlreadyExists

from trainmount_files.server import LocalServer, ServerSettings
from trainmount_files.server.embedded import StartError

TOKEN = "dapi-token-of-the-tests"
ROOT = "/Volumes/main/default/data"
MIB = 1 << 20

Http = Callable[..., urllib3.BaseHTTPResponse]


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def settings(served: Path, tmp_path: Path, authority: trustme.CA) -> ServerSettings:
    """Of a server with a certificate."""
    pair = authority.issue_cert("localhost", "127.0.0.1")
    for index, blob in enumerate(pair.cert_chain_pems):
        blob.write_to_path(tmp_path / "cert.pem", append=bool(index))
    pair.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return ServerSettings(
        directory=served,
        token=TOKEN,
        volumes=("main.default.data",),
        tls_certificate=tmp_path / "cert.pem",
        tls_key=tmp_path / "key.pem",
        fsync=False,
    )


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))


def discovering_client(url: str) -> WorkspaceClient:
    config = Config(host=url, token=TOKEN, retry_timeout_seconds=10)
    config.experimental_files_ext_enable_endpoints_api = True
    config.files_ext_multipart_upload_min_stream_size = 6 * MIB
    config.files_ext_multipart_upload_part_size_options = [5 * MIB]
    config.files_ext_multipart_upload_default_part_size = 5 * MIB
    config.files_ext_parallel_download_min_file_size = 1 * MIB
    config.files_ext_parallel_download_default_part_size = 1 * MIB
    return WorkspaceClient(config=config)


def move_there_and_back(client: WorkspaceClient, folder: Path) -> None:
    """Small, large and unsized files, up, listed and down."""
    large = bytes(range(256)) * 4096 * 13
    (folder / "source").write_bytes(large)
    client.files.upload(f"{ROOT}/small", io.BytesIO(b"content"))
    client.files.upload_from(f"{ROOT}/large", str(folder / "source"))
    with pytest.raises(AlreadyExists):
        client.files.upload_from(f"{ROOT}/large", str(folder / "source"), overwrite=False)
    with pytest.raises(AlreadyExists):
        client.files.upload(f"{ROOT}/small", io.BytesIO(b"other"), overwrite=False)
    response = client.files.download(f"{ROOT}/small")
    assert response.contents is not None
    assert response.contents.read(100) == b"content"
    for parallel in (True, False):
        client.files.download_to(f"{ROOT}/large", str(folder / "back"), use_parallel=parallel)
        assert (folder / "back").read_bytes() == large


def requests(server: LocalServer) -> dict[str, int]:
    counts = server.statistics()["requests"]
    assert isinstance(counts, dict)
    return counts


def test_the_endpoints_are_those_that_a_client_may_use(http: Http, server: LocalServer) -> None:
    answer = http("GET", "/api/2.0/fs/endpoints").json()

    shared = {
        "scheme": "http",
        "hostname": server.url.removeprefix("http://"),
        "multipart_upload_supported": True,
    }
    assert answer["endpoints"] == [
        {"api": "IO_OFFLOAD", "api_version": None, **shared},
        {"api": "FILES_API", "api_version": "2.0", **shared},
    ]


def test_files_api_2_takes_parts_where_a_client_is_told_so(
    settings: ServerSettings, tmp_path: Path
) -> None:
    plain = replace(settings, tls_certificate=None, tls_key=None, endpoints=("files-2.0",))
    with LocalServer(plain) as server:
        move_there_and_back(discovering_client(server.url), tmp_path)

        counts = requests(server)
        assert counts["list_endpoints"] == 1
        assert counts["put_part"] == 3
        assert "presigned_put" not in counts
        assert "create_download_url" not in counts


@pytest.mark.usefixtures("trusted")
def test_files_api_3_is_used_over_https_where_a_client_is_told_so(
    settings: ServerSettings, tmp_path: Path
) -> None:
    with LocalServer(replace(settings, endpoints=("files-3.0",))) as server:
        assert server.url.startswith("https://127.0.0.1:")
        move_there_and_back(discovering_client(server.url), tmp_path)

        counts = requests(server)
        assert counts["put_part"] == 3
        assert "presigned_put" not in counts


@pytest.mark.usefixtures("trusted")
def test_signed_urls_of_a_server_with_a_certificate_are_https_too(
    settings: ServerSettings, tmp_path: Path
) -> None:
    with LocalServer(settings) as server:
        move_there_and_back(discovering_client(server.url), tmp_path)

        counts = requests(server)
        assert counts["presigned_put"] == 3
        assert counts["presigned_get"] > 10


def test_a_server_with_a_certificate_speaks_no_plain_http(settings: ServerSettings) -> None:
    with LocalServer(settings) as server, urllib3.PoolManager(retries=False) as pool:
        with pytest.raises(urllib3.exceptions.ProtocolError):
            pool.request("GET", server.url.replace("https", "http"))
        with pytest.raises(urllib3.exceptions.SSLError):
            pool.request("GET", server.url)


@pytest.fixture
def broken(settings: ServerSettings) -> ServerSettings:
    assert settings.tls_key is not None
    settings.tls_key.write_text("no key")
    return settings


def test_a_key_that_is_none_is_one_line(broken: ServerSettings) -> None:
    with pytest.raises(StartError, match=r"cert\.pem and .*key\.pem are no certificate and key"):
        LocalServer(broken).__enter__()
    with pytest.raises(ssl.SSLError):
        ssl.create_default_context().load_cert_chain(
            str(broken.tls_certificate), str(broken.tls_key)
        )
