"""The block cache under real mounts: damage to it, and two mounts that share it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mount.conftest import MountProcess

_MIB = 1 << 20
_SIZE = 24 * _MIB


def _sum(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _cache(mount: MountProcess) -> dict[str, Any]:
    cache: dict[str, Any] = mount.status().get("cache", {})
    return cache


def _big_file(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    path = tmp_path / "volume" / "big"
    path.write_bytes(os.urandom(_SIZE))
    return path


def test_damage_to_the_cache_is_noticed_and_no_block_is_read_as_zeros(
    start_mount: Callable[..., MountProcess], tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    big = _big_file(tmp_path)
    expected = _sum(big)
    options = ("--cache-dir", str(tmp_path / "cache"))
    mount = start_mount(big.parent.as_uri(), *options, name="first")
    with (mount.mountpoint / "big").open("rb") as opened:
        opened.seek(-4096, os.SEEK_END)
        assert opened.read() == big.read_bytes()[-4096:]
        wait_until(lambda: _cache(mount).get("held_bytes") == 0, "the blocks on disk")
        mount.kill_daemon()
        opened.seek(0)
        assert hashlib.file_digest(opened, "sha256").hexdigest() == expected
    wait_until(lambda: _cache(mount).get("cached_bytes") == _SIZE, "all blocks on disk")
    assert mount.stop() == 0

    (cache,) = (tmp_path / "cache").rglob("*.cache")
    os.truncate(cache, cache.stat().st_size - _SIZE // 2)
    mount = start_mount(big.parent.as_uri(), *options, name="cut")
    assert _sum(mount.mountpoint / "big") == expected
    bad = _cache(mount)["num_bad_blocks"]
    assert bad >= _SIZE // 2 // _MIB
    wait_until(lambda: _cache(mount).get("cached_bytes") == _SIZE, "all blocks on disk")
    assert mount.stop() == 0

    at = cache.read_bytes().index(big.read_bytes()[5 * _MIB : 6 * _MIB])
    with cache.open("r+b") as opened_cache:
        opened_cache.seek(at + 12345)
        (byte,) = opened_cache.read(1)
        opened_cache.seek(at + 12345)
        opened_cache.write(bytes([byte ^ 1]))
    mount = start_mount(big.parent.as_uri(), *options, name="flipped")
    assert _sum(mount.mountpoint / "big") == expected
    assert _cache(mount)["num_bad_blocks"] == 1
    assert _cache(mount)["fetched_bytes"] == _MIB


def test_two_mounts_of_a_volume_share_what_they_read(
    start_mount: Callable[..., MountProcess], tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    big = _big_file(tmp_path)
    options = ("--cache-dir", str(tmp_path / "cache"))
    one = start_mount(big.parent.as_uri(), *options, name="one")
    other = start_mount(big.parent.as_uri(), *options, name="other")
    assert _sum(one.mountpoint / "big") == _sum(big)
    wait_until(lambda: _cache(one).get("cached_bytes") == _SIZE, "all blocks on disk")
    assert _sum(other.mountpoint / "big") == _sum(big)
    assert _cache(other)["fetched_bytes"] == 0
    assert _cache(other)["cached_bytes"] == _SIZE
