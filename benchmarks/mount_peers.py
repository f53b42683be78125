"""The mount against rclone mount and s3fs on one S3 server, and against the bare transfer.

All of them are mounted at the same time and take turns. A file that a side reads cold was put into
the bucket before the mounts were made, so that nobody's list of names is out of date. What the
options of the peers are, and why, is in `peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mount_trees
from measure import (
    MIB,
    Comparison,
    Program,
    Sample,
    Timing,
    compare,
    drop_page_cache,
    run_program,
    take_turns,
)
from peers import (
    BUCKET_URL,
    FUSE4DBRICKS,
    S3FS,
    AnyMount,
    Bucket,
    PeerMount,
    delaying,
    mounted_by_fuse4dbricks,
    mounted_side_by_side,
    serving_bucket,
    tag_object,
)
from places import ROOT, Mount, Store, mounted, serving, write_blocks
from topics import Setting, as_rate

__all__ = ["run"]

_OURS = "mount"


def run(setting: Setting) -> list[Comparison]:
    folder = setting.folder
    source = folder / "source"
    write_blocks(source, setting.read_mib * MIB)
    with serving_bucket(folder / "bucket") as bucket, serving(folder / "store") as store:
        names = [f"cold-{number}" for number in range(setting.repeats)]
        tag_object(source)
        for directory in (bucket.directory, store.directory):
            for name in ["cached", *names]:
                (directory / name).hardlink_to(source)
        with mounted_side_by_side(bucket, folder / "near", {_OURS: ()}) as mounts:
            results = _cached_reads(setting, source, mounts)
            results += _writes(setting, bucket, mounts)
        with (
            delaying(bucket, setting.latency_ms, folder / "relay") as far,
            mounted_side_by_side(far, folder / "far", {_OURS: ()}) as mounts,
        ):
            results += _cold_reads_of_bucket(setting, far, mounts, names)
        with (
            mounted(store, folder / "files-api") as mount,
            mounted_by_fuse4dbricks(store, folder / "fuse4dbricks") as peer,
        ):
            results += _cold_reads_of_volume(setting, store, mount, peer, names)
        results += mount_trees.run(setting, bucket, store)
    return results


def _cached_reads(
    setting: Setting, source: Path, mounts: Mapping[str, AnyMount]
) -> list[Comparison]:
    size = setting.read_mib * MIB

    def through(mount: AnyMount) -> Callable[[int], Sample]:
        _read(mount.path / "cached", size)

        def read(_round: int) -> Sample:
            drop_page_cache(mount.path / "cached", mount.cache)
            return mount.sample(lambda: _read(mount.path / "cached", size))

        return read

    def native(_round: int) -> Sample:
        drop_page_cache(source)
        return _sample(_read(source, size))

    on_disk = "the same file on the same disk, page cache cold"
    sides = {name: through(mount) for name, mount in mounts.items()} | {on_disk: native}
    what = (
        f"mount: read {setting.read_mib} MiB of a bucket that the block cache has, page cache cold"
    )
    return _against_ours(what, take_turns(sides, setting.repeats), as_rate(size))


def _cold_reads_of_bucket(
    setting: Setting,
    bucket: Bucket,
    mounts: Mapping[str, AnyMount],
    names: Sequence[str],
) -> list[Comparison]:
    size = setting.read_mib * MIB

    def through(mount: AnyMount) -> Callable[[int], Sample]:
        return lambda number: mount.sample(lambda: _read(mount.path / names[number], size))

    def by_client(number: int) -> Sample:
        arguments = {"path": f"{BUCKET_URL}/{names[number]}", "size_bytes": size}
        return _sample(_run("read_client", arguments, bucket.environment))

    client = "bucket client, 8 ranges of 8 MiB at once"
    sides = {name: through(mount) for name, mount in mounts.items()} | {client: by_client}
    where = f"bucket with {setting.latency_ms:g} ms latency"
    what = f"mount: read {setting.read_mib} MiB, nothing cached, {where}"
    return _against_ours(what, take_turns(sides, setting.repeats), as_rate(size))


def _cold_reads_of_volume(
    setting: Setting, store: Store, mount: Mount, peer: PeerMount | None, names: Sequence[str]
) -> list[Comparison]:
    size = setting.read_mib * MIB

    def through(mounted: AnyMount) -> Callable[[int], Sample]:
        return lambda number: mounted.sample(lambda: _read(mounted.path / names[number], size))

    def by(program: str) -> Callable[[int], Sample]:
        def read(number: int) -> Sample:
            arguments = {"path": f"{ROOT}/{names[number]}", "size_bytes": size}
            return _sample(_run(program, arguments, store.environment))

        return read

    sides = {_OURS: through(mount)} | ({} if peer is None else {FUSE4DBRICKS: through(peer)})
    sides |= {
        "volume client, 8 ranges of 8 MiB at once": by("read_client"),
        "bare urllib3, the same ranges": by("read_urllib3"),
    }
    store.set_latency(setting.latency_ms)
    try:
        samples = take_turns(sides, setting.repeats)
    finally:
        store.set_latency(0.0)
    where = f"Files API with {setting.latency_ms:g} ms latency"
    what = f"mount: read {setting.read_mib} MiB, nothing cached, {where}"
    return _against_ours(what, samples, as_rate(size))


def _writes(setting: Setting, bucket: Bucket, mounts: Mapping[str, AnyMount]) -> list[Comparison]:
    """`close` of rclone's mount returns before anything is uploaded, so it has no line here."""
    size = setting.long_write_mib * MIB
    source = setting.folder / "to-write"
    write_blocks(source, size)
    written: list[str] = []

    def through(mount: AnyMount) -> Callable[[int], Sample]:
        def write(_round: int) -> Sample:
            written.append(f"written-{len(written)}")
            arguments = {"source": str(source), "target": str(mount.path / written[-1])}
            return mount.sample(lambda: _run("write_file", arguments))

        return write

    def by_client(_round: int) -> Sample:
        written.append(f"written-{len(written)}")
        arguments = {"source": str(source), "path": f"{BUCKET_URL}/{written[-1]}"}
        return _sample(_run("upload_client", arguments, bucket.environment))

    def checked(side: Callable[[int], Sample]) -> Callable[[int], Sample]:
        def write(number: int) -> Sample:
            sample = side(number)
            stored = bucket.directory / written[-1]
            if stored.stat().st_size != size:
                raise RuntimeError("close returned before the file was stored")
            stored.unlink()
            return sample

        return write

    waiting = {name: through(mounts[name]) for name in (_OURS, S3FS.name) if name in mounts}
    sides = waiting | {"bucket client's upload of a local file": by_client}
    samples = take_turns({name: checked(side) for name, side in sides.items()}, setting.repeats)
    source.unlink()
    what = f"mount: write {setting.long_write_mib} MiB to a bucket and close, which uploads it"
    return _against_ours(what, samples, as_rate(size))


def _against_ours(
    what: str, samples: Mapping[str, list[Sample]], unit: Callable[[float], str]
) -> list[Comparison]:
    ours, *others = samples
    return [compare(what, name, samples[ours], samples[name], unit) for name in others]


def _read(path: Path, size_bytes: int) -> Timing:
    return _run("read_file", {"path": str(path), "size_bytes": size_bytes})


def _run(
    program: str, arguments: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Timing:
    return run_program(
        Program(module="programs", name=program, arguments=arguments, environment=environment or {})
    )


def _sample(timing: Timing) -> Sample:
    return Sample(seconds=timing.seconds, peak_mib=timing.peak_mib)
