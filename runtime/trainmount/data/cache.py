"""Local copies of files of a volume that is not mounted, bounded in bytes. Called by `sources` and
`dataset`.

One directory serves all processes of a user on this machine: loader workers, ranks, jobs.

    objects/…            whole files, named after path, size and version: what may be evicted
    owner-…/ahead/…      copies that were read ahead and not handed out yet
    owner-…/<group>/…    copies that were handed out, in one iteration, and not used yet
    .total  .users       the bytes of `objects`; who is there

A copy that is handed out is a hard link of its consumer's own, which nobody else removes. So what
is evicted can never be a file that is still to be used, whoever read it ahead, and nobody has to
be told what is in use; what is in use may exceed the bound.

When there is no room, a new file is stored only in place of one that nobody has used since the
epoch before this one began. Epochs read each file once: with the longest unused evicted, a data
set larger than the bound would find none of its files again.

The directory of an owner lives as long as the process that made it, the objects as long as any. A
lock, which ends with the processes however they die, tells the next one what was left behind: it
removes that, and takes the objects over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["FileCache"]

_OWNER_PREFIX: Final = "owner-"
_OBJECTS: Final = "objects"
_AHEAD: Final = "ahead"
_LOCK_NAME: Final = ".owner"
_USERS_NAME: Final = ".users"
_TOTAL_NAME: Final = ".total"
# A full cache in which nothing may be evicted is not searched again before that: a search looks at
# every object, which takes a second for 100,000.
_SEARCH_PAUSE_SECONDS: Final = 10.0
# Of a file's name: file systems take 255 bytes, a character has up to four.
_KEPT_CHARACTERS: Final = 48
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
# A file system without hard links, or with too many of this file.
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)


class FileCache:
    """A directory of whole files. Any thread of any process may take and store copies; `open` is
    for the process that made it.
    """

    def __init__(self, limit_bytes: int, root: Path | None = None) -> None:
        """Nothing is made before `open`. `root` holds the copies of all processes on this machine,
        and must be on one file system. With a limit of 0 nothing is kept after its use.
        """
        self.limit_bytes = limit_bytes
        root = root or Path(tempfile.gettempdir()) / f"trainmount-cache-{os.getuid()}"
        # What is handed out is opened wherever the program is by then.
        self._root = root.absolute()
        self._directory: Path | None = None
        self._numbers = itertools.count()
        self._epoch_began = self._unused_since = time.time()
        self._evictable: deque[tuple[float, Path]] = deque()
        self._searched = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"limit_bytes": self.limit_bytes, "root": self._root, "directory": self._directory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["limit_bytes"], state["root"])  # type: ignore[misc]
        self._directory = state["directory"]

    @property
    def is_open(self) -> bool:
        return self._directory is not None

    def open(self) -> None:
        """Make the owner's directory and remove those whose owners are gone. May be called again.

        Raises:
            OSError: the directory cannot be made.
        """
        if self._directory is not None:
            return
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._root.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(self._root))
        users = os.open(self._root / _USERS_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(users, fcntl.LOCK_SH)
        # The last one who left may just have removed it.
        (self._root / _OBJECTS).mkdir(mode=0o700, exist_ok=True)
        _remove_abandoned(self._root)
        directory = Path(tempfile.mkdtemp(prefix=_OWNER_PREFIX, dir=self._root))
        (directory / _AHEAD).mkdir()
        # Locked before it has the name by which others ask whether its owner lives.
        unnamed = directory / f"{_LOCK_NAME}.new"
        owner = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(owner, fcntl.LOCK_EX)
        unnamed.rename(directory / _LOCK_NAME)
        self._directory = directory
        weakref.finalize(self, _close, self._root, directory, (owner, users), os.getpid())
        with self._total() as total:
            # What a killed process left may be more than it had counted.
            total.num_bytes = sum(found.st_size for _, found in self._objects())

    def begin_epoch(self) -> None:
        """From now on, what was not used since the epoch before began may be evicted."""
        self._unused_since, self._epoch_began = self._epoch_began, time.time()
        self._searched = 0.0

    # Objects

    def key(self, *identity: object) -> str:
        """The name of what is stored for one version of one file."""
        text = "\0".join(map(str, identity))
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def has(self, key: str) -> bool:
        return self.limit_bytes > 0 and self._object(key).exists()

    def read(self, key: str) -> bytes | None:
        """The content of an object, None if it is not there."""
        try:
            data = self._object(key).read_bytes()
        except FileNotFoundError:
            return None
        self._touch(key)
        return data

    def take(self, key: str, name: str) -> Path | None:
        """A link of the caller's own to an object, None if it is not there."""
        link = self.new_path(name)
        try:
            os.link(self._object(key), link)
        except FileNotFoundError:
            return None
        self._touch(key)
        return link

    def drop(self, key: str) -> None:
        """Forget an object whose bytes turned out to be wrong."""
        with self._total() as total:
            total.num_bytes -= _remove(self._object(key))

    def new_path(self, name: str) -> Path:
        """Where the caller may put a copy of its own, on the way to `hand_out`. The name's end is
        kept, by which image and audio readers choose their format.
        """
        # `next` on a count is one step, and a forked child has another number of its own.
        number = next(self._numbers)
        return self._own / _AHEAD / f"{os.getpid():x}.{number:x}-{name[-_KEPT_CHARACTERS:]}"

    def keep(self, copy: Path, key: str) -> bool:
        """Store a copy as an object too, where there is room; whether it was."""
        if self.limit_bytes == 0:
            return False
        size_bytes = copy.stat().st_size
        with self._total() as total:
            missing = total.num_bytes + size_bytes - self.limit_bytes
            if missing > 0:
                total.num_bytes -= self._evict(missing)
            if total.num_bytes + size_bytes > self.limit_bytes:
                return False
            try:
                os.link(copy, self._object(key))
            except FileExistsError:
                return True
            except OSError as error:
                # Its reader has the copy all the same.
                if error.errno not in (*_NO_LINKS, *_NO_SPACE):
                    raise
                return False
            total.num_bytes += size_bytes
        return True

    def keep_bytes(self, data: bytes, key: str) -> None:
        """Store content that its reader has in memory, where there is room for it."""
        if self.limit_bytes == 0:
            return
        copy = self.new_path("")
        try:
            self.making_room(len(data), lambda: copy.write_bytes(data))
            self.keep(copy, key)
        except OSError as error:
            # The reader has its bytes; a full disk only costs the next one a request.
            if error.errno not in _NO_SPACE:
                raise
        finally:
            copy.unlink(missing_ok=True)

    def making_room(self, size_bytes: int, write: Callable[[], object]) -> None:
        """Call `write`, and where the disk is full, again when objects have made room.

        Raises:
            OSError: the disk is full without them, or whatever else `write` raised.
        """
        try:
            write()
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            with self._total() as total:
                self._evictable = deque(self._unused(before=time.time()))
                freed = self._evict(max(size_bytes, self.limit_bytes // 16), search=False)
                total.num_bytes -= freed
            if not freed:
                raise
            write()

    # Copies that were handed out

    def hand_out(self, copy: str, group: str) -> str:
        """The path under which the consumer uses a copy, until `release` or `abandon`."""
        place = self._own / group / copy.rpartition("/")[2]
        try:
            os.rename(copy, place)  # noqa: PTH104 - once a sample
        except FileNotFoundError:
            place.parent.mkdir(exist_ok=True)
            os.rename(copy, place)  # noqa: PTH104
        return str(place)

    def release(self, copies: Iterable[str]) -> None:
        """These copies were used, or are not going to be."""
        for copy in copies:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy)  # noqa: PTH108 - once a sample

    def abandon(self, group: str) -> None:
        """Nothing that was handed out as of this group is going to be used any more."""
        if self._directory is not None:
            shutil.rmtree(self._own / group, ignore_errors=True)

    # Private

    @property
    def _own(self) -> Path:
        assert self._directory is not None, "the owner opens the cache before it hands it on"
        return self._directory

    def _object(self, key: str) -> Path:
        return self._root / _OBJECTS / key

    def _touch(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._object(key))

    def _objects(self) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self._root / _OBJECTS) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    yield Path(entry.path), entry.stat()

    def _unused(self, before: float) -> list[tuple[float, Path]]:
        """Objects that nobody has in use, the longest unused first."""
        return sorted(
            (found.st_mtime, path)
            for path, found in self._objects()
            if found.st_nlink == 1 and found.st_mtime < before
        )

    def _evict(self, size_bytes: int, *, search: bool = True) -> int:
        """Remove so many bytes of objects, or what there is; how many. Holds the total."""
        if search and not self._evictable:
            now = time.monotonic()
            if self._searched and now - self._searched < _SEARCH_PAUSE_SECONDS:
                return 0
            self._searched = now
            self._evictable = deque(self._unused(self._unused_since))
        freed = 0
        while self._evictable and freed < size_bytes:
            used, path = self._evictable.popleft()
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime == used:
                    freed += _remove(path)
        return freed

    @contextlib.contextmanager
    def _total(self) -> Iterator[_Total]:
        """The bytes of all objects, for one thread of one process at a time."""
        # Opened anew: a lock belongs to what was opened, which forked processes would share.
        descriptor = os.open(self._root / _TOTAL_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            total = _Total(int.from_bytes(os.pread(descriptor, 8, 0), "little"))
            yield total
            os.pwrite(descriptor, max(0, total.num_bytes).to_bytes(8, "little"), 0)
        finally:
            # Not left to `close`: a process that was forked meanwhile has it open too, for good.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


class _Total:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def _remove(path: Path) -> int:
    """Remove a file, if it is there; its size."""
    try:
        size_bytes = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size_bytes


def _remove_abandoned(root: Path) -> None:
    for directory in root.glob(f"{_OWNER_PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being made or removed by somebody else
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)


def _close(root: Path, directory: Path, locks: tuple[int, int], owner: int) -> None:
    # A forked child inherits the finalizer, but the directory is its parent's.
    if os.getpid() != owner:
        return
    shutil.rmtree(directory, ignore_errors=True)
    lock, users = locks
    os.close(lock)
    with contextlib.suppress(OSError):
        # Refused where others are there, who go on with the objects.
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(root / _OBJECTS, ignore_errors=True)
        # Workers that have not ended yet have the same lock.
        fcntl.flock(users, fcntl.LOCK_UN)
    os.close(users)
