"""One file through the mount: read where its blocks are on disk, read where nothing is, written.

Against the same file on the same disk, the volume client, and a bare urllib3 loop, on a store that
answers at once and on one that takes its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
from places import ROOT, Mount, Store, mounted, serving, write_blocks
from topics import Setting, as_rate

__all__ = ["run"]


def run(setting: Setting) -> list[Comparison]:
    source = setting.folder / "source"
    write_blocks(source, setting.read_mib * MIB)
    with serving(setting.folder / "store") as store:
        (store.directory / "cached").hardlink_to(source)
        with mounted(store, setting.folder / "mount") as mount:
            results = _cached_reads(setting, source, mount)
            results += _cold_reads(setting, store, mount, 0.0)
            results += _cold_reads(setting, store, mount, setting.latency_ms)
            results.append(_writes(setting, store, mount))
    return results


def _cached_reads(setting: Setting, source: Path, mount: Mount) -> list[Comparison]:
    size = setting.read_mib * MIB
    _read("read_file", str(mount.path / "cached"), size)

    def through_mount(_round: int) -> Sample:
        drop_page_cache(mount.path / "cached", mount.cache)
        return mount.sample(lambda: _read("read_file", str(mount.path / "cached"), size))

    def native(_round: int) -> Sample:
        drop_page_cache(source)
        return _sample(_read("read_file", str(source), size))

    sides = take_turns({"mount, cached": through_mount, "native, cold": native}, setting.repeats)
    ours, theirs = sides.values()
    size_text = f"{setting.read_mib} MiB"
    return [
        compare(
            f"mount: read {size_text} that the block cache has, page cache cold",
            "the same file on the same disk, page cache cold",
            ours,
            theirs,
            as_rate(size),
        )
    ]


def _cold_reads(
    setting: Setting, store: Store, mount: Mount, latency_ms: float
) -> list[Comparison]:
    """Nothing is cached on our side; the store has the bytes in memory, so that it is not the
    measure."""
    size = setting.read_mib * MIB
    names = [f"cold-{latency_ms:g}-{number}" for number in range(setting.repeats)]
    for name in names:
        (store.directory / name).hardlink_to(store.directory / "cached")
    _read("read_file", str(store.directory / "cached"), size)

    def through_mount(number: int) -> Sample:
        path = str(mount.path / names[number])
        return mount.sample(lambda: _read("read_file", path, size))

    def by(program: str, number: int, **more: str) -> Sample:
        arguments = {"path": f"{ROOT}/{names[number]}", "size_bytes": size, **more}
        return _sample(_run(program, arguments, store.environment))

    folder = str(setting.folder)
    store.set_latency(latency_ms)
    try:
        sides = take_turns(
            {
                "mount, cold": through_mount,
                "client": lambda number: by("read_client", number),
                "urllib3": lambda number: by("read_urllib3", number),
                "download": lambda number: by("download_client", number, folder=folder),
            },
            setting.repeats,
        )
    finally:
        store.set_latency(0.0)
    where = f"store with {latency_ms:g} ms latency" if latency_ms else "store without latency"
    mount_samples, client, bare, download = sides.values()
    what = f"mount: read {setting.read_mib} MiB, nothing cached, {where}"
    unit = as_rate(size)
    return [
        compare(what, "volume client, 8 ranges of 8 MiB at once", mount_samples, client, unit),
        compare(
            what, "volume client, the same ranges into a local file", mount_samples, download, unit
        ),
        compare(what, "bare urllib3, the same ranges", mount_samples, bare, unit),
        compare(
            f"volume client: read {setting.read_mib} MiB, {where}",
            "bare urllib3, the same ranges",
            client,
            bare,
            unit,
        ),
    ]


def _writes(setting: Setting, store: Store, mount: Mount) -> Comparison:
    size = setting.write_mib * MIB
    source = setting.folder / "to-write"
    write_blocks(source, size)

    def through_mount(number: int) -> Sample:
        target = str(mount.path / f"written-{number}")
        arguments = {"source": str(source), "target": target}
        return mount.sample(lambda: _run("write_file", arguments))

    def by_client(number: int) -> Sample:
        arguments = {"source": str(source), "path": f"{ROOT}/uploaded-{number}"}
        return _sample(_run("upload_client", arguments, store.environment))

    sides = take_turns({"mount, write": through_mount, "upload": by_client}, setting.repeats)
    for number in range(setting.repeats):
        if (store.directory / f"written-{number}").read_bytes() != source.read_bytes():
            raise RuntimeError("the mount stored other bytes than were written")
    ours, theirs = sides.values()
    return compare(
        f"mount: write {setting.write_mib} MiB and close, which uploads it",
        "volume client's upload of a local file",
        ours,
        theirs,
        as_rate(size),
    )


def _read(
    program: str, path: str, size_bytes: int, environment: Mapping[str, str] | None = None
) -> Timing:
    return _run(program, {"path": path, "size_bytes": size_bytes}, environment)


def _run(
    program: str, arguments: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Timing:
    return run_program(
        Program(module="programs", name=program, arguments=arguments, environment=environment or {})
    )


def _sample(timing: Timing) -> Sample:
    return Sample(seconds=timing.seconds, peak_mib=timing.peak_mib)
