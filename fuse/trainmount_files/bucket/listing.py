"""Pages of a directory's entries out of a bucket's keys. Called by `volume.py`.

obstore lists in two ways, and neither is paged by directory:

- all keys below a prefix, from any key on, as they come: memory stays small, but a directory's
  entries have to be picked out of everything below it. Where a directory is met that holds more
  than a request's worth of keys, the listing starts anew behind it.
- the direct entries of a prefix, all at once: one request for each 1,000, and the memory of them
  all (about 1 KB each).

So a page is read the first way, which is right for a directory of a million files, until it has met
some large directories; from there on the second way, which is right for a thousand directories of a
thousand files. The root of a bucket is always listed the second way, because the first cannot tell
`/name` from `name`.

Where a key is met that no path can name, obstore gives no other entry of its directory. S3 is then
asked past obstore (`signed_listing.py`), page by page.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from trainmount_files.bucket.answers import refused_key
from trainmount_files.bucket.keys import Meta, Opened, is_hidden, to_stat
from trainmount_files.bucket.library import Calls
from trainmount_files.bucket.signed import SignedRequests
from trainmount_files.bucket.signed_listing import SignedListing
from trainmount_files.errors import InvalidRequest, NotADirectory, NotFound, Unsupported
from trainmount_files.paths import join
from trainmount_files.volume import FileStat, Page

__all__ = ["Listing"]

log = logging.getLogger(__name__)

_KEYS: Final = 1000
"""Keys of one request, by all stores."""

_MAX_SKIPS: Final = 4
"""Large directories passed in one page before the other way is taken."""

_MAX_CHECKED: Final = 16
"""Empty files that are asked for one by one: each may be a directory's key that ends in a slash."""

_LAST: Final = "\U0010ffff"
"""Sorts behind every name."""

_SNAPSHOTS: Final = 2
"""Listings of the second way that are kept for their further pages."""

_FLAT, _WHOLE, _SIGNED = "f", "w", "s"


@dataclass(frozen=True, slots=True)
class _PastObstore:
    """What obstore could not list."""

    after: str
    """The position from which on."""

    key: str
    """The key that it took offence at."""

    known: Page | None = None
    """What it could tell."""


class Listing:
    """The pages of one volume's directories. Any thread may call.

    A page token is how the listing goes on, and the position: a name, with a slash behind a
    directory's, in the order of the keys; or S3's own token.
    """

    def __init__(
        self, opened: Opened, calls: Calls, signed: SignedRequests | None, page_entries: int
    ) -> None:
        self._opened = opened
        self._calls = calls
        self._signed = SignedListing(signed, page_entries) if signed is not None else None
        self._page_entries = page_entries
        # path -> entries with their positions; guarded by the lock.
        self._snapshots: OrderedDict[str, list[tuple[str, FileStat]]] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, path: str, key: str, token: str | None) -> Page:
        """One page of the directory `path`, whose keys begin with `key`.

        Raises:
            NotFound, NotADirectory: as the protocol has it.
            InvalidRequest: the page token is not of this volume; or among the entries is a key that
            no path can name, and this store can be listed by obstore only.
        """
        ways = (_FLAT, _WHOLE) if self._signed is None else (_FLAT, _WHOLE, _SIGNED)
        if token is not None and token[:1] not in ways:
            raise InvalidRequest("list", path, "the page token is not of this volume")
        if token is not None and token[0] == _SIGNED:
            return self._signed_page(path, key, token=token[1:])
        found = self._calls.run("list", path, lambda: self._by_obstore(path, key, token))
        if isinstance(found, Page):
            return found
        reason = ""
        if self._signed is not None:
            try:
                return self._signed_page(path, key, after=found.after)
            except Unsupported as error:
                reason = f" ({error.reason})"
        if found.known is not None:
            return found.known
        raise InvalidRequest("list", path, f"no path can name the key {found.key}{reason}")

    def _signed_page(
        self, path: str, key: str, *, after: str = "", token: str | None = None
    ) -> Page:
        assert self._signed is not None
        if after.endswith("/"):
            after += _LAST
        entries, refused, following = self._signed.page(path, key, after=after, token=token)
        if refused:
            log.warning("keys that no path can name are left out", extra={"path": path})
        return Page(tuple(entries), None if following is None else _SIGNED + following, refused)

    async def _by_obstore(self, path: str, key: str, token: str | None) -> Page | _PastObstore:
        found = await self._first_or_next(path, key, token)
        if found is not None:
            return found
        if not path:
            return Page((), None)
        if await self._opened.head(key) is not None:
            raise NotADirectory("list", path, "is a file")
        raise NotFound("list", path, "nothing is there")

    async def _first_or_next(
        self, path: str, key: str, token: str | None
    ) -> Page | _PastObstore | None:
        """None: nothing is there."""
        opened = self._opened
        way, after = (token[0], token[1:]) if token else (_FLAT if key else _WHOLE, "")
        if way == _FLAT:
            reader = _Flat(path, key, after, self._page_entries)
            if await reader.read(opened):
                nothing = reader.has_ended and not reader.has_seen_any and token is None
                return None if nothing else reader.page()
        try:
            return await self._whole(path, key, after, is_first=token is None)
        except (ValueError, opened.library.exceptions.InvalidPathError) as error:
            bad_key = refused_key(error)
            if bad_key is None:
                raise
            return _PastObstore(after, bad_key)

    async def _whole(
        self, path: str, key: str, after: str, *, is_first: bool
    ) -> Page | _PastObstore | None:
        opened = self._opened
        refused: tuple[str, ...] = ()
        with self._lock:
            kept = None if is_first else self._snapshots.get(path)
        if kept is None:
            found = await opened.library.list_with_delimiter_async(opened.store, key or None)
            prefixes, objects = found["common_prefixes"], found["objects"]
            if not prefixes and not objects and key:
                return None
            kept, refused = _entries(path, key, prefixes, objects)
        rest = [entry for entry in kept if entry[0] > after]
        chosen = rest[: self._page_entries]
        more = len(rest) > len(chosen)
        with self._lock:
            if more:
                self._snapshots[path] = kept
                self._snapshots.move_to_end(path)
            else:
                self._snapshots.pop(path, None)
            while len(self._snapshots) > _SNAPSHOTS:
                self._snapshots.popitem(last=False)
        page = Page(
            tuple(entry for _, entry in chosen),
            _WHOLE + chosen[-1][0] if more else None,
            refused if not after else (),
        )
        if not page.refused:
            return page
        if self._signed is None:
            log.warning("keys that no path can name are left out", extra={"path": path})
            return page
        return _PastObstore(after, page.refused[0], page)


