"""Saves that end in the midst, at every write of the storage layer in turn: `saving_deaths.py PATH
[HOST]`, where PATH is a directory, or a volume at HOST.

Prints a JSON list for each of `WAYS`: for each point of the save, how the process ended, which
number was saved before and which numbers a load found afterwards; the save itself is of that number
and a half. Each save is a forked process, so that a kill is a real one.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tests.runtime.small_volume import OPTIONS, TOKEN

from trainmount.checkpoint import volume_store
from trainmount.data import UCVolumeReader, UCVolumeWriter
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials

LOCAL_CALLS = ["open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"]
VOLUME_CALLS = ["put", "start_upload", "delete", "remove_directory"]
UPLOAD_CALLS = ["put_part", "complete"]

# To be killed after a call is to be killed before the next one. Failures, of which a save knows,
# are taken at every fourth point unless all are asked for.
_STEP = 1 if "EVERY_POINT" in os.environ else 4
WAYS = {"kill before": 1, "fail before": _STEP, "fail after": _STEP}


class Counter:
    """Lets a process end, or a call fail, at one of its writes."""

    def __init__(self, way: str, last: int) -> None:
        self._way, self._last = way, last
        self.count = 0
        self._lock = threading.Lock()

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.count += 1
                is_last = self.count == self._last
            if is_last and self._way.endswith("before"):
                self._end()
            result = call(*arguments, **options)
            if is_last:
                self._end()
            return result

        return counted

    def _end(self) -> None:
        if self._way.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EIO, "Input/output error")


def state(number: float) -> dict[str, Any]:
    return {
        "first": torch.full((150_000,), number),
        "second": torch.full((200, 300), number).t(),
        "nested": {"number": number},
    }


def load(path: str, **options: Any) -> list[float]:
    """The numbers that are in what was loaded: one, if it is whole."""
    found: dict[str, Any] = {
        "first": torch.zeros(150_000),
        "second": torch.zeros(300, 200),
        "nested": {"number": 0.0},
    }
    dcp.load(found, storage_reader=UCVolumeReader(path, **options))
    numbers = {found["nested"]["number"]}
    return sorted(numbers.union(found["first"].tolist(), found["second"].flatten().tolist()))


def save(path: str, number: float) -> None:
    dcp.save(state(number), storage_writer=UCVolumeWriter(path, thread_count=2, keep_last=1))


def in_child(
    path: str, number: float, way: str, last: int, instrument: Callable[[Counter], None]
) -> str:
    """Save over what is there in a process of its own; how it ended."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        counter = Counter(way, last)
        code = 0
        try:
            instrument(counter)
            save(path, number)
        except BaseException:
            code = 1
        os._exit(2 if counter.count < last else code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: "saved", 1: "failed", 2: "over", -signal.SIGKILL: "killed"}[code]


def instrument_directory(counter: Counter) -> None:
    for name in LOCAL_CALLS:
        setattr(os, name, counter.wrap(getattr(os, name)))


def instrument_volume(counter: Counter) -> None:
    for name in VOLUME_CALLS:
        setattr(FilesApiVolume, name, counter.wrap(getattr(FilesApiVolume, name)))
    begin = FilesApiVolume.start_upload

    def start_upload(volume: FilesApiVolume, *arguments: Any, **options: Any) -> Any:
        upload = begin(volume, *arguments, **options)
        for name in UPLOAD_CALLS:
            setattr(upload, name, counter.wrap(getattr(upload, name)))
        return upload

    FilesApiVolume.start_upload = start_upload  # type: ignore[method-assign]


def every_point(
    path: str, way: str, instrument: Callable[[Counter], None]
) -> Iterator[dict[str, Any]]:
    for last in range(1, 1000, WAYS[way]):
        # It removes what the last one left, too.
        save(path, last)
        ended = in_child(path, last + 0.5, way, last, instrument)
        yield {"at": last, "ended": ended, "before": last, "found": load(path)}
        if ended == "over":
            break


def main() -> None:
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = sys.argv[1]
    # What a kill leaves is in the page cache, and that is what is read here.
    os.fsync = lambda _descriptor: None
    instrument = instrument_directory
    if path.startswith("/Volumes/"):
        instrument = instrument_volume
        credentials = Credentials(host=sys.argv[2], token=TOKEN)
        volume_store.open_volume = lambda url: FilesApiVolume(url, credentials, OPTIONS)  # type: ignore[assignment]
    found = {way: list(every_point(path, way, instrument)) for way in WAYS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
