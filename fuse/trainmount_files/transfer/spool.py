"""A stream on its way to a store that takes no parts: gathered on disk, sent by one request.

Used by `writer.py`.
"""

from __future__ import annotations

import tempfile
from typing import BinaryIO, cast

from trainmount_files.errors import TooLarge, VolumeError, local_errors

__all__ = ["Spool"]


class Spool:
    """A nameless file in the temporary directory. Used by one thread."""

    def __init__(self, path: str, limit_bytes: int | None, refusal: VolumeError) -> None:
        """`refusal` is what the store said to parts; `path` is the volume's."""
        self._path = path
        self._limit_bytes = limit_bytes
        self._reason = refusal.reason
        with local_errors("upload", path):
            self.file = cast("BinaryIO", tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
        self.size_bytes = 0

    def append(self, data: memoryview) -> None:
        """Raises TooLarge, LocalError."""
        limit = self._limit_bytes
        if limit is not None and self.size_bytes + len(data) > limit:
            reason = (
                f"one request may store {limit} bytes, the stream has more, and the store takes "
                f"no parts of it ({self._reason})"
            )
            raise TooLarge("upload", self._path, reason)
        self.size_bytes += len(data)
        with local_errors("upload", self._path):
            while data:
                data = data[self.file.write(data) :]

    def close(self) -> None:
        self.file.close()
