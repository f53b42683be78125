"""A real S3 server for the volume suite: versitygw over a directory, built once from its Go module.

`tests/files/conftest.py` starts one for `--real-bucket`. Its buckets are directories, so two keys
of which one is a parent of the other cannot both be there; all else is as S3 has it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BUCKET", "S3Server", "running_s3_server"]

PACKAGE = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
BINARY_VARIABLE = "TRAINMOUNT_VERSITYGW"
BUCKET = "volume"
BUCKET_BEFORE_DOMAIN, DOMAIN = "127", "0.0.1"
"""A bucket and the domain of a server that finds buckets in the host's name. Joined, they are this
machine's address: names below `localhost` are not known to every resolver.
"""
START_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """One that runs; its credentials are made up for it."""

    endpoint: str
    """Without a bucket in it, whatever the style."""
    bucket: str
    access_key: str
    secret_key: str
    directory: Path
    """Where the buckets are."""

    @property
    def storage(self) -> dict[str, str]:
        """Storage options of a volume here, with the bucket in the path."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
        }

    def begun_uploads(self) -> int:
        """Multipart uploads that were ever begun here."""
        return self._logged("POST", "| uploads=")

    def aborted_uploads(self) -> int:
        """Those that were aborted. A part that was on its way at that moment may bring the upload's
        directory back, as S3 says of itself; so the requests are counted and not directories.
        """
        return self._logged("DELETE", "| uploadId=")

    def _logged(self, method: str, in_target: str) -> int:
        log = (self.directory.parent / "log").read_text()
        return sum(f"{method} " in line and in_target in line for line in log.splitlines())


def binary() -> Path:
    """Where versitygw is: named by the variable, on PATH, or built into the cache (2 minutes)."""
    named = os.environ.get(BINARY_VARIABLE) or shutil.which("versitygw")
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "trainmount" / "s3" / PACKAGE.rpartition("@")[2]
    built = folder / "versitygw"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        # Two runs never build at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            if shutil.which("go") is None:
                raise RuntimeError("the S3 server is built from source: install Go, go.dev/dl")
            for left in folder.glob("partial-*"):
                # Of a build that was killed.
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as partial:
                environment = os.environ | {"CGO_ENABLED": "0", "GOBIN": partial}
                done = subprocess.run(
                    ["go", "install", PACKAGE], env=environment, capture_output=True, text=True
                )
                if done.returncode:
                    raise RuntimeError(f"go install {PACKAGE} failed: {done.stderr[-2000:]}")
                (Path(partial) / "versitygw").rename(built)
    return built


@contextmanager
def running_s3_server(
    parent: Path | None = None, *, is_virtual: bool = False
) -> Iterator[S3Server]:
    """Starts one with an empty bucket on a port of its own; stops it and removes its files, which
    are below `parent`, or where temporary files are. With `is_virtual` the bucket stands in the
    host's name, and in no path.
    """
    executable = binary()
    directory = Path(tempfile.mkdtemp(prefix="trainmount-s3-", dir=parent))
    bucket, host = (BUCKET_BEFORE_DOMAIN, DOMAIN) if is_virtual else (BUCKET, "127.0.0.1")
    (directory / "root" / bucket).mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    access_key, secret_key = secrets.token_hex(10), secrets.token_hex(20)
    command = [str(executable), "--port", f"127.0.0.1:{port}", "--keep-alive"]
    if is_virtual:
        command += ["--virtual-domain", DOMAIN]
    command += ["posix", str(directory / "root")]
    environment = os.environ | {"ROOT_ACCESS_KEY": access_key, "ROOT_SECRET_KEY": secret_key}
    log_path = directory / "log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log_path.read_text()
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, log_path.read_text()
                time.sleep(0.05)
        yield S3Server(
            endpoint=f"http://{host}:{port}",
            bucket=bucket,
            access_key=access_key,
            secret_key=secret_key,
            directory=directory / "root",
        )
    finally:
        process.terminate()
        try:
            # It waits for connections that are kept alive.
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)
