"""Bytes through the Files API: this client against the databricks SDK, speed and peak memory.

    python benchmarks/files_api.py [--size-mib 512] [--host URL --token TOKEN --root /Volumes/c/s/v]

Without a host, the local server is started in a process of its own over a temporary directory. Each
case runs in a fresh process; memory is the peak above what the process held before the transfer.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 1 << 20
BLOCK_BYTES = 8 * MIB
READERS = 8
TOKEN = "dapi-benchmark-only"


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a case works on."""

    host: str
    token: str
    root: str
    source: Path
    """The file that is uploaded and compared with."""
    size_bytes: int


def read_ours(place: Place) -> str:
    """Blocks of 8 MiB, eight at once, into one buffer: what the mount's prefetcher does."""
    from trainmount_files import ByteRange, open_volume

    volume = open_volume(place.root, host=place.host, token=place.token)
    checksum = 0
    buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(READERS)]

    def read(number: int, start: int) -> memoryview:
        wanted = ByteRange(start, min(start + BLOCK_BYTES, place.size_bytes))
        volume.read_into("benchmark", wanted, buffers[number])
        return buffers[number][: len(wanted)]

    with ThreadPoolExecutor(READERS) as executor:
        for first in range(0, place.size_bytes, BLOCK_BYTES * READERS):
            starts = range(first, min(first + BLOCK_BYTES * READERS, place.size_bytes), BLOCK_BYTES)
            for block in executor.map(read, range(READERS), starts):
                checksum = zlib.crc32(block, checksum)
    return str(checksum)


def read_sdk(place: Place) -> str:
    """`files.download`, one stream."""
    checksum = 0
    contents = _sdk(place).files.download(f"{place.root}/benchmark").contents
    assert contents is not None
    with contents as stream:
        while piece := stream.read(MIB):
            checksum = zlib.crc32(piece, checksum)
    return str(checksum)


def read_sdk_parallel(place: Place) -> str:
    """`files.download_to` a file, ten threads, as the SDK's own defaults have it."""
    with tempfile.TemporaryDirectory(dir=place.source.parent) as directory:
        local = Path(directory) / "file"
        _sdk(place).files.download_to(f"{place.root}/benchmark", str(local), use_parallel=True)
        return _checksum_of(local)


def upload_ours(place: Place) -> str:
    """Parts of the file, read while they are sent."""
    from trainmount_files import open_volume

    volume = open_volume(place.root, host=place.host, token=place.token)
    with place.source.open("rb") as source:
        volume.upload("benchmark", source, place.size_bytes)
    return ""


def upload_sdk(place: Place) -> str:
    """`files.upload_from`, ten threads, as the SDK's own defaults have it."""
    _sdk(place).files.upload_from(f"{place.root}/benchmark", str(place.source), overwrite=True)
    return ""


CASES: dict[str, Callable[[Place], str]] = {
    "upload, SDK upload_from": upload_sdk,
    "upload, trainmount": upload_ours,
    "read, SDK download": read_sdk,
    "read, SDK download_to parallel": read_sdk_parallel,
    "read, trainmount 8 x 8 MiB": read_ours,
}


def _sdk(place: Place):  # type: ignore[no-untyped-def]
    from databricks.sdk import WorkspaceClient

    return WorkspaceClient(host=place.host, token=place.token)


def _checksum_of(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(MIB):
            checksum = zlib.crc32(piece, checksum)
    return str(checksum)


def run_case(name: str, place: Place) -> None:
    """In the case's own process: print seconds, memory and what was read."""
    import databricks.sdk  # noqa: F401 - both sides begin with the same modules

    import trainmount_files  # noqa: F401

    before_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    began = time.perf_counter()
    checksum = CASES[name](place)
    seconds = time.perf_counter() - began
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps({"seconds": seconds, "memory": peak_bytes - before_bytes, "checksum": checksum})
    )


@contextmanager
def local_server(directory: Path) -> Iterator[str]:
    """URL of a server over `directory`."""
    (directory / "main/default/data").mkdir(parents=True)
    ready = directory / "ready"
    command = [sys.executable, "-m", "trainmount_files.server", str(directory)]
    command += ["--port", "0", "--token", TOKEN, "--ready-file", str(ready)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not ready.exists():
            if server.poll() is not None:
                raise SystemExit("the local server did not start")
            time.sleep(0.05)
        yield ready.read_text().strip()
    finally:
        server.terminate()
        server.wait()


def measure(place: Place) -> None:
    """Run every case and print a line of a Markdown table for each."""
    expected = _checksum_of(place.source)
    print("| case | MB/s | peak memory, MiB |\n|---|---|---|")
    for name in CASES:
        values = {key: str(value) for key, value in asdict(place).items()}
        done = subprocess.run(
            [sys.executable, __file__, "--case", name],
            input=json.dumps(values),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{name} failed:\n{done.stderr}")
        result = json.loads(done.stdout)
        if result["checksum"] not in ("", expected):
            raise SystemExit(f"{name} read other bytes than were stored")
        speed = place.size_bytes / 1e6 / result["seconds"]
        print(f"| {name} | {speed:.0f} | {result['memory'] / MIB:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--host", help="workspace; default: a local server")
    parser.add_argument("--token")
    parser.add_argument("--root", default="/Volumes/main/default/data")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        values = json.load(sys.stdin)
        values["source"] = Path(values["source"])
        values["size_bytes"] = int(values["size_bytes"])
        run_case(options.case, Place(**values))
        return
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "source"
        with source.open("wb") as file:
            for _ in range(options.size_mib):
                file.write(os.urandom(MIB))
        size_bytes = options.size_mib * MIB
        if options.host:
            token = options.token or os.environ.get("DATABRICKS_TOKEN", "")
            measure(
                Place(
                    host=options.host,
                    token=token,
                    root=options.root,
                    source=source,
                    size_bytes=size_bytes,
                )
            )
            return
        with local_server(Path(directory) / "served") as host:
            measure(
                Place(
                    host=host, token=TOKEN, root=options.root, source=source, size_bytes=size_bytes
                )
            )


if __name__ == "__main__":
    main()
