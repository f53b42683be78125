"""The one protocol behind which every store stands, and the values that cross it.

A volume is a tree of files behind a URL. Paths are relative to its root, with `/` between names, no
leading slash and no `.` or `..`; the root is the empty string. Every method may be called from any
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, Protocol, runtime_checkable

from trainmount_files.errors import Unavailable

__all__ = [
    "MIB",
    "AbandonsUploads",
    "ByteRange",
    "Capabilities",
    "FileStat",
    "Page",
    "Progress",
    "ReadsToFile",
    "TakesFileParts",
    "Upload",
    "Volume",
    "list_directory",
    "list_pages",
]

MIB: Final = 1 << 20

Buffer = bytes | bytearray | memoryview

Progress = Callable[[int], None]
"""Called with the number of bytes that have newly arrived or been stored; from any thread.

A piece that has to be moved a second time is not counted again. What it raises ends the transfer.
"""


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """The bytes from `start` up to but not including `end`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"range must satisfy 0 <= start <= end, got {self.start}, {self.end}")

    def __len__(self) -> int:
        return self.end - self.start

    def to_header(self) -> str:
        """The value of a `Range` header; the range must not be empty."""
        # RFC 9110 ranges are inclusive at both ends; ours are not.
        return f"bytes={self.start}-{self.end - 1}"


@dataclass(frozen=True, slots=True)
class FileStat:
    """What a store says of one path at one moment."""

    path: str
    """Relative to the volume's root."""

    is_directory: bool

    size_bytes: int = 0
    """0 for a directory."""

    mtime_ns: int = 0
    """Nanoseconds since the epoch; 0 where the store does not tell (directories of the Files API).

    The store's own resolution: one second from the Files API's HEAD, one millisecond from its
    listing.
    """

    version: str = ""
    """Opaque, compared for equality only; different contents differ as far as the store tells.

    From the Files API: size and modification time cut to the second, so that HEAD and listing
    agree. Empty for a directory, and where the caller did not want it.
    """

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Page:
    """One answer of a listing. May be short or empty although `next_page_token` is set."""

    entries: tuple[FileStat, ...]
    next_page_token: str | None

    refused: tuple[str, ...] = ()
    """What the store lists and no path can name, `..` or a name with a NUL, as it came. Whoever
    copies a tree must say that these are left out.
    """


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kind of volume can do beyond the protocol."""

    atomic_rename: bool = False
    """`rename` is one step for files. The Files API has none: a rename is a copy and a delete."""

    renames_through_client: bool = False
    """The store cannot copy: `rename` reads the file and stores it anew, so that who has its bytes
    already does better.
    """

    exclusive_create: bool = True
    """`overwrite=False` is held by the store itself, against a race."""

    keeps_directories: bool = True
    """A directory stays when its last entry is gone. Of a bucket, only one that `make_directory`
    made does.
    """

    coarse_versions: bool = False
    """Contents of one size that are stored within one second of each other have one version."""

    max_put_bytes: int | None = None
    """Largest file that one `put` may have; None is no limit below the store's own."""

    min_part_bytes: int = 5 * MIB
    """Every part but the last has at least this size."""

    max_parts: int = 10_000

    max_part_bytes: int = 4 << 30
    """No part may be larger."""

    part_bytes: int = 16 * MIB
    """Size of parts that the store likes best; between the two bounds."""

    parts_in_order: bool = False
    """Parts go on to the store in their order, several at once behind one `put_part`: threads that
    put them gain nothing, and parts ahead of their turn take memory.
    """

    copies_parts: bool = False
    """`complete` copies the parts together, so that sending them early gains nothing."""


class Upload(Protocol):
    """A file in the making from numbered parts; nothing is at the path before `complete`."""

    def put_part(self, part_number: int, data: Buffer) -> None:
        """Store part `part_number`, from 1, in any order, from any thread; a repeat replaces."""
        ...

    def complete(self) -> FileStat:
        """Make the file visible in one step and return it. May be called once.

        Raises:
            AlreadyExists: the upload was started with `overwrite=False` and lost the race.
        """
        ...

    def abort(self) -> None:
        """Give up and free what was stored; safe to repeat and after `complete`; never raises."""
        ...


