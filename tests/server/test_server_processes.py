"""Two server processes over one directory, with writers of both kinds racing for one path."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import urllib3

from trainmount_files.server import LocalServer

TOKEN = "dapi-token-of-the-tests"
FILES = "/api/2.0/fs/files/Volumes/main/default/data"
VOLUME = "main/default/data"
NUM_WRITERS = 64

Start = Callable[..., tuple[int, str]]


class Client:
    def __init__(self) -> None:
        self._http = urllib3.PoolManager(retries=False, maxsize=NUM_WRITERS, num_pools=4)

    def __call__(self, method: str, url: str, **options: Any) -> urllib3.BaseHTTPResponse:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return self._http.request(method, url, headers=headers, **options)

    def upload(self, url: str, body: bytes) -> urllib3.BaseHTTPResponse:
        """In one part, with `overwrite=false`; the answer that ended it."""
        begun = self("POST", f"{url}?action=initiate-upload&overwrite=false")
        if begun.status != 200:
            return begun
        query = f"upload_type=multipart&session_token={self.token_of(begun)}"
        part = self("PUT", f"{url}?{query}&part_number=1", body=body)
        parts = [{"part_number": 1, "etag": part.headers["ETag"]}]
        return self("POST", f"{url}?action=complete-upload&{query}", json={"parts": parts})

    @staticmethod
    def token_of(begun: urllib3.BaseHTTPResponse) -> str:
        return str(begun.json()["multipart_upload"]["session_token"])


def test_of_64_writers_to_two_processes_exactly_one_wins_each_round(
    start_process: Start, served: Path
) -> None:
    urls = [start_process()[1], start_process()[1]]
    client = Client()

    def write(number: int, index: int) -> urllib3.BaseHTTPResponse:
        url = f"{urls[number % 2]}{FILES}/{index}"
        body = b"writer %d " % number * 1000
        if number % 4 < 2:
            return client("PUT", f"{url}?overwrite=false", body=body)
        return client.upload(url, body)

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        for index in range(3):
            answers = list(pool.map(write, range(NUM_WRITERS), [index] * NUM_WRITERS))

            winners = [n for n, answer in enumerate(answers) if answer.status in (200, 204)]
            assert len(winners) == 1
            losers = [answer for answer in answers if answer.status not in (200, 204)]
            assert {answer.status for answer in losers} == {409}
            assert {answer.json()["error_code"] for answer in losers} == {"ALREADY_EXISTS"}
            content = (served / VOLUME / str(index)).read_bytes()
            assert content == b"writer %d " % winners[0] * 1000


def test_a_complete_is_answered_again_by_the_next_process(
    start_process: Start, served: Path
) -> None:
    client = Client()
    pid, url = start_process()
    begun = client("POST", f"{url}{FILES}/file?action=initiate-upload&overwrite=false")
    query = f"upload_type=multipart&session_token={client.token_of(begun)}"
    part = client("PUT", f"{url}{FILES}/file?{query}&part_number=1", body=b"content")
    body = {"parts": [{"part_number": 1, "etag": part.headers["ETag"]}]}
    target = f"{FILES}/file?action=complete-upload&{query}"
    first = client("POST", url + target, json=body)
    os.kill(pid, signal.SIGKILL)
    _, url = start_process()

    again = client("POST", url + target, json=body)

    assert (first.status, again.status) == (200, 200)
    assert first.json() == again.json()
    assert (served / VOLUME / "file").read_bytes() == b"content"


@pytest.mark.parametrize("overwrite", ["true", "false"])
def test_a_server_that_died_between_publishing_and_saying_so_knows_it(
    server: LocalServer, served: Path, overwrite: str
) -> None:
    client = Client()
    url = f"{server.url}{FILES}/file"
    begun = client("POST", f"{url}?action=initiate-upload&overwrite={overwrite}")
    query = f"upload_type=multipart&session_token={client.token_of(begun)}"
    part = client("PUT", f"{url}?{query}&part_number=1", body=b"content")
    body = {"parts": [{"part_number": 1, "etag": part.headers["ETag"]}]}
    # What is on the disk in that moment: the file at its path under a second name, no record.
    (folder,) = (served / ".trainmount/uploads").iterdir()
    (folder / "assembled").write_bytes(b"content")
    (folder / "published").hardlink_to(folder / "assembled")
    if overwrite == "true":
        (folder / "assembled").rename(served / VOLUME / "file")
    else:
        (served / VOLUME / "file").hardlink_to(folder / "assembled")
    inode = (served / VOLUME / "file").stat().st_ino

    answer = client("POST", f"{url}?action=complete-upload&{query}", json=body)

    assert answer.status == 200
    assert (served / VOLUME / "file").stat().st_ino == inode
    assert server.statistics()["staged_bytes"] == server.statistics()["open_uploads"] == 0
