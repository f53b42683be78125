"""Run by `test_blocks_deaths`: processes that are killed between any two lines of the block cache.

Each death is of a fork: what it was doing with the cache directory stops where a kill would stop
it. Another fork then reads everything. Prints the number of lines that a whole run has, then what
is not as it should be.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuse.block_sources import BLOCK, Source, open_cache, read_whole

from trainmount_fuse.cache.block_file import FileKey

_MODULES = ("cache_table.py", "shared_cells.py", "write_behind.py", "fetching.py")
_NUM_CELLS = 16


class _Death:
    """Counts the lines of the cache that are run, in all threads; the n-th is the last."""

    def __init__(self, last_line: int) -> None:
        self.num_lines = 0
        self._last_line = last_line

    def watch(self) -> None:
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(_MODULES):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._last_line:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace


def _work(directory: Path) -> None:
    """Make, fill, throw out, drop, rename, close."""
    cache = open_cache(directory, _NUM_CELLS * BLOCK)
    for number in (1, 2, 3):
        read_whole(cache, Source(number, 7))
        cache.flush()
    cache.drop(Source(3, 7).key)
    cache.rekey(Source(2, 7).key, FileKey("renamed", "v", 7 * BLOCK))
    read_whole(cache, Source(1, 7))
    cache.close()


def _check(directory: Path) -> None:
    cache = open_cache(directory, _NUM_CELLS * BLOCK)
    renamed = Source(2, 7)
    renamed.key = FileKey("renamed", "v", 7 * BLOCK)
    for source in (Source(1, 7), Source(2, 7), Source(3, 7), renamed):
        assert read_whole(cache, source) == source.data(), source.key
    # More than fits, once: every cell can be had again.
    large = Source(9, _NUM_CELLS)
    assert read_whole(cache, large) == large.data()
    assert cache.flush()
    statistics = cache.statistics()
    assert statistics.num_bad_blocks == 0, statistics
    assert statistics.dropped_bytes == 0, statistics
    assert statistics.cached_bytes == statistics.space_bytes == _NUM_CELLS * BLOCK, statistics
    cache.close()


def _in_fork(function: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        try:
            function()
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _die_at(directory: Path, line: int) -> int:
    """Work until that line; the exit code. Leaves the number of lines in a file, if it ends."""

    def run() -> None:
        death = _Death(line)
        death.watch()
        _work(directory)
        directory.with_suffix(".lines").write_text(str(death.num_lines))

    return _in_fork(run)


def main() -> None:
    root, num_deaths = Path(sys.argv[1]), int(sys.argv[2])
    assert _die_at(root / "whole", 0) == 0
    num_lines = int((root / "whole.lines").read_text())
    print(num_lines, flush=True)
    for number in range(num_deaths):
        directory, line = root / str(number), 1 + number * num_lines // num_deaths
        # Threads do not run the same lines each time: near the end, it may come to its end.
        if _die_at(directory, line) not in (0, -signal.SIGKILL):
            print(f"line {line}: did not work", flush=True)
        if _in_fork(partial(_check, directory)):
            print(f"line {line}: wrong afterwards", flush=True)


if __name__ == "__main__":
    main()
