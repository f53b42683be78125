"""`kill -9` of a real server at random points: the directory is whole, and what was acknowledged is
there.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import urllib3

TOKEN = "dapi-token-of-the-tests"
ROOT = "/Volumes/main/default/data"
FILES = f"/api/2.0/fs/files{ROOT}"
PART_BYTES = 256 * 1024
NUM_PATHS = 6
SEED = 20260


class Writer(threading.Thread):
    """Puts, replaces, uploads in parts and deletes one path until its server is gone."""

    def __init__(self, url: str, index: int, seed: int, allowed: set[bytes | None]) -> None:
        super().__init__()
        self._url, self._target = url, f"{FILES}/dir-{index}/file"
        self._path = f"{ROOT}/dir-{index}/file"
        self._random = random.Random(seed)
        self._http = urllib3.PoolManager(retries=False, timeout=30)
        self.allowed = allowed
        """What may be at the path: one thing, and while a request is under way its outcome too."""
        self.num_acknowledged = 0

    def run(self) -> None:
        with self._http:
            try:
                while True:
                    self._step()
            except urllib3.exceptions.HTTPError:
                return

    def _step(self) -> None:
        action = self._random.choice(["put", "put", "upload", "upload", "exclusive", "delete"])
        size = self._random.choice([0, 10, 100_000, 3 * PART_BYTES])
        body = self._random.randbytes(16) * (size // 16 + 1)
        (before,) = self.allowed
        after = None if action == "delete" else body
        self.allowed = {before, after}
        if action == "delete":
            expected = 404 if before is None else 204
            status = self._call("DELETE", self._target).status
        elif action == "upload":
            expected, status = 200, self._upload(body)
        elif action == "exclusive":
            expected = 204 if before is None else 409
            status = self._call("PUT", f"{self._target}?overwrite=false", body=body).status
            after = body if before is None else before
        else:
            expected, status = 204, self._call("PUT", self._target, body=body).status
        assert status == expected, (action, status)
        self.allowed = {after}
        self.num_acknowledged += 1

    def _upload(self, body: bytes) -> int:
        begun = self._call("POST", f"{self._target}?action=initiate-upload").json()
        token = begun["multipart_upload"]["session_token"]
        query = f"session_token={token}&upload_type=multipart"
        parts = []
        for number, start in enumerate(range(0, max(len(body), 1), PART_BYTES), 1):
            piece = body[start : start + PART_BYTES]
            answer = self._call("PUT", f"{self._target}?{query}&part_number={number}", body=piece)
            parts.append({"part_number": number, "etag": answer.headers["ETag"]})
        target = f"{self._target}?action=complete-upload&{query}"
        return self._call("POST", target, json={"parts": parts}).status

    def _call(self, method: str, target: str, **options: Any) -> urllib3.BaseHTTPResponse:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return self._http.request(method, self._url + target, headers=headers, **options)


def content_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def test_a_server_that_is_killed_at_any_point_leaves_every_file_whole(
    start_process: Callable[..., tuple[int, str]], served: Path
) -> None:
    chance = random.Random(SEED)
    allowed: list[set[bytes | None]] = [{None} for _ in range(NUM_PATHS)]
    temporary = served / ".trainmount/temporary"
    for round_number in range(4):
        pid, url = start_process("--min-part-bytes", "1")
        if round_number:
            # What the one before had in the making goes before anything else is asked for.
            deadline = time.monotonic() + 10
            while len(list(temporary.iterdir())) > 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        writers = [
            Writer(url, index, chance.randrange(1 << 30), allowed[index])
            for index in range(NUM_PATHS)
        ]
        for writer in writers:
            writer.start()
        enough = chance.randrange(5, 100)
        while sum(writer.num_acknowledged for writer in writers) < enough:
            time.sleep(0.002)
            assert all(writer.is_alive() for writer in writers)
        os.kill(pid, signal.SIGKILL)
        for writer in writers:
            writer.join()
        for index, writer in enumerate(writers):
            found = content_of(served / f"main/default/data/dir-{index}/file")
            assert found in writer.allowed, (round_number, index)
            allowed[index] = {found}
        names = {path.name for path in (served / "main/default/data").glob("*/*")}
        assert names <= {"file"}
    _, url = start_process()
    listing = urllib3.request(
        "GET",
        f"{url}/api/2.0/fs/directories{ROOT}",
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    assert listing.status == 200
