"""Reads every file of a directory at the same time, by a thread each, and checks its bytes: each
file is one byte over and over. Arguments: the directory, the size of a file.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main() -> None:
    directory, size_bytes = Path(sys.argv[1]), int(sys.argv[2])
    paths = sorted(directory.iterdir())
    everybody = threading.Barrier(len(paths))

    def read(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        everybody.wait()
        position = 0
        while piece := os.read(descriptor, 1 << 17):
            if piece.strip(path.name[:1].encode()):
                raise RuntimeError(f"{path} has other bytes at {position}")
            position += len(piece)
        os.close(descriptor)
        if position != size_bytes:
            raise RuntimeError(f"{path} ends at {position}")

    with ThreadPoolExecutor(len(paths)) as threads:
        list(threads.map(read, paths))


if __name__ == "__main__":
    main()
