"""Checksums that a listing may have of its files. Called by `sources`, `dataset`, `recorded`."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

__all__ = ["is_kind", "is_right", "parse_checksum", "pieces_of"]

_CRC32: Final = "crc32"
_PIECE_BYTES: Final = 1 << 20


def is_kind(name: str) -> bool:
    """Whether there are checksums of this name."""
    return name == _CRC32 or _length_of(name) is not None


def parse_checksum(text: str) -> str:
    """`text` as an `Entry` has it: `crc32:89abcdef`, or `sha256:…` and whatever else hashlib
    always has.

    Raises:
        ValueError: it is none.
    """
    kind, _, digits = text.strip().lower().partition(":")
    length = 4 if kind == _CRC32 else _length_of(kind)
    try:
        is_one = length is not None and len(bytes.fromhex(digits)) == length
    except ValueError:
        is_one = False
    if not is_one:
        raise ValueError(
            f"a checksum must be crc32: or a name of hashlib, such as sha256:, and its "
            f"hexadecimal digits, got {text!r}"
        )
    return f"{kind}:{digits}"


def is_right(checksum: str, pieces: Iterable[bytes]) -> bool:
    """Whether a file of these bytes has the checksum, one of `parse_checksum`."""
    kind, _, digits = checksum.partition(":")
    if kind == _CRC32:
        crc = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        return crc == int(digits, 16)
    digest: Any = hashlib.new(kind, usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return bool(digest.hexdigest() == digits)


def pieces_of(path: str | Path) -> Iterable[bytes]:
    """The bytes of a file of this machine, in little memory."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - once a sample
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _length_of(kind: str) -> int | None:
    """Bytes of a digest; None where hashlib has not always such ones, or they have any length."""
    if kind not in hashlib.algorithms_guaranteed:
        return None
    return hashlib.new(kind, usedforsecurity=False).digest_size or None