class _Flat:
    """One page of a directory, picked out of all keys below it."""

    def __init__(self, path: str, key: str, after: str, most: int) -> None:
        self.has_ended = False
        self.has_seen_any = False
        self._path = path
        self._key = key
        self._most = most
        # Everything up to here has been seen.
        self._position = after
        self._entries: list[FileStat] = []
        self._skips = 0
        self._directory = ""
        self._inside = 0

    async def read(self, opened: Opened) -> bool:
        """False: this way cannot tell what is there."""
        try:
            while not self.has_ended and not self._is_full and self._skips <= _MAX_SKIPS:
                await self._read_from_position(opened)
        except (ValueError, opened.library.exceptions.InvalidPathError) as error:
            if refused_key(error) is None:
                raise
            # It may be in another directory below.
            return False
        return await self._check_empty(opened)

    def page(self) -> Page:
        if self.has_ended:
            return Page(tuple(self._entries), None)
        way = _FLAT if self._is_full else _WHOLE
        return Page(tuple(self._entries), way + self._position)

    @property
    def _is_full(self) -> bool:
        return len(self._entries) >= self._most

    async def _read_from_position(self, opened: Opened) -> None:
        offset = f"{self._key}/{self._position}" if self._position else None
        stream = opened.library.list(opened.store, self._key, offset=offset, chunk_size=_KEYS)
        async for metas in stream:
            # Not a look further where the page is full: that would be a request for nothing.
            if not self._take(metas) or self._is_full:
                return
        self.has_ended = True

    def _take(self, metas: list[Meta]) -> bool:
        """False: go on behind the position, in another request or another page."""
        for meta in metas:
            self.has_seen_any = True
            rest: str = meta["path"][len(self._key) + 1 :]
            name, slash, _ = rest.partition("/")
            if slash and name == self._directory:
                self._inside += 1
                if self._inside > _KEYS:
                    self._skips += 1
                    return False
                continue
            if self._is_full:
                return False
            if not name:
                # The directory's own key, which ends in a slash.
                continue
            self._position = f"{name}/{_LAST}" if slash else name
            if slash:
                self._directory, self._inside = name, 1
            if is_hidden(self._path, name):
                continue
            path = join(self._path, name)
            self._entries.append(
                FileStat(path, is_directory=True) if slash else to_stat(path, meta)
            )
        return True

    async def _check_empty(self, opened: Opened) -> bool:
        """Tell empty files from directories' keys that end in a slash. False: too many to ask."""
        empty = [
            entry for entry in self._entries if not entry.is_directory and not entry.size_bytes
        ]
        if len(empty) > _MAX_CHECKED:
            return False
        found = await asyncio.gather(*(opened.head(f"{self._key}/{entry.name}") for entry in empty))
        slashed = {entry.path for entry, meta in zip(empty, found, strict=True) if meta is None}
        if slashed:
            kept = [e for e in self._entries if e.is_directory or e.path not in slashed]
            slashed -= {entry.path for entry in kept if entry.is_directory}
            kept += [FileStat(path, is_directory=True) for path in slashed]
            self._entries = sorted(kept, key=lambda e: e.path + ("/" if e.is_directory else ""))
        return True


def _entries(
    path: str, key: str, prefixes: list[str], objects: list[Meta]
) -> tuple[list[tuple[str, FileStat]], tuple[str, ...]]:
    """Entries with their positions, in order; and what no path can name."""
    start = len(key) + 1 if key else 0
    entries: list[tuple[str, FileStat]] = []
    refused: list[str] = []
    for prefix in prefixes:
        name = prefix[start:]
        if not name:
            # Keys that begin with a slash.
            refused.append("/")
        elif not is_hidden(path, name):
            entries.append((name + "/", FileStat(join(path, name), is_directory=True)))
    for meta in objects:
        name = meta["path"][start:]
        # Without a name it is the directory's own key, which ends in a slash.
        if name and not is_hidden(path, name):
            entries.append((name, to_stat(join(path, name), meta)))
    entries.sort(key=lambda entry: entry[0])
    return entries, tuple(refused)
