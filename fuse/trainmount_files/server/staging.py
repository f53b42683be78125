"""The server's own folder inside the served directory: files in the making, uploads, the signing
secret.

It lies on the same filesystem as the volumes, so that publishing is one rename or link, and below a
name with a dot, which no catalog can have. Blocking; called by `store` and `multipart` in worker
threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "Staging", "Temporary"]

FOLDER: Final = ".trainmount"

# A file without a living writer is swept only after this time: between `open` and `flock` of a new
# one it looks dead.
_GRACE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Temporary:
    """A file in the making. Locked while its writer lives, so that a sweep knows the dead ones."""

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
    """

    def __init__(self, directory: Path, *, fsync: bool) -> None:
        self.path = directory / FOLDER
        self._fsync = fsync
        temporaries = self.path / "temporary"
        self.uploads = self.path / "uploads"
        for folder in (self.path, temporaries, self.uploads):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._temporary_fd = os.open(temporaries, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._temporary_fd)

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
        name = secrets.token_hex(16)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, 0o666, dir_fd=self._temporary_fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return Temporary(fd, name, self._temporary_fd)

    def sync(self, fd: int) -> None:
        """Bring a file or directory to the disk, if the settings ask for it."""
        if self._fsync:
            os.fsync(fd)

    def sweep(self) -> int:
        """Remove the files of writers that are dead; returns how many."""
        removed = 0
        for name in os.listdir(self._temporary_fd):  # noqa: PTH208  a descriptor, not a path
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                removed += self._sweep_one(name)
        return removed

    def _sweep_one(self, name: str) -> int:
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._temporary_fd)
        try:
            if time.time() - os.fstat(fd).st_mtime < _GRACE_SECONDS:
                return 0
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=self._temporary_fd)
            return 1
        finally:
            os.close(fd)

    def staged_bytes(self) -> int:
        """What files in the making hold on disk just now, parts of uploads included."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    if not name.startswith("secret") and not name.endswith(".json"):
                        total += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118
        return total
