"""How files and directories are kept as keys of a bucket. Called by all of the package.

A bucket has no directories. One that `make_directory` made is a key of no bytes named
`.trainmount-directory` in it, which no listing shows; any other is there as long as a key begins
with its name and a slash. Other tools keep a directory by a key that ends in a slash: obstore reads
that key as the directory's own name and cannot write or delete it.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any, Final

from trainmount_files.bucket.answers import refused_key
from trainmount_files.errors import InvalidRequest, IsADirectory
from trainmount_files.paths import STAGING_NAME, split
from trainmount_files.volume import FileStat

__all__ = [
    "DIRECTORY_KEY",
    "Meta",
    "Opened",
    "bare_etag",
    "check_file_name",
    "check_name",
    "etag_of",
    "is_hidden",
    "is_name",
    "to_stat",
    "version_of",
]

DIRECTORY_KEY: Final = ".trainmount-directory"

Meta = dict[str, Any]
"""obstore's ObjectMeta: `path`, `size`, `last_modified`, `e_tag`."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_NO_ETAG: Final = "m:"


class Opened:
    """A store together with the copy of obstore that made it."""

    def __init__(self, library: ModuleType, store: Any) -> None:
        self.library = library
        self.store = store

    async def head(self, key: str) -> Meta | None:
        """None where no object has that key."""
        try:
            found: Meta = await self.library.head_async(self.store, key)
        except FileNotFoundError:
            return None
        return found

    def head_now(self, key: str) -> Meta | None:
        """As `head`; blocks."""
        try:
            found: Meta = self.library.head(self.store, key)
        except FileNotFoundError:
            return None
        return found

    async def is_there(self, key: str) -> bool:
        return await self.head(key) is not None

    async def marked(self, key: str, mark: dict[str, str]) -> Meta | None:
        """The object at the key where it has this metadata; None of any other, or where it cannot
        be seen.
        """
        try:
            result = await self.library.get_async(self.store, key, options={"head": True})
        except (FileNotFoundError, self.library.exceptions.BaseError):
            return None
        found: Meta = result.meta
        if any(result.attributes.get(name) != value for name, value in mark.items()):
            return None
        return found

    async def some_below(self, key: str, most: int) -> set[str]:
        """Up to `most` keys that begin with `key` and a slash, in one request; `key` itself stands
        for what is only that.
        """
        stream = self.library.list(self.store, key or None, chunk_size=most)
        try:
            return {meta["path"] for meta in await anext(stream)}
        except StopAsyncIteration:
            return set()
        except (ValueError, self.library.exceptions.InvalidPathError) as error:
            # There is a key, and no path can name it.
            return {refused_key(error) or ".."}

    async def has_below(self, key: str) -> bool:
        """Whether a directory is there."""
        return bool(await self.some_below(key, 1))

    async def put_directory(self, key: str) -> None:
        """Keep a directory; one that is kept stays as it is."""
        with suppress(self.library.exceptions.AlreadyExistsError):
            await self.library.put_async(
                self.store, f"{key}/{DIRECTORY_KEY}", b"", mode="create", use_multipart=False
            )


def check_name(scheme: str, operation: str, path: str) -> tuple[str, ...]:
    """The names of `path` in a store of that scheme.

    Raises:
        InvalidRequest: a name is reserved, or no key that obstore takes can hold it.
    """
    names = split(operation, path)
    if scheme == "az" and "\\" in path:
        # It would be taken for a slash.
        raise InvalidRequest(operation, path, "Azure keeps no names with a backslash")
    for name in names:
        if _has_control_characters(name):
            raise InvalidRequest(
                operation, ascii(path)[1:-1], "a bucket's names must not hold control characters"
            )
    if DIRECTORY_KEY in names or (names and names[0] == STAGING_NAME):
        raise InvalidRequest(
            operation, path, f"the names {DIRECTORY_KEY} and {STAGING_NAME} are reserved"
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(operation, ascii(path)[1:-1], "the name is no Unicode text") from None
    return names


def check_file_name(scheme: str, operation: str, path: str) -> tuple[str, ...]:
    """As `check_name`; raises IsADirectory for the root."""
    names = check_name(scheme, operation, path)
    if not names:
        raise IsADirectory(operation, path, "is the volume's root")
    return names


def is_name(name: str) -> bool:
    """Whether a file or directory can have that name."""
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and not _has_control_characters(name)
        and not any("\ud800" <= character <= "\udfff" for character in name)
    )


def is_hidden(directory: str, name: str) -> bool:
    """Whether an entry of `directory` is ours and no file of the volume."""
    return name == DIRECTORY_KEY or (not directory and name == STAGING_NAME)


def version_of(meta: Meta) -> str:
    """The ETag; of a store that gives none, size and modification time."""
    etag: str | None = meta["e_tag"]
    return bare_etag(etag) or f"{_NO_ETAG}{meta['size']}-{_mtime_ns(meta)}"


def bare_etag(etag: str | None) -> str:
    """Without its quotes, which a listing by Azure leaves out."""
    return (etag or "").removeprefix('"').removesuffix('"')


def etag_of(version: str) -> str | None:
    """What a version is in a conditional request; None where it is no ETag."""
    if version.startswith(_NO_ETAG):
        return None
    return version if version.startswith("W/") else f'"{version}"'


def to_stat(path: str, meta: Meta) -> FileStat:
    return FileStat(
        path,
        is_directory=False,
        size_bytes=meta["size"],
        mtime_ns=_mtime_ns(meta),
        version=version_of(meta),
    )


def _has_control_characters(name: str) -> bool:
    return any(ord(character) < 32 or character == "\x7f" for character in name)


def _mtime_ns(meta: Meta) -> int:
    since: timedelta = meta["last_modified"] - _EPOCH
    return since // timedelta(microseconds=1) * 1000