class Volume(Protocol):
    """A tree of files behind a URL."""

    @property
    def url(self) -> str:
        """Where the volume is, without any credential: `/Volumes/c/s/v/dir`, `file:///dir`."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def stat(self, path: str) -> FileStat:
        """Raises NotFound."""
        ...

    def list_page(self, path: str, page_token: str | None = None) -> Page:
        """One page of a directory's direct entries, in the store's order.

        Raises:
            NotFound: nothing at `path`.
            NotADirectory: a file is at `path`.
        """
        ...

    def read_into(
        self,
        path: str,
        byte_range: ByteRange,
        buffer: bytearray | memoryview,
        *,
        version: str | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Fill the first `len(byte_range)` bytes of `buffer` with exactly that range, or raise.

        The range must lie inside the file. Where the call raises, the buffer's content is
        undefined. With `version`, bytes of another version are never returned.

        Raises:
            InexactRange: the range reaches past the end, or the store gave other bytes than asked
            for. PreconditionFailed: the file is another version now.
        """
        ...

    def put(
        self, path: str, data: Buffer, *, overwrite: bool = True, want_version: bool = True
    ) -> FileStat:
        """Store a whole small file in one request. Parents are made.

        Without `want_version`, `mtime_ns` and `version` of the answer are 0 and empty where finding
        them out would cost another request (the Files API).

        Raises:
            AlreadyExists: `overwrite=False` and something is at the path.
            TooLarge: above `capabilities.max_put_bytes`.
        """
        ...

    def upload(
        self,
        path: str,
        source: BinaryIO,
        size_bytes: int,
        *,
        overwrite: bool = True,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
        want_version: bool = True,
    ) -> FileStat:
        """Store `size_bytes` bytes of a real file, read from its start by position with `os.pread`.

        Memory does not grow with the size: parts are slices of the file. Atomic: the path shows the
        old content or none until the whole of the new one is there. A failed upload is aborted.
        Parents are made. `want_version` as in `put`.

        Raises:
            AlreadyExists: `overwrite=False` and something is at the path.
            InvalidRequest: the source has fewer bytes than `size_bytes`.
            TooLarge: above a limit of the store.
        """
        ...

    def start_upload(
        self, path: str, *, overwrite: bool = True, cancel: threading.Event | None = None
    ) -> Upload:
        """Begin a file from parts. `cancel` ends every call of the upload but `abort`."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file. Raises NotFound, IsADirectory."""
        ...

    def rename(self, source: str, destination: str) -> FileStat:
        """Move a file over whatever file is at `destination`.

        One step where `capabilities.atomic_rename`; otherwise a copy and a delete, in that order.
        """
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents; one that is there is fine.

        Raises AlreadyExists over a file.
        """
        ...

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory. Raises NotFound, NotADirectory, DirectoryNotEmpty."""
        ...

    def close(self) -> None:
        """Free connections. Calls after it raise."""
        ...


@runtime_checkable
class ReadsToFile(Protocol):
    """What a volume may offer besides: a range of any length to a local file in little memory."""

    def read_to_file(
        self,
        path: str,
        byte_range: ByteRange,
        descriptor: int,
        *,
        version: str | None = None,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Write exactly that range of the file at `byte_range.start` of an open local file.

        As `Volume.read_into`; where the call raises, what stands in the range is undefined.

        Raises:
            OSError: the local file cannot be written.
        """
        ...


@runtime_checkable
class TakesFileParts(Protocol):
    """What an `Upload` may offer besides: parts that are read from a local file while they are
    sent, which takes no memory.
    """

    def put_file_part(self, part_number: int, descriptor: int, byte_range: ByteRange) -> None:
        """As `put_part` of that range of an open file, which must stay open and as it is.

        Raises:
            InvalidRequest: the file ends before. LocalError: it cannot be read.
        """
        ...


@runtime_checkable
class AbandonsUploads(Protocol):
    """What a volume may offer besides: another process can free what an upload left that was
    neither completed nor aborted.
    """

    def token_of(self, upload: Upload) -> str:
        """What `abandon_upload` needs to find it. As good as a password for this upload: not for
        logs.
        """
        ...

    def abandon_upload(self, path: str, token: str) -> bool:
        """As `Upload.abort`, of an upload to `path` that somebody began. Whether nothing is left of
        it; never raises.
        """
        ...


def list_directory(volume: Volume, path: str) -> Iterator[FileStat]:
    """Every direct entry of a directory, page by page.

    Raises:
        Unavailable: the store hands out a page token a second time, which would never end.
    """
    for page in list_pages(volume, path):
        yield from page.entries


def list_pages(volume: Volume, path: str) -> Iterator[Page]:
    """As `list_directory`, the pages as they come."""
    seen: set[str] = set()
    token: str | None = None
    while True:
        page = volume.list_page(path, token)
        yield page
        token = page.next_page_token or None
        if token is None:
            return
        if token in seen:
            raise Unavailable("list", path, "the store repeated a page token")
        seen.add(token)
