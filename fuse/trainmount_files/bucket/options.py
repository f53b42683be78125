"""How a bucket volume behaves. Built by `open.py` and tests, read by `volume.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from trainmount_files.retry import RetryPolicy
from trainmount_files.volume import MIB

__all__ = ["MAX_PARTS", "BucketOptions"]

MAX_PARTS: Final = 10_000
"""Of one upload, by S3 and GCS; Azure takes 50,000."""

_S3_MIN_PART_BYTES: Final = 5 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """Sizes, patience and storage options of a bucket volume."""

    storage: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Explicit settings of the store, above what the environment says: `endpoint`, `region`,
    `access_key_id`, `account_name`, … as obstore names them (with or without `aws_`, `google_`,
    `azure_` before), and `timeout`, `allow_http`, `proxy_url` … of its HTTP client.

    Never shown. They travel with a pickled volume only while a child process is being spawned.
    """

    part_size_bytes: int = 8 * MIB
    """Size of one part of an upload; files up to this size are one request.

    Grows with the file, so that 10,000 parts hold it. Below 5 MiB only where the store allows it.
    """

    parallelism: int = 3
    """Parts of one upload under way at once.

    An upload holds this many parts and one more in memory: 32 MiB up to a file of 80 GB; from there
    on fewer and larger parts.
    """

    window_bytes: int = 16 * MIB
    """Parts of a `start_upload` that wait in memory for those before them; what does not fit waits
    in a temporary file.
    """

    held_back_bytes: int = 4 * MIB
    """The last parts of a `start_upload` that wait although they are next, so that a repeat can
    still replace them; at most `window_bytes`.
    """

    page_entries: int = 1000
    """Entries of one page of a listing, which is also what the stores answer at most."""

    check_names: bool = True
    """Whether `put` and `upload` ask first if a directory has the name, or a parent is a file.

    That is one listing more a file, at the same time as a request for each parent that was not seen
    in the last minute. Without it a bucket may come to hold both `p` and `p/f`.
    """

    read_timeout_seconds: float = 60.0
    """Longest silence of the store in the midst of a request."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Deadline and delays of a request's repetitions, which obstore makes by itself.

    It repeats 5xx, 429, 408 and lost connections, the last only of requests that may be repeated;
    it takes no notice of `Retry-After`.
    """

    def __post_init__(self) -> None:
        if self.part_size_bytes < 1 or self.parallelism < 1 or self.page_entries < 1:
            raise ValueError("part_size_bytes, parallelism and page_entries must be positive")

    def part_bytes_of(self, size_bytes: int) -> int:
        """Size of the parts of a file of that many bytes."""
        needed = -(-size_bytes // MAX_PARTS)
        if needed <= self.part_size_bytes:
            return self.part_size_bytes
        return -(-needed // MIB) * MIB

    def parallelism_of(self, part_bytes: int) -> int:
        """Parts under way at once, fewer the larger they are."""
        return max(1, self.parallelism * self.part_size_bytes // part_bytes)

    @property
    def min_part_bytes(self) -> int:
        return min(_S3_MIN_PART_BYTES, self.part_size_bytes)
