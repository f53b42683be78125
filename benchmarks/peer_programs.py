"""The programs that work on a mount, ours or a peer's, each in a process of its own
(`measure.run_program`). Called for `mount_peers`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Final

from measure import MIB, Timing, measured

__all__ = ["list_client", "list_directory", "read_at_once", "read_tree", "stat_files"]

_SEED: Final = 20


def read_tree(path: str, num_processes: int, num_files: int, file_bytes: int) -> Timing:
    """List a directory and read every file in a random order, shared out among processes that begin
    together. The clock runs from the listing to the last byte.
    """
    names = multiprocessing.get_context("fork").SimpleQueue()
    barrier = multiprocessing.get_context("fork").Barrier(num_processes + 1)
    readers = [
        multiprocessing.get_context("fork").Process(
            target=_read_share, args=(path, names, barrier, file_bytes), daemon=True
        )
        for _number in range(num_processes)
    ]
    for reader in readers:
        reader.start()
    barrier.wait()
    with measured() as timing:
        found = sorted(os.listdir(path))  # noqa: PTH208 - names are enough
        if len(found) != num_files:
            raise RuntimeError(f"{len(found)} files are listed, {num_files} are stored")
        random.Random(_SEED).shuffle(found)
        for number in range(num_processes):
            names.put(found[number::num_processes])
        for reader in readers:
            reader.join()
    if any(reader.exitcode for reader in readers):
        raise RuntimeError("a reader failed")
    return timing


def _read_share(
    path: str,
    names: multiprocessing.queues.SimpleQueue[list[str]],
    barrier: Barrier,
    file_bytes: int,
) -> None:
    buffer = bytearray(file_bytes + 1)
    barrier.wait()
    for name in names.get():
        descriptor = os.open(f"{path}/{name}", os.O_RDONLY)
        count = position = 0
        while count := os.readv(descriptor, [memoryview(buffer)[position:]]):
            position += count
        os.close(descriptor)
        if position != file_bytes or buffer[:8] != name[-8:].encode():
            raise RuntimeError(f"{name} has other bytes than were stored")


def stat_files(path: str, num_files: int, num_threads: int) -> Timing:
    """stat(2) of every file of a directory, by threads."""
    paths = [f"{path}/sample-{number:08}" for number in range(num_files)]
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(time.sleep, [0.0] * num_threads))
        with measured() as timing:
            for status in threads.map(os.stat, paths):
                if not status.st_size:
                    raise RuntimeError("a file is empty")
    return timing


def list_directory(path: str, num_files: int) -> Timing:
    """The names of a directory."""
    with measured() as timing:
        count = len(os.listdir(path))  # noqa: PTH208
    if count != num_files:
        raise RuntimeError(f"{count} files are listed, {num_files} are stored")
    return timing


def list_client(root: str, path: str, num_files: int) -> Timing:
    """The same names, by the volume client."""
    from trainmount_files import list_directory as list_volume
    from trainmount_files import open_volume

    volume = open_volume(root)
    volume.stat("")
    with measured() as timing:
        count = sum(1 for _entry in list_volume(volume, path))
    volume.close()
    if count != num_files:
        raise RuntimeError(f"{count} files are listed, {num_files} are stored")
    return timing


def read_at_once(path: str, prefix: str, num_files: int, file_bytes: int) -> Timing:
    """Files of a directory at the same time, each by a thread from its first byte to its last, all
    open before the first one reads.
    """
    paths = sorted(Path(path).glob(f"{prefix}*"))
    if len(paths) != num_files:
        raise RuntimeError(f"{len(paths)} files are listed, {num_files} are stored")
    barrier = threading.Barrier(num_files)

    def read(file: Path) -> int:
        buffer = bytearray(MIB // 8)
        descriptor = os.open(file, os.O_RDONLY)
        barrier.wait()
        position = 0
        while count := os.readv(descriptor, [buffer]):
            position += count
        os.close(descriptor)
        return position

    with ThreadPoolExecutor(num_files) as threads, measured() as timing:
        sizes = list(threads.map(read, paths))
    if set(sizes) != {file_bytes}:
        raise RuntimeError(f"files of {set(sizes)} bytes were read")
    return timing
