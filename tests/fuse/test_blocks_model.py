"""The block cache against a model: two mounts of one directory, in any order of what may happen to
them, give the bytes of the version that is asked for and stay within their bound.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.fuse.block_sources import BLOCK, Source, open_cache

from trainmount_fuse.cache.block_file import FileKey
from trainmount_fuse.cache.blocks import BlockCache
from trainmount_fuse.cache.cache_table import Geometry
from trainmount_fuse.memory import MemoryBudget

_NUM_CELLS = 40
_CELL = BLOCK
_mount = st.integers(0, 1)
_file = st.integers(0, 3)
_where = st.floats(0, 1, exclude_max=True)


class CacheMachine(RuleBasedStateMachine):
    """Each file has a version, which a rename or another writer changes."""

    sizes: ClassVar[list[int]] = [5 * BLOCK + 77, 30 * BLOCK, 1, 12 * BLOCK]

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.caches = [self._open() for _ in range(2)]
        self.contents = [
            Source(number, -(-size // BLOCK)) for number, size in enumerate(self.sizes)
        ]
        self.keys = [FileKey(f"f{i}", "0", size) for i, size in enumerate(self.sizes)]
        self.num_versions = 0

    def teardown(self) -> None:
        for cache in self.caches:
            cache.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @rule(mount=_mount, file=_file, where=_where, share=_where, at_once=st.booleans())
    def read(self, mount: int, file: int, where: float, share: float, at_once: bool) -> None:
        cache, size = self.caches[mount], self.sizes[file]
        offset = int(where * size)
        length = 1 + int(share * (size - offset))
        opened = cache.open(self.keys[file])
        data = cache.read_nowait(opened, offset, length) if at_once else None
        if data is None:
            data = cache.read(opened, offset, length, self.contents[file].fetch)
        cache.release(opened)
        assert data == self.contents[file].data()[offset : offset + length]

    @rule(mount=_mount, file=_file)
    def read_ahead(self, mount: int, file: int) -> None:
        cache = self.caches[mount]
        opened = cache.open(self.keys[file])
        cache.ensure(opened, 0, opened.num_blocks - 1, self.contents[file].fetch)
        cache.release(opened)

    @rule(mount=_mount)
    def flush(self, mount: int) -> None:
        assert self.caches[mount].flush()

    @rule(mount=_mount, file=_file)
    def drop(self, mount: int, file: int) -> None:
        self.caches[mount].drop(self.keys[file])

    @rule(mount=_mount, file=_file)
    def rename(self, mount: int, file: int) -> None:
        old = self.keys[file]
        self.keys[file] = FileKey(old.path, self._version(), old.size_bytes)
        self.caches[mount].rekey(old, self.keys[file])

    @rule(file=_file)
    def rewrite(self, file: int) -> None:
        old = self.contents[file]
        self.keys[file] = FileKey(self.keys[file].path, self._version(), self.sizes[file])
        self.contents[file] = Source(100 + self.num_versions, old.num_blocks)

    @rule(mount=_mount)
    def remount(self, mount: int) -> None:
        self.caches[mount].close()
        self.caches[mount] = self._open()

    @rule(where=_where, size=st.integers(1, 3 * BLOCK))
    def damage(self, where: float, size: int) -> None:
        """Something writes nonsense over the blocks."""
        start = Geometry.for_capacity(_NUM_CELLS * _CELL, _CELL).table_bytes
        with self._path().open("r+b") as opened:
            opened.seek(start + int(where * _NUM_CELLS * _CELL))
            opened.write(b"?" * size)
        # What was checked already and is in memory is not checked again.
        self._remount_both()

    @rule(share=_where)
    def cut(self, share: float) -> None:
        """The file lost its end."""
        start = Geometry.for_capacity(_NUM_CELLS * _CELL, _CELL).table_bytes
        with self._path().open("r+b") as opened:
            size = opened.seek(0, 2)
            opened.truncate(start + int(share * max(0, size - start)))
        self._remount_both()

    @rule(where=_where, data=st.binary(min_size=1, max_size=64))
    def damage_table(self, where: float, data: bytes) -> None:
        path, size = self._path(), Geometry.for_capacity(_NUM_CELLS * _CELL, _CELL).table_bytes
        for cache in self.caches:
            cache.close()
        with path.open("r+b") as opened:
            opened.seek(int(where * (size - len(data))))
            opened.write(data)
        self.caches = [self._open() for _ in range(2)]

    @rule()
    def remove_directory(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    @invariant()
    def bounds_hold(self) -> None:
        for cache in getattr(self, "caches", []):
            assert cache.statistics().space_bytes <= _NUM_CELLS * _CELL

    def _open(self) -> BlockCache:
        return open_cache(
            self.directory,
            _NUM_CELLS * _CELL,
            memory=MemoryBudget(16 * BLOCK),
        )

    def _path(self) -> Path:
        self._remount_both()
        (path,) = self.directory.glob("*.cache")
        return path

    def _remount_both(self) -> None:
        for cache in self.caches:
            cache.close()
        self.caches = [self._open() for _ in range(2)]

    def _version(self) -> str:
        self.num_versions += 1
        return str(self.num_versions)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
