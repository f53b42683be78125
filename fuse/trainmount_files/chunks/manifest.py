"""What a chunked file consists of, as its manifest says it. Pure but for `Manifests`, which reads
them; used by the other modules of this package.

    <name>.chunks/trainmount-chunks.json                the manifest: which generation counts
    <name>.chunks/20260131T120000Z-0123456789abcdef/    a generation: the parts of one write
    .../00001 00002 ...
"""

from __future__ import annotations

import bisect
import json
import random
import re
import threading
import uuid
from calendar import timegm
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from time import gmtime, strftime, strptime, time
from typing import Any, Final

from trainmount_files.errors import (
    InexactRange,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from trainmount_files.volume import ByteRange, FileStat, Volume

__all__ = [
    "MAX_PARTS",
    "Manifest",
    "Manifests",
    "age_seconds",
    "chunks_path",
    "file_of_chunks",
    "is_chunked_version",
    "is_generation",
    "manifest_path",
    "new_generation",
    "part_path",
]

MAX_PARTS: Final = 10_000
"""As an upload in parts has; a manifest stays below 200 KB."""

_SUFFIX: Final = ".chunks"

_MANIFEST_NAME: Final = "trainmount-chunks.json"

_FORMAT: Final = "trainmount-chunks/1"

_VERSION: Final = "chunks-"
"""Begin of the version of a chunked file; its generation follows. No store's own begins so."""

_GENERATION: Final = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{16}")

_MAX_MANIFEST_BYTES: Final = 1 << 20

_PADDING: Final = 1024
"""Manifests are of random length, up to this much longer than needed: where a store's versions are
size and whole seconds, two of one second still differ.
"""

_SETTLED_SECONDS: Final = 5.0
"""A manifest that was this old when it was read cannot have had a twin since."""

_KEPT: Final = 1024
"""Manifests kept, by path."""

_TRIES: Final = 5

# The system's generator: processes that were forked from one parent must not draw the same.
_RANDOM: Final = random.SystemRandom()


def chunks_path(path: str) -> str:
    """The directory of a chunked file."""
    return path + _SUFFIX


def manifest_path(path: str) -> str:
    return f"{path}{_SUFFIX}/{_MANIFEST_NAME}"


def part_path(path: str, generation: str, number: int) -> str:
    return f"{path}{_SUFFIX}/{generation}/{number:05}"


def file_of_chunks(directory: FileStat) -> str | None:
    """Path of the file whose chunks may be in `directory`; None where the name says no."""
    path = directory.path.removesuffix(_SUFFIX)
    is_named_so = directory.is_directory and path != directory.path
    return path if is_named_so and path and not path.endswith("/") else None


def new_generation() -> str:
    """A name that no other write has; tells when it was begun."""
    return f"{strftime('%Y%m%dT%H%M%SZ', gmtime())}-{uuid.uuid4().hex[:16]}"


def is_generation(name: str) -> bool:
    return _GENERATION.fullmatch(name) is not None


def age_seconds(generation: str) -> float:
    """Seconds since a generation was begun, by the clocks of its writer and ours."""
    match = _GENERATION.fullmatch(generation)
    if match is None:
        return 0.0
    try:
        return time() - timegm(strptime(match[1], "%Y%m%dT%H%M%SZ"))
    except ValueError:
        return 0.0


def is_chunked_version(version: str) -> bool:
    return version.startswith(_VERSION)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A chunked file as it is published. The parts of a generation never change after that."""

    generation: str

    parts: tuple[tuple[int, int], ...]
    """(number, bytes) of each part, in the file's order."""

    mtime_ns: int = 0
    """Of the manifest, which is when the file was published."""

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def version(self) -> str:
        return f"{_VERSION}{self.generation}"

    def to_stat(self, path: str) -> FileStat:
        return FileStat(
            path,
            is_directory=False,
            size_bytes=self.size_bytes,
            mtime_ns=self.mtime_ns,
            version=self.version,
        )

    def pieces(self, byte_range: ByteRange) -> Iterator[tuple[int, ByteRange]]:
        """The parts that hold a range of the file, in order: number, and the range inside each."""
        starts = [0, *accumulate(size for _, size in self.parts)]
        position = byte_range.start
        index = bisect.bisect_right(starts, position) - 1
        while position < byte_range.end:
            number, size = self.parts[index]
            begin = position - starts[index]
            end = min(size, byte_range.end - starts[index])
            yield number, ByteRange(begin, end)
            position = starts[index] + end
            index += 1

    def to_json(self) -> bytes:
        document = {
            "format": _FORMAT,
            "generation": self.generation,
            "size_bytes": self.size_bytes,
            "parts": [list(part) for part in self.parts],
        }
        text = json.dumps(document, separators=(",", ":"))
        return (text + " " * _RANDOM.randrange(_PADDING)).encode()

    @classmethod
    def parse(cls, data: bytes, mtime_ns: int) -> Manifest | None:
        """None where `data` is no manifest of this format, whole and consistent."""
        try:
            document = json.loads(data)
        except ValueError:
            return None
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            return None
        generation, listed = document.get("generation"), document.get("parts")
        if not isinstance(generation, str) or not is_generation(generation):
            return None
        if not isinstance(listed, list) or len(listed) > MAX_PARTS:
            return None
        if not all(_is_part(part) for part in listed):
            return None
        numbers = [number for number, _ in listed]
        parts = tuple((number, size) for number, size in listed)
        manifest = cls(generation, parts, mtime_ns)
        if numbers != sorted(set(numbers)) or document.get("size_bytes") != manifest.size_bytes:
            return None
        return manifest


def _is_part(part: Any) -> bool:
    if not isinstance(part, list) or len(part) != 2:
        return False
    is_whole = all(isinstance(value, int) and not isinstance(value, bool) for value in part)
    return is_whole and 1 <= part[0] <= MAX_PARTS and part[1] > 0


@dataclass(frozen=True, slots=True)
class _Kept:
    version: str
    """The manifest's own, at the store."""
    manifest: Manifest
    settled: bool


class Manifests:
    """Reads manifests, and keeps the last of each file. Any thread may call."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        # path -> last manifest read, least recently used first; guarded by the lock.
        self._by_path: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, operation: str, path: str) -> Manifest | None:
        """The manifest that counts now; None where the file is not chunked.

        One look at the store, and a read where it is not the one that was read last.

        Raises:
            Unavailable: there is one, and it cannot be understood.
        """
        location = manifest_path(path)
        for _ in range(_TRIES):
            try:
                found = self._volume.stat(location)
            except (NotFound, InvalidRequest):
                # Invalid where the longer name is too long for the store: then there is none.
                self.forget(path)
                return None
            if found.is_directory:
                return None
            kept = self._kept(path)
            if kept is not None and kept.settled and kept.version == found.version:
                return kept.manifest
            manifest = None
            if found.size_bytes <= _MAX_MANIFEST_BYTES:
                data = bytearray(found.size_bytes)
                whole = ByteRange(0, found.size_bytes)
                try:
                    self._volume.read_into(location, whole, data, version=found.version)
                except (PreconditionFailed, NotFound, InexactRange):
                    # Replaced since the look.
                    continue
                manifest = Manifest.parse(bytes(data), found.mtime_ns)
            if manifest is None:
                reason = (
                    f"{location} is no manifest that can be understood; is a newer version due?"
                )
                raise Unavailable(operation, path, reason)
            self._keep(path, found, manifest)
            return manifest
        raise Unavailable(operation, path, "the file is replaced faster than it can be looked at")

    def of_version(self, path: str, version: str) -> Manifest | None:
        """The manifest of a file's version where it was the last one read: costs nothing."""
        kept = self._kept(path)
        return kept.manifest if kept is not None and kept.manifest.version == version else None

    def forget(self, path: str) -> None:
        with self._lock:
            self._by_path.pop(path, None)

    def _kept(self, path: str) -> _Kept | None:
        with self._lock:
            return self._by_path.get(path)

    def _keep(self, path: str, found: FileStat, manifest: Manifest) -> None:
        settled = time() - found.mtime_ns / 1e9 > _SETTLED_SECONDS
        with self._lock:
            self._by_path[path] = _Kept(found.version, manifest, settled)
            self._by_path.move_to_end(path)
            while len(self._by_path) > _KEPT:
                self._by_path.popitem(last=False)
