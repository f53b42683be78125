"""The server's own folder inside the served directory: files in the making, uploads, the signing
secret.

It lies on the same filesystem as the volumes, so that publishing is one rename or link, and below a
name with a dot, which no catalog can have. Blocking; called by `store` and `multipart` in worker
threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "LockHeldError", "Staging", "Temporary"]

FOLDER: Final = ".trainmount"

# A process's folder is made under another name first; one that is this old was left half-made.
_GRACE_SECONDS: Final = 60.0
_NEW: Final = ".new"

# Writers of one path wait for each other, those of others rarely.
_NUM_LOCKS: Final = 64


class LockHeldError(Exception):
    """Somebody else holds the lock, and this thread does not wait. No OSError: it says nothing of
    the disk.
    """


@dataclass(frozen=True, slots=True)
class Temporary:
    """A file in the making."""

    fd: int
    name: str
    directory_fd: int

    def discard(self) -> None:
        """Close it and remove what is left of its name. Safe after publishing, called once."""
        os.close(self.fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self.directory_fd)


class Staging:
    """Owns `.trainmount` below a served directory. Any thread; several servers may share one
    directory.

    `temporary/<process>/` holds one server's files in the making and a `lock`, which the kernel
    releases however the server ends: so a sweep knows at once what the dead have left.
    """

    def __init__(self, directory: Path, *, fsync: bool) -> None:
        self.path = directory / FOLDER
        self._fsync = fsync
        self._temporaries = self.path / "temporary"
        self._locks = self.path / "locks"
        self.uploads = self.path / "uploads"
        for folder in (self.path, self._temporaries, self._locks, self.uploads):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._own = self._temporaries / secrets.token_hex(16)
        self._lock_fd = _make_locked_folder(self._own)
        self._own_fd = os.open(self._own, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._locks_fd = os.open(self._locks, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._numbers = itertools.count(1)
        # `is_impatient`: this thread waits for no lock.
        self._thread = threading.local()

    def close(self) -> None:
        """Give the folder up; what is in it goes now or with another server's sweep."""
        shutil.rmtree(self._own, ignore_errors=True)
        os.close(self._own_fd)
        os.close(self._locks_fd)
        # Not by closing alone: a child that was forked meanwhile holds the same lock.
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        os.close(self._lock_fd)

    def read_secret(self) -> bytes:
        """The key that signs URLs and upload tokens; made once, so that both outlive a restart."""
        path = self.path / "secret"
        with contextlib.suppress(FileNotFoundError):
            if secret := path.read_bytes():
                return secret
        candidate = self.path / f"secret.{secrets.token_hex(8)}"
        descriptor = os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(candidate)
        candidate.unlink()
        return path.read_bytes()

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Temporary]:
        """A new empty file, removed at the end of the block unless it was moved away."""
        file = self.new_temporary()
        try:
            yield file
        finally:
            file.discard()

    def new_temporary(self) -> Temporary:
        """A new empty file; the caller discards it."""
        # The folder is this process's own, so that a number is enough.
        name = str(next(self._numbers))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return Temporary(os.open(name, flags, 0o666, dir_fd=self._own_fd), name, self._own_fd)

    @contextlib.contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Hold the lock of a path of the wire against every server of the directory.

        Raises:
            LockHeldError: it is held, inside `impatient`.
        """
        name = f"{zlib.crc32(path.encode()) % _NUM_LOCKS:02d}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._locks_fd)
        try:
            try:
                is_impatient = getattr(self._thread, "is_impatient", False)
                fcntl.flock(fd, fcntl.LOCK_EX | (fcntl.LOCK_NB if is_impatient else 0))
            except BlockingIOError:
                raise LockHeldError from None
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def impatient(self) -> Iterator[None]:
        """In this block the calling thread, the event loop's, waits for no lock."""
        self._thread.is_impatient = True
        try:
            yield
        finally:
            self._thread.is_impatient = False

    def sync(self, fd: int) -> None:
        """Bring a file or directory to the disk, if the settings ask for it."""
        if self._fsync:
            os.fsync(fd)

    def sweep(self) -> int:
        """Remove the folders of servers that are dead; returns how many."""
        removed = 0
        for folder in self._temporaries.iterdir():
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                if folder != self._own and _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    removed += 1
        return removed

    def staged_bytes(self) -> int:
        """What files in the making hold on disk just now, parts of uploads included."""
        total = 0
        for folder, _, names in itertools.chain(os.walk(self._temporaries), os.walk(self.uploads)):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    if name not in ("lock", "published") and not name.endswith(".json"):
                        total += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118
        return total


def _make_locked_folder(folder: Path) -> int:
    """Returns the descriptor that holds the folder's lock."""
    half_made = folder.with_suffix(_NEW)
    half_made.mkdir(mode=0o700)
    fd = os.open(half_made / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    half_made.rename(folder)
    return fd


def _is_abandoned(folder: Path) -> bool:
    """Raises BlockingIOError while its server lives."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        fd = None  # in the making, or on its way out
    if fd is None or folder.suffix == _NEW:
        if fd is not None:
            os.close(fd)
        return time.time() - folder.stat().st_mtime > _GRACE_SECONDS
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
    return True
