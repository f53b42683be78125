"""What a checkpoint looks like in storage. Pure; called by everything in this package.

    <path>/<generation>/r<rank>-<number>.bin    bytes of tensors and objects, one item after another
    <path>/<generation>/metadata                what torch's DCP knows of them, pickled
    <path>/<generation>/commit.json             every file with size and checksum; written last

Version 1 has CRC-32 checksums; since version 2 the commit record names the algorithm. Both are
read. A generation without a commit record is no checkpoint. Names of generations sort in the order
of their saves.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from trainmount.checkpoint.checksums import CRC32
from trainmount.errors import DamagedCheckpoint

__all__ = [
    "BLOCK_BYTES",
    "COMMIT_NAME",
    "METADATA_NAME",
    "CommitRecord",
    "StoredFile",
    "StoredItem",
    "block_bytes_of",
    "blocks_of",
    "generation_number",
    "new_generation",
    "shard_name",
]

COMMIT_NAME: Final = "commit.json"
METADATA_NAME: Final = "metadata"

# Each block of an item has a checksum of its own, so that a rank that needs a slice reads and
# verifies only the blocks the slice touches. 256 KiB at most: 1 GiB has 4096 checksums then. Of
# smaller items, 64 to 128 blocks: half of one is then read with a twentieth more than needed.
BLOCK_BYTES: Final = 256 << 10
_LEAST_BLOCK_BYTES: Final = 4 << 10
_LEAST_BLOCKS: Final = 64

_FORMAT: Final = "trainmount-checkpoint"
_VERSION: Final = 2
_FIRST_VERSION: Final = 1
_GENERATION: Final = re.compile(r"g(\d{8})-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a generation as the commit record lists it."""

    name: str
    size_bytes: int

    checksum: str
    """Of the whole file: `xxh3:` and 16 hexadecimal digits, or `crc32:` and 8."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Where the bytes of one tensor chunk or object are, and how to check them. Pickled in the
    metadata.
    """

    file_name: str

    offset: int
    """In bytes, from the file's start."""

    length: int
    """In bytes."""

    checksums: tuple[int, ...]
    """Of each block of `block_bytes`, by the commit record's algorithm; the last block may be
    short. An empty item has none.
    """

    dtype: str = ""
    """Name in torch, such as `bfloat16`; empty for an object, which is stored as torch serialises
    it.
    """

    shape: tuple[int, ...] = ()
    """Of the chunk; its elements are stored in row-major order."""

    @property
    def block_bytes(self) -> int:
        """A power of two, `BLOCK_BYTES` at most."""
        found = block_bytes_of(self.length)
        # In version 1, blocks of all items had the same length.
        return found if len(self.checksums) == -(-self.length // found) else BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """The record that makes a generation a checkpoint."""

    generation: str
    world_size: int
    files: tuple[StoredFile, ...]
    """All files of the generation but this record."""

    algorithm: str = CRC32.name
    """Of all checksums, `checksums.find_algorithm` knows it."""

    extra: dict[str, Any] = field(default_factory=dict)
    """The caller's own, JSON-able; the checkpointer keeps the step here."""

    def to_json(self) -> bytes:
        """The file's content; the last line but one is the CRC-32 of what stands before it."""
        described = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        body = json.dumps(described, indent=1)
        checksum = CRC32.text(CRC32.of(body.encode("utf-8")))
        return f'{body[:-2]},\n "checksum": "{checksum}"\n}}\n'.encode()

    @classmethod
    def from_json(cls, text: bytes, where: str) -> CommitRecord:
        """Raises DamagedCheckpoint, naming `where`, if it is no commit record of this version."""
        try:
            described = json.loads(text)
            version = described["version"]
            if described["format"] != _FORMAT or not _FIRST_VERSION <= version <= _VERSION:
                raise DamagedCheckpoint(
                    f"{where}: is not a commit record of version {_FIRST_VERSION} to {_VERSION}"
                )
            record = cls(
                generation=described["generation"],
                world_size=int(described["world_size"]),
                files=tuple(StoredFile(**file) for file in described["files"]),
                algorithm=str(described["algorithm"]) if version > _FIRST_VERSION else CRC32.name,
                extra=dict(described["extra"]),
            )
            if version > _FIRST_VERSION and record.to_json() != text:
                raise DamagedCheckpoint(
                    f"{where} is damaged: its bytes do not match its own checksum"
                )
            return record
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(f"{where}: is not a commit record: {error!r}") from error


def new_generation(existing: list[str]) -> str:
    """A name after all existing ones, and unlike any that another job takes at the same moment."""
    numbers = [generation_number(name) or 0 for name in existing]
    return f"g{max(numbers, default=0) + 1:08d}-{uuid.uuid4().hex[:8]}"


def generation_number(name: str) -> int | None:
    """The place of a generation among the saves; None for any other name."""
    match = _GENERATION.fullmatch(name)
    return int(match.group(1)) if match else None


def shard_name(rank: int, number: int) -> str:
    return f"r{rank:05d}-{number:03d}.bin"


def block_bytes_of(length: int) -> int:
    """The length of the blocks of an item of so many bytes."""
    wish = length // _LEAST_BLOCKS
    return min(BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, 1 << wish.bit_length() >> 1))


def blocks_of(memory: memoryview, block_bytes: int) -> Iterator[memoryview]:
    """An item's bytes, or those from a block's start on, in the blocks that have checksums."""
    for start in range(0, len(memory), block_bytes):
        yield memory[start : start + block_bytes]
