"""One pass over a tree of files, in bounded memory. Called by `sources`.

Directories are listed page by page, several at once, since on a store each page is a request. Of a
directory there is one page at a time, so that a directory of any length takes the memory of a page.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from trainmount.data.manifest import Entry, is_hidden

__all__ = ["Found", "Pages", "begin_of", "depth_of", "walk"]

_PAGES_AT_ONCE: Final = 8

_MAGIC: Final = re.compile(r"[*?]")


@dataclass(frozen=True, slots=True)
class Found:
    """One name of a directory."""

    name: str
    is_directory: bool
    size_bytes: int = 0
    version: str = ""


Pages = Iterator[Sequence[Found]]


def walk(
    pages_of: Callable[[str], Pages], pattern: str, matches: re.Pattern[str]
) -> Iterator[Entry]:
    """All files whose relative path matches, in any order. Of `pages_of`, with a directory relative
    to the root, what a page is may come from any thread; what it raises is raised here.
    """
    # Imported late: a directory of this machine needs nothing else of the volume client.
    from trainmount_files.transfer.workers import Workers

    begin, max_depth = begin_of(pattern), depth_of(pattern)
    workers = Workers(_PAGES_AT_ONCE, "trainmount-list")
    # Those listed first are entered first: files of one directory come together.
    waiting: deque[tuple[str, Pages]] = deque([(begin, pages_of(begin))])
    coming: deque[tuple[str, Pages, Future[Sequence[Found] | None]]] = deque()
    try:
        while waiting or coming:
            while waiting and len(coming) < _PAGES_AT_ONCE:
                directory, pages = waiting.popleft()
                coming.append((directory, pages, workers.submit(_next_of(pages))))
            directory, pages, page = coming.popleft()
            found = page.result()
            if found is None:
                continue
            waiting.appendleft((directory, pages))
            for each in found:
                if is_hidden(each.name):
                    continue
                path = f"{directory}/{each.name}" if directory else each.name
                if not each.is_directory:
                    if matches.fullmatch(path):
                        yield Entry(path, each.size_bytes, each.version)
                elif max_depth is None or path.count("/") < max_depth:
                    waiting.append((path, pages_of(path)))
    finally:
        workers.close(wait_seconds=0)


def begin_of(pattern: str) -> str:
    """The directory below which all that matches is."""
    magic = _MAGIC.search(pattern)
    begin = pattern[: magic.start() if magic else len(pattern)].rpartition("/")[0]
    return "" if any(map(is_hidden, begin.split("/"))) else begin


def depth_of(pattern: str) -> int | None:
    """How many directories deep what matches can be; None is any."""
    return None if "**" in pattern else pattern.count("/")


def _next_of(pages: Pages) -> Callable[[], Sequence[Found] | None]:
    return lambda: next(pages, None)
