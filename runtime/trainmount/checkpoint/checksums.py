"""The checksums of a checkpoint's bytes. Pure; called by whatever writes or verifies them.

A checkpoint names its algorithm in the commit record. New ones take XXH3, which costs half of what
CRC-32 does and less; where `xxhash` is not installed, CRC-32 of the standard library.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from trainmount.errors import CheckpointError

try:
    import xxhash
except ImportError:  # pragma: no cover - the environment of tests has it
    xxhash = None  # type: ignore[assignment]

__all__ = ["CRC32", "Algorithm", "Running", "best_algorithm", "find_algorithm"]

Buffer = bytes | bytearray | memoryview


class Running(Protocol):
    """A checksum of bytes that come one after another."""

    def update(self, data: Buffer, /) -> None: ...

    def intdigest(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to tell whether bytes are as they were."""

    name: str
    """As commit records say it: `xxh3` or `crc32`."""

    digits: int
    """Hexadecimal digits of a checksum."""

    of: Callable[[Buffer], int]

    start: Callable[[], Running]

    def text(self, checksum: int) -> str:
        """As commit records write it, `xxh3:` and 16 hexadecimal digits."""
        return f"{self.name}:{checksum:0{self.digits}x}"


class _RunningCrc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


CRC32: Final = Algorithm("crc32", 8, zlib.crc32, _RunningCrc32)
"""What checkpoints of layout version 1 have."""


def best_algorithm() -> Algorithm:
    """The one that new checkpoints take on this machine."""
    return _xxh3() or CRC32


def find_algorithm(name: str) -> Algorithm:
    """The algorithm that a commit record names.

    Raises:
        CheckpointError: it is unknown, or its package is not installed.
    """
    if name == CRC32.name:
        return CRC32
    if name != "xxh3":
        raise CheckpointError(f"checksums by {name!r} are of a later version of trainmount")
    found = _xxh3()
    if found is None:
        raise CheckpointError(
            "the checkpoint has XXH3 checksums, which need xxhash: pip install xxhash"
        )
    return found


def _xxh3() -> Algorithm | None:
    if xxhash is None:
        return None
    return Algorithm("xxh3", 16, xxhash.xxh3_64_intdigest, xxhash.xxh3_64)
