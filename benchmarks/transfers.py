"""The programs that move whole files with the volume client, and the bare loop that they are held
against. As those of `programs`, each runs in a process of its own. Called for `files_api`.
"""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

from measure import MIB, Timing, measured
from programs import BLOCK_BYTES, NUM_READERS, Checker, open_volume_at

__all__ = [
    "download_whole",
    "iterate_client",
    "readinto_urllib3",
    "upload_many",
    "upload_stream",
    "upload_whole",
]


def readinto_urllib3(path: str, size_bytes: int) -> Timing:
    """Ranges of the signed URL with nothing but urllib3, each into a buffer of its thread: no
    retry, no check of what came. The limit.
    """
    import urllib3

    from trainmount_files.files_api.signed_urls import expire_time

    pool = urllib3.PoolManager(maxsize=NUM_READERS)
    host, token = os.environ["DATABRICKS_HOST"], os.environ["DATABRICKS_TOKEN"]
    authorization = {"Authorization": f"Bearer {token}"}
    # A connection has been made, as by the other sides.
    root = path.rpartition("/")[0]
    pool.request("HEAD", f"{host}/api/2.0/fs/directories{root}", headers=authorization)
    with measured() as timing:
        query = urlencode({"path": path, "expire_time": expire_time(3600.0)})
        url = f"{host}/api/2.0/fs/create-download-url?{query}"
        answer = pool.request("POST", url, headers=authorization).json()
        signed = {header["name"]: header["value"] for header in answer.get("headers") or ()}
        local = threading.local()

        def read(start: int) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(BLOCK_BYTES))
            wanted = min(BLOCK_BYTES, size_bytes - start)
            headers = signed | {"Range": f"bytes={start}-{start + wanted - 1}"}
            response = pool.request("GET", answer["url"], headers=headers, preload_content=False)
            done = 0
            while done < wanted and (count := response.readinto(local.buffer[done:wanted])):
                done += count
            response.release_conn()
            if done != wanted:
                raise RuntimeError(f"{done} bytes came, {wanted} were asked for")
            Checker(start).feed(local.buffer[:wanted])

        with ThreadPoolExecutor(NUM_READERS) as threads:
            list(threads.map(read, range(0, size_bytes, BLOCK_BYTES)))
    return timing


def download_whole(path: str, size_bytes: int, folder: str) -> Timing:
    """`transfer.download_file`: a local file, whole or absent."""
    from trainmount_files.transfer import download_file

    root, _, name = path.rpartition("/")
    volume = open_volume_at(root)
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        local = Path(directory) / "file"
        with measured() as timing:
            download_file(volume, name, local)
        volume.close()
        checker = Checker()
        with local.open("rb") as file:
            while piece := file.read(MIB):
                checker.feed(piece)
        checker.finish(size_bytes)
    return timing


def iterate_client(path: str, size_bytes: int) -> Timing:
    """`transfer.iterate`: blocks in order, four ahead."""
    from trainmount_files.transfer import iterate

    root, _, name = path.rpartition("/")
    volume = open_volume_at(root)
    checker = Checker()
    with measured() as timing:
        for block in iterate(volume, name):
            checker.feed(block)
    volume.close()
    checker.finish(size_bytes)
    return timing


def upload_whole(source: str, path: str) -> Timing:
    """`transfer.upload_file`: slices of a local file."""
    from trainmount_files.transfer import upload_file

    root, _, name = path.rpartition("/")
    volume = open_volume_at(root)
    with measured() as timing:
        upload_file(volume, Path(source), name)
    volume.close()
    return timing


def upload_many(source: str, path: str, num_files: int) -> Timing:
    """So many uploads of the same local file at once, each to a path of its own."""
    from trainmount_files.transfer import upload_file

    root, _, name = path.rpartition("/")
    volume = open_volume_at(root)
    with measured() as timing, ThreadPoolExecutor(num_files) as threads:
        names = [f"{name}-{number}" for number in range(num_files)]
        list(threads.map(lambda one: upload_file(volume, Path(source), one), names))
    for one in names:
        volume.delete(one)
    volume.close()
    return timing


def upload_stream(source: str, path: str, num_files: int = 1) -> Timing:
    """`transfer.upload_stream`: the same bytes, of which the client is not told how many."""
    from trainmount_files.transfer import upload_stream as store

    root, _, name = path.rpartition("/")
    volume = open_volume_at(root)
    names = [f"{name}-{number}" for number in range(num_files)] if num_files > 1 else [name]

    def run(one: str) -> None:
        with Path(source).open("rb", buffering=0) as stream:
            store(volume, one, stream)

    with measured() as timing, ThreadPoolExecutor(num_files) as threads:
        list(threads.map(run, names))
    for one in names[1:] if num_files > 1 else []:
        volume.delete(one)
    volume.close()
    return timing
