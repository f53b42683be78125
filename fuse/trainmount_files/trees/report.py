"""What became of a tree: counts, and every path that was not done, with the reason.

Filled in by the threads of a run, read by whoever shows its progress.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from trainmount_files.errors import VolumeError

__all__ = ["Failure", "Report", "Skip"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A path that could not be done."""

    path: str
    """Relative to the root of the tree; empty for the root itself."""

    error: VolumeError

    @property
    def code(self) -> str:
        """The kind of the error for programs: `PERMISSION_DENIED`, `NOT_FOUND`."""
        return _to_code(type(self.error).__name__)


@dataclass(frozen=True, slots=True)
class Skip:
    """A path that was left out on purpose."""

    path: str
    reason: str


class Report:
    """The state of a run. Any thread may read the counts while it goes on; they only grow."""

    def __init__(self) -> None:
        self.num_found = 0
        """Files that listings have brought up so far."""
        self.num_bytes_found = 0
        """Their bytes, as far as the listing tells."""
        self.num_done = 0
        self.num_bytes = 0
        """Bytes of the files that are done, and of the parts of large ones that are under way."""
        # Appended to under the lock; whole when the run has ended.
        self.failures: list[Failure] = []
        self.skips: list[Skip] = []
        self._lock = threading.Lock()

    def found(self, num_files: int, num_bytes: int = 0) -> None:
        with self._lock:
            self.num_found += num_files
            self.num_bytes_found += num_bytes

    def done(self, num_bytes: int = 0) -> None:
        """One file more, of which `num_bytes` have not been counted by `moved`."""
        with self._lock:
            self.num_done += 1
            self.num_bytes += num_bytes

    def moved(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes

    def failed(self, path: str, error: VolumeError) -> None:
        with self._lock:
            self.failures.append(Failure(path, error))

    def skipped(self, path: str, reason: str) -> None:
        with self._lock:
            self.skips.append(Skip(path, reason))

    def failure_codes(self) -> Counter[str]:
        """How many failures of each kind."""
        return Counter(failure.code for failure in self.failures)


def _to_code(name: str) -> str:
    words = "".join(f" {letter}" if letter.isupper() else letter for letter in name)
    return "_".join(words.split()).upper()
