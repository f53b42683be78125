"""What dead writers and old uploads leave, and several servers over one directory."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import urllib3

from trainmount_files.server import LocalServer, ServerSettings
from trainmount_files.server.errors import ApiError
from trainmount_files.server.paths import parse_volume_path
from trainmount_files.server.presigned import Signer
from trainmount_files.server.staging import Staging
from trainmount_files.server.store import DirectoryStore
from trainmount_files.server.uploads import UploadFolders

TOKEN = "dapi-token-of-the-tests"


def test_a_sweep_takes_the_files_of_dead_servers_and_leaves_those_of_living_ones(
    tmp_path: Path,
) -> None:
    staging = Staging(tmp_path, fsync=False)
    folder = tmp_path / ".trainmount/temporary"
    dead, half_made = folder / "dead", folder / "half-made.new"
    for other in (dead, half_made):
        other.mkdir()
        (other / "lock").touch()
    (dead / "file").write_bytes(bytes(100))
    other = Staging(tmp_path, fsync=False)
    with staging.temporary() as living, other.temporary() as living_too:
        assert staging.staged_bytes() == 100

        assert staging.sweep() == 1

        assert staging.staged_bytes() == 0
        names = {path.name for path in folder.rglob("*")} - {"lock"}
        assert {living.name, living_too.name, "half-made.new"} < names
        assert "dead" not in names
    other.close()
    staging.close()
    assert [path.name for path in folder.iterdir()] == ["half-made.new"]


def test_an_upload_that_is_too_old_is_gone(tmp_path: Path) -> None:
    staging = Staging(tmp_path, fsync=False)
    store = DirectoryStore(tmp_path, staging)
    store.create_volume("c.s.v")
    uploads = UploadFolders(store, staging, Signer(staging.read_secret()), lifetime_seconds=100)
    path = parse_volume_path("/Volumes/c/s/v/f")
    token = uploads.initiate(path, overwrite=True)
    uploads.require_open(token, path, None)
    (folder,) = staging.uploads.iterdir()
    (folder / "00001-part").write_bytes(bytes(100))
    old = time.time() - 101
    os.utime(folder, (old, old))

    with pytest.raises(ApiError, match="not found") as refused:
        uploads.require_open(token, path, None)
    assert refused.value.status == 404
    assert uploads.sweep() == 1
    assert list(staging.uploads.iterdir()) == []
    store.close()
    staging.close()


def test_a_sweep_takes_what_a_killed_server_left_of_uploads_and_no_answer(tmp_path: Path) -> None:
    staging = Staging(tmp_path, fsync=False)
    store = DirectoryStore(tmp_path, staging)
    store.create_volume("c.s.v")
    uploads = UploadFolders(store, staging, Signer(staging.read_secret()), lifetime_seconds=100)
    (staging.uploads / "0123.4567.old").mkdir()
    uploads.initiate(parse_volume_path("/Volumes/c/s/v/f"), overwrite=True)
    (complete,) = (folder for folder in staging.uploads.iterdir() if not folder.suffix)
    (complete / "complete.json").write_text('{"etag": "x"}')
    (complete / "00001-part").write_bytes(bytes(100))

    uploads.sweep()

    assert [folder.name for folder in staging.uploads.iterdir()] == [complete.name]
    left = sorted(file.name for file in complete.iterdir())
    assert left == ["complete.json", "upload.json"]
    store.close()
    staging.close()


def test_exclusive_writers_to_two_servers_of_one_directory_have_one_winner(served: Path) -> None:
    settings = ServerSettings(directory=served, token=TOKEN, volumes=("c.s.v",), fsync=False)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        LocalServer(settings) as one,
        LocalServer(settings) as other,
        ThreadPoolExecutor(16) as pool,
        urllib3.PoolManager(retries=False, maxsize=16) as http,
    ):

        def write(number: int, index: int) -> int:
            server = one if number % 2 else other
            url = f"{server.url}/api/2.0/fs/files/Volumes/c/s/v/{index}?overwrite=false"
            return http.request("PUT", url, headers=headers, body=b"%d" % number).status

        for index in range(20):
            statuses = list(pool.map(write, range(16), [index] * 16))
            assert sorted(statuses) == [204] + [409] * 15
            winner = (served / "c/s/v" / str(index)).read_bytes()
            assert winner == b"%d" % statuses.index(204)


def test_a_url_of_one_server_is_good_at_another_of_its_directory(served: Path) -> None:
    settings = ServerSettings(directory=served, token=TOKEN, volumes=("c.s.v",), fsync=False)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        LocalServer(settings) as one,
        LocalServer(settings) as other,
        urllib3.PoolManager() as http,
    ):
        (served / "c/s/v/f").write_bytes(b"content")
        target = f"{one.url}/api/2.0/fs/create-download-url?path=/Volumes/c/s/v/f"
        url = http.request("POST", target, headers=headers).json()["url"]

        assert http.request("GET", url.replace(one.url, other.url)).data == b"content"
