"""Files whose every block says which it is, and block caches to read them through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainmount_files.volume import ByteRange
from trainmount_fuse.cache.block_file import FileKey
from trainmount_fuse.cache.blocks import BlockCache

BLOCK = 4096


def content(number: int, block: int) -> bytes:
    """What stands in a block of a file: every 16 bytes say where they belong."""
    line = b"%06d.%08d\n" % (number, block)
    return line * (BLOCK // len(line))


class Source:
    """A file whose bytes anybody can tell, and what was asked of it."""

    def __init__(self, number: int, num_blocks: int) -> None:
        self.number = number
        self.num_blocks = num_blocks
        self.key = FileKey(f"f{number}", "v", num_blocks * BLOCK)
        self.asked_blocks: list[int] = []

    def fetch(self, byte_range: ByteRange, buffer: memoryview) -> None:
        first, end = byte_range.start // BLOCK, -(-byte_range.end // BLOCK)
        self.asked_blocks.extend(range(first, end))
        data = b"".join(content(self.number, block) for block in range(first, end))
        buffer[:] = data[byte_range.start - first * BLOCK :][: len(buffer)]

    def data(self) -> bytes:
        return b"".join(content(self.number, block) for block in range(self.num_blocks))


def open_cache(directory: Path, capacity_bytes: int = 64 * BLOCK, **changes: Any) -> BlockCache:
    values: dict[str, Any] = {
        "block_size_bytes": BLOCK,
        "max_fetch_bytes": 4 * BLOCK,
        "free_disk_floor_bytes": 0,
        "cell_bytes": BLOCK,
    }
    return BlockCache(directory, capacity_bytes=capacity_bytes, **(values | changes))


def read_whole(cache: BlockCache, source: Source) -> bytes:
    file = cache.open(source.key)
    try:
        return bytes(cache.read(file, 0, source.key.size_bytes, source.fetch))
    finally:
        cache.release(file)
