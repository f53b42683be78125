"""The verbs of fsspec that take many paths: each in threads, on the verbs for one path, which
`volumes.py` adds.

What differs from fsspec's own: a name that is there is taken as it is, also where it holds `*`,
`?` or `[`; what could not be listed is an error and not an empty directory; a listing's answer
about a file is not asked for again; every file is tried, and what failed is named at the end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from errno import EISDIR
from glob import has_magic
from pathlib import Path
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.local import LocalFileSystem, make_path_posix, trailing_sep
from fsspec.spec import AbstractFileSystem

from trainmount_files.filesystem.bulk import (
    LockedCallback,
    destinations,
    for_each,
    raise_failures,
    try_each,
)
from trainmount_files.filesystem.locations import strip

__all__ = ["Info", "ManyFilesFileSystem", "is_directory"]

Info = dict[str, Any]
"""What fsspec knows of a path: `name`, `size`, `type`, and what `volumes.py` adds."""

Found = dict[str, Info | None]
"""Paths with what is known of them; None where nobody has asked."""


def is_directory(info: Info | None) -> bool:
    return info is not None and info["type"] == "directory"


class ManyFilesFileSystem(AbstractFileSystem):  # type: ignore[misc, unused-ignore]
    """Whole trees, patterns and lists of files."""

    parallelism: int
    """Files that are worked on at once."""

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Any:
        """All files below `path`, with one listing for each directory, several at once.

        Nothing at `path` gives nothing; a directory that cannot be listed raises.
        """
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        top = strip(path)
        found: dict[str, Info] = {}
        level, depth = [top], 0
        while level and (maxdepth is None or depth < maxdepth):
            listings = try_each(
                level,
                lambda directory, _: self.ls(directory, detail=True, **kwargs),
                parallelism=self.parallelism,
            )
            below: list[str] = []
            for directory, listing in zip(level, listings, strict=True):
                if isinstance(listing, FileNotFoundError):
                    continue  # removed since its parent was listed
                if isinstance(listing, Exception):
                    raise listing
                is_file = len(listing) == 1 and listing[0]["name"] == directory
                if withdirs and not is_file:
                    found.setdefault(directory, {"name": directory, "size": 0, "type": "directory"})
                for info in listing:
                    # A bucket may have both of one name; the file must not get lost.
                    if not is_directory(info):
                        found[info["name"]] = info
                        continue
                    below.append(info["name"])
                    if withdirs:
                        found.setdefault(info["name"], info)
            level, depth = below, depth + 1
        return {name: found[name] for name in sorted(found)} if detail else sorted(found)

    def du(
        self,
        path: str,
        total: bool = True,
        maxdepth: int | None = None,
        withdirs: bool = False,
        **kwargs: Any,
    ) -> Any:
        found = self.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True, **kwargs)
        sizes = {name: info["size"] for name, info in found.items()}
        return sum(sizes.values()) if total else sizes

    def expand_path(
        self,
        path: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        assume_literal: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """The paths that a path, a pattern or several of them stand for, sorted.

        Raises FileNotFoundError where there is none.
        """
        return sorted(self._expand(path, recursive, maxdepth, assume_literal, **kwargs))

    def sizes(self, paths: Sequence[str]) -> list[Any]:
        return for_each(
            paths,
            lambda path, _: self.size(path),
            parallelism=self.parallelism,
            action="looked at",
        )

    def cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any
    ) -> Any:
        """The content of a file; of several, a dictionary by path.

        `on_error` is "raise", "omit" or "return" (the exception in place of the content).
        """
        found = self._expand(path, recursive, None)
        if isinstance(path, str) and list(found) == [strip(path)]:
            return self.cat_file(path, **kwargs)
        names = [name for name in sorted(found) if not is_directory(found[name])]
        contents = try_each(
            names, lambda name, _: self.cat_file(name, **kwargs), parallelism=self.parallelism
        )
        if on_error == "raise":
            raise_failures(contents, "read")
        pairs = zip(names, contents, strict=True)
        return {
            name: content
            for name, content in pairs
            if on_error == "return" or not isinstance(content, Exception)
        }

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> None:
        contents = {path: value} if isinstance(path, str) else path
        if not isinstance(contents, Mapping):
            raise ValueError("path must be a string or a dictionary of contents")
        for_each(
            list(contents.items()),
            lambda item, _: self.pipe_file(*item, **kwargs),
            parallelism=self.parallelism,
            action="written",
        )

    def get(
        self,
        rpath: Any,
        lpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy files to this machine, each whole or absent."""
        found: Found
        if isinstance(rpath, list) and isinstance(lpath, list):
            found = {strip(path): None for path in rpath}
            pairs = list(zip(map(strip, rpath), lpath, strict=True))
        else:
            found = self._chosen(rpath, recursive, maxdepth)
            target = make_path_posix(lpath)
            into = isinstance(target, str) and (trailing_sep(target) or Path(target).is_dir())
            is_pattern = isinstance(rpath, str) and self._is_pattern(strip(rpath))
            pairs = _paired(rpath, sorted(found), target, is_pattern=is_pattern, into=into)
        for source, place in pairs:
            if is_directory(found[source]):
                Path(place).mkdir(parents=True, exist_ok=True)
        files = [pair for pair in pairs if not is_directory(found[pair[0]])]

        def fetch(pair: tuple[str, str], child: LockedCallback, stop: threading.Event) -> None:
            source, place = pair
            self._fetch(source, place, found[source], child, stop, share=len(files), **kwargs)

        self._transfer(files, fetch, callback, "fetched")

    def put(
        self,
        lpath: Any,
        rpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy files of this machine, each whole or absent."""
        if isinstance(lpath, list) and isinstance(rpath, list):
            pairs = list(zip(lpath, map(strip, rpath), strict=True))
        else:
            source = make_path_posix(lpath)
            found = _expand_local(source, recursive, maxdepth)
            if isinstance(source, str) and (not recursive or maxdepth is not None):
                found = [path for path in found if not Path(path).is_dir()]
            is_one = isinstance(rpath, str | os.PathLike)
            target = strip(rpath) if is_one else [strip(path) for path in rpath]
            into = is_one and bool(found) and (trailing_sep(rpath) or self.isdir(rpath))
            is_pattern = _is_local_pattern(source)
            pairs = _paired(source, found, target, is_pattern=is_pattern, into=into)
        directories = [place for path, place in pairs if Path(path).is_dir()]
        for_each(
            directories,
            lambda place, _: self.makedirs(place, exist_ok=True),
            parallelism=self.parallelism,
            action="made",
        )
        files = [pair for pair in pairs if not Path(pair[0]).is_dir()]

        def store(pair: tuple[str, str], child: LockedCallback, stop: threading.Event) -> None:
            self._store(*pair, child, stop, **kwargs)

        self._transfer(files, store, callback, "stored")

    def copy(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        on_error: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy within the filesystem; the bytes pass through this machine.

        `on_error` is "raise" or "ignore" what has vanished, the default of a recursive copy.
        """
        if on_error is None:
            on_error = "ignore" if recursive else "raise"
        found, pairs = self._pairs_within(path1, path2, recursive, maxdepth)
        self._make_directories(found, pairs)
        files = [pair for pair in pairs if not is_directory(found[pair[0]])]
        outcomes = try_each(
            files, lambda pair, _: self.cp_file(*pair, **kwargs), parallelism=self.parallelism
        )
        if on_error == "ignore":
            outcomes = [None if isinstance(o, FileNotFoundError) else o for o in outcomes]
        raise_failures(outcomes, "copied")

    def mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **_: Any,
    ) -> None:
        """Move files. A directory is moved file by file, and goes where all in it could be moved;
        what appears in it meanwhile stays.
        """
        for each in [path1] if isinstance(path1, str) else path1:
            self._refuse_root(strip(each))
        if isinstance(path1, str) and isinstance(path2, str):
            old, new = strip(path1), strip(path2)
            if old == new:
                return
            if recursive and new.startswith(f"{old}/"):
                raise ValueError(f"{old} cannot be moved into itself")
        found, pairs = self._pairs_within(path1, path2, recursive, maxdepth)
        if not pairs:
            raise IsADirectoryError(f"{path1} is a directory; move it with recursive=True")
        self._make_directories(found, pairs)
        for_each(
            [pair for pair in pairs if not is_directory(found[pair[0]])],
            lambda pair, _: self._move(*pair),
            parallelism=self.parallelism,
            action="moved",
        )
        self._remove_directories(name for name, info in found.items() if is_directory(info))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, and with `recursive` directories with all that is in them.

        Raises:
            OSError: names what could not be removed; everything else has been.
            PermissionError: the root of a volume is among them; nothing has been removed.
        """
        for each in [path] if isinstance(path, str) else path:
            self._refuse_root(strip(each))
        found = self._expand(path, recursive, maxdepth)
        outcomes = try_each(
            [name for name in found if not (recursive and is_directory(found[name]))],
            lambda name, _: self.rm_file(name),
            parallelism=self.parallelism,
        )
        if recursive:
            # Somebody else was faster.
            outcomes = [None if isinstance(o, FileNotFoundError) else o for o in outcomes]
            failed = any(isinstance(outcome, Exception) for outcome in outcomes)
            directories = (name for name, info in found.items() if is_directory(info))
            self._remove_directories(directories, may_remain=failed or maxdepth is not None)
        raise_failures(outcomes, "removed")

    def _expand(
        self,
        path: Any,
        recursive: bool,
        maxdepth: int | None,
        assume_literal: bool = False,
        **kwargs: Any,
    ) -> Found:
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        found: Found = {}
        for each in [path] if isinstance(path, str | os.PathLike) else path:
            name = strip(each)
            if not assume_literal and self._is_pattern(name):
                matches = self.glob(name, maxdepth=maxdepth, detail=True, **kwargs)
                found.update(matches)
                if recursive and (maxdepth is None or maxdepth > 1):
                    deeper = None if maxdepth is None else maxdepth - 1
                    for match in [name for name, info in matches.items() if is_directory(info)]:
                        found.update(self.find(match, deeper, withdirs=True, detail=True, **kwargs))
            elif recursive:
                below = self.find(name, maxdepth, withdirs=True, detail=True, **kwargs)
                if not below:
                    raise FileNotFoundError(f"nothing is at {name}")
                found.update(below)
            else:
                found.setdefault(name, None)
        if not found:
            raise FileNotFoundError(f"nothing is at {path}")
        return found

    def _is_pattern(self, path: str) -> bool:
        """Whether a path is meant to be matched: it looks like it, and nothing has that name."""
        return has_magic(path) and not self.exists(path)

    def _chosen(self, path: Any, recursive: bool, maxdepth: int | None) -> Found:
        """What a path stands for as the source of a copy: directories only where they are copied
        with all that is in them.
        """
        found = self._expand(path, recursive, maxdepth)
        if isinstance(path, str) and (not recursive or maxdepth is not None):
            known = {name: info or self.info(name) for name, info in found.items()}
            return {name: info for name, info in known.items() if not is_directory(info)}
        return found

    def _pairs_within(
        self, path1: Any, path2: Any, recursive: bool, maxdepth: int | None
    ) -> tuple[Found, list[tuple[str, str]]]:
        if isinstance(path1, list) and isinstance(path2, list):
            names = [strip(path) for path in path1]
            return dict.fromkeys(names), list(zip(names, map(strip, path2), strict=True))
        found = self._chosen(path1, recursive, maxdepth)
        is_one = isinstance(path2, str | os.PathLike)
        target = strip(path2) if is_one else [strip(path) for path in path2]
        into = is_one and bool(found) and (trailing_sep(path2) or self.isdir(path2))
        is_pattern = isinstance(path1, str) and self._is_pattern(strip(path1))
        pairs = _paired(path1, sorted(found), target, is_pattern=is_pattern, into=into)
        return found, pairs

    def _make_directories(self, found: Found, pairs: list[tuple[str, str]]) -> None:
        for_each(
            [place for source, place in pairs if is_directory(found[source])],
            lambda place, _: self.makedirs(place, exist_ok=True),
            parallelism=self.parallelism,
            action="made",
        )

    def _remove_directories(self, paths: Iterable[str], *, may_remain: bool = False) -> None:
        """Remove empty directories, the deepest first; `may_remain` if they are not."""
        by_depth: dict[int, list[str]] = {}
        for path in paths:
            by_depth.setdefault(path.count("/"), []).append(path)

        def remove(path: str, _: threading.Event) -> None:
            # On some stores a directory goes with its last file.
            with suppress(FileNotFoundError):
                self._remove_directory(path, may_remain=may_remain)

        for depth in sorted(by_depth, reverse=True):
            for_each(by_depth[depth], remove, parallelism=self.parallelism, action="removed")

    def _transfer(
        self,
        pairs: list[tuple[str, str]],
        move: Callable[[tuple[str, str], LockedCallback, threading.Event], None],
        callback: Any,
        action: str,
    ) -> None:
        lock = threading.Lock()
        whole = LockedCallback(callback, lock)
        whole.set_size(len(pairs))

        def work(pair: tuple[str, str], stop: threading.Event) -> None:
            with whole.branch(*pair) as child:
                move(pair, child, stop)
            whole.relative_update()

        for_each(pairs, work, parallelism=self.parallelism, action=action)

    def _fetch(
        self,
        rpath: str,
        lpath: str,
        info: Info | None,
        callback: LockedCallback,
        stop: threading.Event,
        *,
        share: int,
        **kwargs: Any,
    ) -> None:
        """Copy one file to this machine, as one of `share` at once."""

    def _store(
        self, lpath: str, rpath: str, callback: LockedCallback, stop: threading.Event, **kwargs: Any
    ) -> None:
        """Copy one file of this machine."""

    def _move(self, path1: str, path2: str) -> None:
        """Move one file."""

    def _remove_directory(self, path: str, *, may_remain: bool) -> None:
        """Remove an empty directory; with `may_remain` one that is not is left in silence."""

    def _refuse_root(self, path: str) -> None:
        """Raises PermissionError where `path` is no file or directory inside a volume."""


def _expand_local(path: Any, recursive: bool, maxdepth: int | None) -> list[str]:
    """As `_expand`, of this machine's files."""
    local = LocalFileSystem()
    found: set[str] = set()
    for each in [path] if isinstance(path, str) else path:
        if _is_local_pattern(each):
            found.update(local.expand_path(each, recursive=recursive, maxdepth=maxdepth))
            continue
        name = each.rstrip("/") or "/"
        found.add(name)
        if recursive:
            if not os.path.lexists(name):
                raise FileNotFoundError(f"nothing is at {name}")
            below = local.find(name, maxdepth=maxdepth, withdirs=True)
            for path in below:
                if path != name and Path(path).is_symlink() and Path(path).is_dir():
                    # What it leads to was not looked into; an empty directory would be a lie.
                    reason = "is a link to a directory, which is not followed; copy that by itself"
                    raise IsADirectoryError(EISDIR, reason, path)
            found.update(below)
    return sorted(found)


def _is_local_pattern(path: Any) -> bool:
    return isinstance(path, str) and has_magic(path) and not os.path.lexists(path.rstrip("/"))


def _paired(
    source: Any, found: list[str], target: Any, *, is_pattern: bool, into: bool
) -> list[tuple[str, str]]:
    """Each of the paths `found` for `source` with the place it goes to."""
    if not found:
        return []
    if isinstance(target, str):
        target = destinations(source, found, target, is_pattern=is_pattern, into=into)
    return list(zip(found, target, strict=True))
