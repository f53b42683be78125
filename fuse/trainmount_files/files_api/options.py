"""What a Files API volume can be told. Defaults are for a training node; tests scale them down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from trainmount_files.files_api.transport import TransportOptions
from trainmount_files.retry import RetryPolicy
from trainmount_files.volume import MIB

__all__ = ["MAX_PARTS", "MAX_PART_BYTES", "MAX_PUT_BYTES", "FilesApiOptions"]

MAX_PUT_BYTES: Final = 5 << 30
"""Largest file of a single request; the service's limit."""

MAX_PART_BYTES: Final = 4 << 30
"""Largest part of an upload; the service's limit."""

MAX_PARTS: Final = 10_000
"""Most parts of an upload; the service's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesApiOptions:
    """How a volume of the Files API moves bytes."""

    multipart_threshold_bytes: int = 50 * MIB
    """Files below are stored by one request; the SDK has the same bound."""

    part_size_bytes: int = 16 * MIB
    """Size of an upload's parts; grows by itself where 10,000 parts would not hold the file.

    Parts are read from the file while they are sent, so that the size costs no memory. It is what
    is sent again when a connection breaks.
    """

    min_part_bytes: int = 5 * MIB
    """Smallest part that the service takes, but for the last one of a file."""

    max_parts: int = MAX_PARTS
    """Most parts of an upload."""

    max_part_bytes: int = MAX_PART_BYTES
    """Largest part of an upload."""

    max_put_bytes: int = MAX_PUT_BYTES
    """Largest file of one request. A larger one goes up in parts, and where the store refuses those
    it is `TooLarge`.
    """

    parallelism: int = 8
    """Parts sent at once."""

    direct_read_max_bytes: int = MIB // 4
    """Reads up to this size ask the Files API itself, unless a signed URL is at hand: one request
    and not two.
    """

    url_lifetime_seconds: float = 3600.0
    """Lifetime asked for signed URLs; the service may give less."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)

    transport: TransportOptions = field(default_factory=TransportOptions)

    def __post_init__(self) -> None:
        if self.parallelism < 1:
            raise ValueError(f"parallelism must be at least 1, got {self.parallelism}")
        if not 1 <= self.max_part_bytes <= MAX_PART_BYTES:
            raise ValueError(
                f"max_part_bytes must be from 1 to {MAX_PART_BYTES}, got {self.max_part_bytes}"
            )
        if not 0 <= self.max_put_bytes <= MAX_PUT_BYTES:
            raise ValueError(
                f"max_put_bytes must be from 0 to {MAX_PUT_BYTES}, got {self.max_put_bytes}"
            )
        if not 1 <= self.min_part_bytes <= self.part_size_bytes <= self.max_part_bytes:
            raise ValueError(
                f"part_size_bytes must be from min_part_bytes ({self.min_part_bytes}) "
                f"to max_part_bytes ({self.max_part_bytes}), got {self.part_size_bytes}"
            )
        if not 1 <= self.max_parts <= MAX_PARTS:
            raise ValueError(f"max_parts must be from 1 to {MAX_PARTS}, got {self.max_parts}")
        if not 0 <= self.multipart_threshold_bytes <= MAX_PUT_BYTES:
            raise ValueError(
                f"multipart_threshold_bytes must be from 0 to {MAX_PUT_BYTES}, "
                f"got {self.multipart_threshold_bytes}"
            )
