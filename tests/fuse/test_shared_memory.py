"""Memory that a child fills: parts that never overlap, and that go back to the system."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainmount_fuse.cache.shared_memory import SharedBuffer, SharedMemory

PAGE = 4096
PAGES = 16


def resident_kib(memory: SharedMemory) -> int:
    """Shared memory of this process that is there, of whatever mapping."""
    del memory
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1])


@given(st.lists(st.integers(-PAGES, 5 * PAGE), max_size=60))
def test_parts_never_overlap_and_all_of_them_make_the_whole_again(steps: list[int]) -> None:
    """A positive step takes so many bytes, another one puts back one of the parts."""
    memory = SharedMemory(PAGES * PAGE)
    taken: list[SharedBuffer] = []
    for step in steps:
        if step <= 0 and taken:
            memory.put_back(taken.pop(-step % len(taken)))
        elif step > 0:
            used = {page for one in taken for page in pages_of(one)}
            part = memory.try_take(step)
            if part is None:
                assert longest_gap(used) * PAGE < step
                continue
            assert len(part.view) == part.size_bytes == -(-step // PAGE) * PAGE
            assert used.isdisjoint(pages_of(part))
            taken.append(part)
    for part in taken:
        memory.put_back(part)
    assert memory.try_take(PAGES * PAGE) is not None


def pages_of(part: SharedBuffer) -> range:
    return range(part.offset // PAGE, (part.offset + part.size_bytes) // PAGE)


def longest_gap(used: set[int]) -> int:
    text = "".join("x" if page in used else "." for page in range(PAGES))
    return max(len(gap) for gap in text.split("x"))


def test_what_a_child_writes_is_here_and_is_zero_for_the_next_one() -> None:
    memory = SharedMemory(PAGES * PAGE)
    part = memory.try_take(100)
    assert part is not None
    pid = os.fork()
    if pid == 0:
        part.view[:5] = b"bytes"
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert bytes(part.view[:6]) == b"bytes\0"
    memory.put_back(part)
    again = memory.try_take(100)
    assert again is not None
    assert again.offset == part.offset
    assert bytes(again.view[:6]) == bytes(6)


def test_what_is_put_back_takes_no_memory() -> None:
    memory = SharedMemory(4 << 20)
    before = resident_kib(memory)
    part = memory.try_take(4 << 20)
    assert part is not None
    part.view[:] = bytes(4 << 20)
    assert resident_kib(memory) - before >= 4 << 10
    memory.put_back(part)
    assert resident_kib(memory) - before < 64
