"""Many files and names on the mount and on its peers: 2,000 files of 100 kB, stats, a long listing.

Called by `mount_peers`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from measure import (
    Comparison,
    Program,
    Sample,
    Timing,
    compare,
    drop_page_cache,
    run_program,
    say,
    take_turns,
)
from peers import AnyMount, Bucket, delaying, mounted_side_by_side, tag_object
from places import UNCHANGED_DATA, Store, link_tree, mounted
from topics import Setting, as_files, as_seconds

__all__ = ["run"]

_READERS: Final = (1, 8)
_NUM_STATS: Final = 320
_NUM_STAT_THREADS: Final = 16

_FAR_FILES: Final = 500
"""With latency, where others take a second for some twenty files."""

_DEFAULT: Final = "mount, every open asks the store"
_LONG: Final = "mount, read-only, names believed for five minutes as rclone's mount does"
_OURS: Final[dict[str, Sequence[str]]] = {
    _DEFAULT: (),
    _LONG: UNCHANGED_DATA,
}


def run(setting: Setting, bucket: Bucket, store: Store) -> list[Comparison]:
    samples = setting.folder / "samples"
    _write_samples(samples, setting.num_files, setting.file_bytes)
    for count in _READERS:
        for number in range(setting.repeats):
            link_tree(samples, bucket.directory / f"tree-{count}-{number}")
    far_samples = setting.folder / "far-samples"
    num_far = min(_FAR_FILES, setting.num_files)
    _write_samples(far_samples, num_far, setting.file_bytes)
    for number in range(setting.repeats):
        link_tree(far_samples, bucket.directory / f"far-tree-{number}")
    stats = setting.folder / "stats"
    _write_samples(stats, _NUM_STATS, 100)
    for number in range(setting.repeats):
        link_tree(stats, bucket.directory / f"stats-{number}")
        link_tree(stats, store.directory / f"stats-{number}")
    results = []
    with mounted_side_by_side(bucket, setting.folder / "trees", _OURS) as mounts:
        for count in _READERS:
            results += _read_trees(setting, mounts, count)
    latency = f"bucket with {setting.latency_ms:g} ms latency"
    with (
        delaying(bucket, setting.latency_ms, setting.folder / "relay-of-names") as far,
        mounted_side_by_side(far, setting.folder / "far-names", _OURS) as mounts,
    ):
        results += _stats(setting, mounts, latency)
        results += _read_far_trees(setting, mounts, num_far, latency)
    with mounted(store, setting.folder / "files-api-names") as mount:
        store.set_latency(setting.latency_ms)
        results += _stats(
            setting, {_DEFAULT: mount}, f"Files API with {setting.latency_ms:g} ms latency"
        )
        store.set_latency(0.0)
    return results


def _read_trees(
    setting: Setting, mounts: Mapping[str, AnyMount], num_processes: int
) -> list[Comparison]:
    def read(mount: AnyMount, number: int) -> Sample:
        path = mount.path / f"tree-{num_processes}-{number}"
        return _read_tree(mount, path, num_processes, setting.num_files, setting.file_bytes)

    def cold(mount: AnyMount) -> Callable[[int], Sample]:
        return lambda number: read(mount, number)

    def cached(mount: AnyMount) -> Callable[[int], Sample]:
        def again(_round: int) -> Sample:
            drop_page_cache(mount.path / f"tree-{num_processes}-0", mount.cache)
            return read(mount, 0)

        return again

    def warm(mount: AnyMount) -> Callable[[int], Sample]:
        return lambda _round: read(mount, 0)

    readers = "one process" if num_processes == 1 else f"{num_processes} processes"
    files = f"{setting.num_files:,} files of {setting.file_bytes // 1000} kB by {readers}"
    results = []
    for state, side in {
        "nothing cached": cold,
        "all of it cached, page cache cold": cached,
        "all of it cached, page cache warm": warm,
    }.items():
        say(f"{files}, {state}")
        sides = {name: side(mount) for name, mount in mounts.items()}
        samples = take_turns(sides, setting.repeats)
        results += _against_peers(f"{files}, {state}", samples, as_files(setting.num_files))
    return results


def _read_far_trees(
    setting: Setting, mounts: Mapping[str, AnyMount], num_files: int, where: str
) -> list[Comparison]:
    def cold(mount: AnyMount) -> Callable[[int], Sample]:
        return lambda number: _read_tree(
            mount, mount.path / f"far-tree-{number}", 1, num_files, setting.file_bytes
        )

    what = (
        f"{num_files:,} files of {setting.file_bytes // 1000} kB by one process, "
        f"nothing cached, {where}"
    )
    say(what)
    sides = {name: cold(mount) for name, mount in mounts.items()}
    return _against_peers(what, take_turns(sides, setting.repeats), as_files(num_files))


def _read_tree(
    mount: AnyMount, path: Path, num_processes: int, num_files: int, file_bytes: int
) -> Sample:
    arguments = {
        "path": str(path),
        "num_processes": num_processes,
        "num_files": num_files,
        "file_bytes": file_bytes,
    }
    return mount.sample(lambda: _run("read_tree", arguments))


def _stats(setting: Setting, mounts: Mapping[str, AnyMount], where: str) -> list[Comparison]:
    def stat(mount: AnyMount) -> Callable[[int], Sample]:
        def once(number: int) -> Sample:
            arguments = {
                "path": str(mount.path / f"stats-{number}"),
                "num_files": _NUM_STATS,
                "num_threads": _NUM_STAT_THREADS,
            }
            return mount.sample(lambda: _run("stat_files", arguments))

        return once

    sides = {name: stat(mount) for name, mount in mounts.items()}
    sides["one second"] = lambda _round: Sample(seconds=1.0, peak_mib=0.0)
    what = f"{_NUM_STATS} stats from {_NUM_STAT_THREADS} threads, {where}"
    return _against_peers(what, take_turns(sides, setting.repeats), as_seconds)


def _against_peers(
    what: str, samples: Mapping[str, list[Sample]], unit: Callable[[float], str]
) -> list[Comparison]:
    """Each of ours against each that is not."""
    ours = [name for name in _OURS if name in samples]
    return [
        compare(f"{mine}: {what}", other, samples[mine], samples[other], unit)
        for mine in ours
        for other in samples
        if other not in ours
    ]


def _write_samples(directory: Path, num_files: int, size_bytes: int) -> None:
    """Files whose first bytes say which one it is (`peer_programs.read_tree`), as objects."""
    directory.mkdir(parents=True)
    for number in range(num_files):
        path = directory / f"sample-{number:08}"
        path.write_bytes(f"{number:08}".encode() + os.urandom(size_bytes - 8))
        tag_object(path)


def _run(program: str, arguments: Mapping[str, object]) -> Timing:
    return run_program(Program(module="peer_programs", name=program, arguments=arguments))
