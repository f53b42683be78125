"""The programs that move the bytes of one file, each by another way. Each runs in a process of its
own (`measure.run_program`) and checks, at almost no cost, that it got the right bytes.

Called for `mount_reads`, `checkpoints` and `files_api`. Paths of a volume are whole
(`/Volumes/c/s/v/...`); host and token are in the environment, where the SDK looks for them.
"""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from measure import MIB, Timing, measured

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient

    from trainmount_files.volume import Volume

__all__ = [
    "BLOCK_BYTES",
    "NUM_READERS",
    "Checker",
    "download_client",
    "load_client",
    "open_volume_at",
    "read_by_sdk",
    "read_by_sdk_to_file",
    "read_client",
    "read_file",
    "read_urllib3",
    "upload_client",
    "upload_sdk",
    "write_file",
]

BLOCK_BYTES: Final = 8 * MIB
"""The range that all ways ask for at once where one can say so; the mount's own."""

NUM_READERS: Final = 8


class Checker:
    """Sees that the pieces of a file of `places.write_blocks` are in order and whole."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def feed(self, piece: memoryview | bytes | bytearray) -> None:
        """The next bytes. Raises RuntimeError where a MiB begins with another number than its."""
        end = self.position + len(piece)
        for number in range(-(-self.position // MIB), -(-end // MIB)):
            at = number * MIB - self.position
            head = bytes(piece[at : at + 8])
            # A head that is cut between two pieces is checked as far as it goes.
            if head != number.to_bytes(8, "little")[: len(head)]:
                raise RuntimeError(f"other bytes than were stored, in MiB {number}")
        self.position = end

    def finish(self, size_bytes: int) -> None:
        if self.position != size_bytes:
            raise RuntimeError(f"{self.position} bytes were read, {size_bytes} are stored")


def read_file(path: str, size_bytes: int) -> Timing:
    """From the first byte to the last with read(2), a MiB at a time, like most programs."""
    checker = Checker()
    buffer = memoryview(bytearray(MIB))
    with measured() as timing, open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a raw file
        while count := file.readinto(buffer):
            checker.feed(buffer[:count])
    checker.finish(size_bytes)
    return timing


def write_file(source: str, target: str) -> Timing:
    """Copy with write(2), a MiB at a time, and close, as `torch.save` does. On a mount, `close` is
    the upload. (Created with O_EXCL, the store has to refuse to overwrite, which S3 can for a file
    in parts only by copying it.)
    """
    buffer = memoryview(bytearray(MIB))
    with (
        measured() as timing,
        open(source, "rb", buffering=0) as reader,  # noqa: PTH123
        open(target, "wb", buffering=0) as writer,  # noqa: PTH123
    ):
        while count := reader.readinto(buffer):
            writer.write(buffer[:count])
    return timing


def read_client(path: str, size_bytes: int) -> Timing:
    """Ranges through the volume client, eight at once, each into memory of its own."""
    from trainmount_files import ByteRange

    root, _, name = path.rpartition("/")
    volume = open_volume_at(root)
    with measured() as timing:
        local = threading.local()

        def read(start: int) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(BLOCK_BYTES))
            wanted = ByteRange(start, min(start + BLOCK_BYTES, size_bytes))
            volume.read_into(name, wanted, local.buffer)
            Checker(start).feed(local.buffer[: len(wanted)])

        with ThreadPoolExecutor(NUM_READERS) as threads:
            list(threads.map(read, range(0, size_bytes, BLOCK_BYTES)))
        volume.close()
    return timing


def download_client(path: str, size_bytes: int, folder: str) -> Timing:
    """The same ranges, each written into a local file when it is there."""
    from trainmount_files import ByteRange

    root, _, name = path.rpartition("/")
    volume = open_volume_at(root)
    with tempfile.TemporaryDirectory(dir=folder) as directory, measured() as timing:
        descriptor = os.open(Path(directory) / "file", os.O_WRONLY | os.O_CREAT)
        local = threading.local()

        def download(start: int) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(BLOCK_BYTES))
            wanted = ByteRange(start, min(start + BLOCK_BYTES, size_bytes))
            volume.read_into(name, wanted, local.buffer)
            Checker(start).feed(local.buffer[: len(wanted)])
            os.pwrite(descriptor, local.buffer[: len(wanted)], start)

        with ThreadPoolExecutor(NUM_READERS) as threads:
            list(threads.map(download, range(0, size_bytes, BLOCK_BYTES)))
        os.close(descriptor)
        volume.close()
    return timing


def read_urllib3(path: str, size_bytes: int) -> Timing:
    """The same ranges with nothing but urllib3: no retry, no check of what came. The limit."""
    import urllib3

    from trainmount_files.files_api.signed_urls import expire_time

    with measured() as timing:
        pool = urllib3.PoolManager(maxsize=NUM_READERS)
        query = urlencode({"path": path, "expire_time": expire_time(3600.0)})
        answer = pool.request(
            "POST",
            f"{os.environ['DATABRICKS_HOST']}/api/2.0/fs/create-download-url?{query}",
            headers={"Authorization": f"Bearer {os.environ['DATABRICKS_TOKEN']}"},
        ).json()
        signed = {header["name"]: header["value"] for header in answer.get("headers") or ()}

        def read(start: int) -> None:
            end = min(start + BLOCK_BYTES, size_bytes)
            headers = signed | {"Range": f"bytes={start}-{end - 1}"}
            body = pool.request("GET", answer["url"], headers=headers).data
            if len(body) != end - start:
                raise RuntimeError(f"{len(body)} bytes came, {end - start} were asked for")
            Checker(start).feed(body)

        with ThreadPoolExecutor(NUM_READERS) as threads:
            list(threads.map(read, range(0, size_bytes, BLOCK_BYTES)))
    return timing


def read_by_sdk(path: str, size_bytes: int) -> Timing:
    """`files.download` of the databricks SDK: one stream."""
    checker = Checker()
    client = _sdk(path)
    with measured() as timing:
        contents = client.files.download(path).contents
        assert contents is not None
        with contents as stream:
            while piece := stream.read(MIB):
                checker.feed(piece)
    checker.finish(size_bytes)
    return timing


def read_by_sdk_to_file(path: str, size_bytes: int, folder: str) -> Timing:
    """`files.download_to` of the databricks SDK: a local copy by as many threads as it likes."""
    client = _sdk(path)
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        local = Path(directory) / "file"
        with measured() as timing:
            client.files.download_to(path, str(local), use_parallel=True)
        checker = Checker()
        with local.open("rb") as file:
            while piece := file.read(MIB):
                checker.feed(piece)
    checker.finish(size_bytes)
    return timing


def upload_client(source: str, path: str) -> Timing:
    """`Volume.upload` of a local file."""
    root, _, name = path.rpartition("/")
    volume = open_volume_at(root)
    with measured() as timing, Path(source).open("rb") as file:
        volume.upload(name, file, Path(source).stat().st_size)
        volume.close()
    return timing


def upload_sdk(source: str, path: str) -> Timing:
    """`files.upload_from` of the databricks SDK: parts by as many threads as it likes."""
    client = _sdk(path)
    with measured() as timing:
        client.files.upload_from(path, source, overwrite=True)
    return timing


def load_client() -> None:
    """Import what a volume loads when it is first used."""
    import certifi  # noqa: F401
    import urllib3  # noqa: F401

    import trainmount_files.files_api  # noqa: F401


def open_volume_at(root: str) -> Volume:
    """A volume that has spoken to its store: a program does that once, and a mount's daemon has."""
    from trainmount_files import open_volume

    volume = open_volume(root)
    volume.stat("")
    return volume


def _sdk(path: str) -> WorkspaceClient:
    """A client of the SDK that has spoken to its store, as `open_volume_at`."""
    from databricks.sdk import WorkspaceClient

    client = WorkspaceClient()
    client.files.get_directory_metadata(path.rpartition("/")[0])
    return client
