"""Files a second of the data loader, against torch's own and databricks-sdk-air's over the same
files.

On the local disk the rest of the work is the same, so the ratio is what one position for the whole
job costs. On the mount it is what the mount costs, and what it saves against asking the store for
each file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loader_programs import NUM_WORKERS, SECOND_EPOCH
from measure import (
    Comparison,
    Program,
    Sample,
    Timing,
    compare,
    drop_page_cache,
    run_program,
    take_turns,
)
from peers import AIR, air_python, below_volumes
from places import (
    ROOT,
    UNCHANGED_DATA,
    Mount,
    Store,
    link_tree,
    mounted,
    serving,
    write_files,
)
from topics import Setting, as_files

__all__ = ["run"]

Side = Callable[[int], Sample]


def run(setting: Setting) -> list[Comparison]:
    with serving(setting.folder / "store") as store:
        native = store.directory / "native"
        write_files(native, setting.num_files, setting.file_bytes)
        for number in range(setting.repeats):
            link_tree(native, store.directory / f"cold-{number}")
        for number in range(2 * setting.repeats):
            link_tree(native, store.directory / f"air-{number}")
        results = [
            _on_disk(setting, native),
            *_against_air(setting, "on the local disk", store.directory, lambda _number: "native"),
        ]
        where = "on a read-only mount, names believed for five minutes"
        with mounted(store, setting.folder / "mount-of-data", UNCHANGED_DATA) as mount:
            results += _against_air(
                setting, where, mount.path, lambda number: f"air-{number}", mount
            )
        with mounted(store, setting.folder / "mount") as mount:
            return [
                *results,
                *_against_air(
                    setting, "on the mount", mount.path, lambda number: f"air-{number}", mount
                ),
                *_cold(setting, store, mount, native),
                *_cached(setting, mount, native),
            ]


def _on_disk(setting: Setting, native: Path) -> Comparison:
    _read(setting, "read_by_torch", native)
    ours, theirs = take_turns(
        {
            "trainmount, disk": lambda _round: _read(setting, "read_by_trainmount", native),
            "torch, disk": lambda _round: _read(setting, "read_by_torch", native),
        },
        setting.repeats,
    ).values()
    return compare(
        f"loader: {_files(setting)} on the local disk, page cache warm, {NUM_WORKERS} workers",
        "torch's DataLoader over a list of the files",
        ours,
        theirs,
        as_files(setting.num_files),
    )


def _against_air(
    setting: Setting,
    where: str,
    directory: Path,
    name: Callable[[int], str],
    mount: Mount | None = None,
) -> list[Comparison]:
    """Paths that the workers read, in two epochs. `name` gives a directory for each read."""
    with below_volumes(directory) as root:
        python = air_python() if root is not None else None
        if root is None or python is None:
            return []
        second: dict[str, list[Sample]] = {"ours": [], "theirs": []}

        def side(whose: str, program: str, offset: int, **options: Any) -> Side:
            def read(number: int) -> Sample:
                def measure() -> Timing:
                    path = root / name(2 * number + offset)
                    timing = _run(setting, program, path, **options)
                    seconds = timing.details[SECOND_EPOCH]
                    second[whose].append(Sample(seconds=seconds, peak_mib=timing.peak_mib))
                    return timing

                return mount.sample(measure) if mount is not None else _sample(measure())

            return read

        # Another environment, and what it logs and caches is its own.
        folder = str(setting.folder)
        other = {"PYTHONPATH": "", "HOME": folder, "TMPDIR": folder}
        ours, theirs = take_turns(
            {
                f"trainmount, {where}": side("ours", "read_paths_by_trainmount", 0),
                AIR: side("theirs", "read_paths_by_peer", 1, environment=other, python=python),
            },
            setting.repeats,
        ).values()
    what, unit = f"loader: paths of {_files(setting)} {where}", as_files(setting.num_files)
    return [
        compare(f"{what}, read by {NUM_WORKERS} workers, first epoch", AIR, ours, theirs, unit),
        compare(f"{what}, second epoch", AIR, second["ours"], second["theirs"], unit),
    ]


def _cold(setting: Setting, store: Store, mount: Mount, native: Path) -> list[Comparison]:
    def through_mount(number: int) -> Sample:
        path = mount.path / f"cold-{number}"
        return mount.sample(lambda: _run(setting, "read_by_trainmount", path))

    def through_client(number: int) -> Sample:
        path = f"{ROOT}/cold-{number}"
        return _sample(_run(setting, "read_by_trainmount", path, store.environment))

    def on_disk(_round: int) -> Sample:
        return _read(setting, "read_by_torch", native)

    ours, client, disk = take_turns(
        {"mount, cold": through_mount, "client": through_client, "torch, disk": on_disk},
        setting.repeats,
    ).values()
    what = f"loader: {_files(setting)} on the mount, nothing cached"
    unit = as_files(setting.num_files)
    return [
        compare(what, "the same loader over the volume client, no mount", ours, client, unit),
        compare(what, "torch's DataLoader on the local disk, page cache warm", ours, disk, unit),
    ]


def _cached(setting: Setting, mount: Mount, native: Path) -> list[Comparison]:
    """The first of the cold directories is in the block cache now, and in the page cache unless it
    is dropped."""
    path = mount.path / "cold-0"

    def through_mount(loader: str) -> Sample:
        return mount.sample(lambda: _run(setting, loader, path))

    def dropped(side: Callable[[], Sample], *places: Path) -> Side:
        def run_side(_round: int) -> Sample:
            drop_page_cache(*places)
            return side()

        return run_side

    ours, theirs = take_turns(
        {
            "mount, cached": dropped(
                lambda: through_mount("read_by_trainmount"), path, mount.cache
            ),
            "torch, disk": dropped(lambda: _read(setting, "read_by_torch", native), native),
        },
        setting.repeats,
    ).values()
    warm_ours, warm_torch, warm_disk = take_turns(
        {
            "mount, warm": lambda _round: through_mount("read_by_trainmount"),
            "torch on the mount, warm": lambda _round: through_mount("read_by_torch"),
            "torch, disk, warm": lambda _round: _read(setting, "read_by_torch", native),
        },
        setting.repeats,
    ).values()
    files, unit = _files(setting), as_files(setting.num_files)
    cold = f"loader: {files} that the block cache has, page cache cold"
    warm = f"loader: {files} on the mount again, page cache warm"
    on_disk = "torch's DataLoader on the local disk, page cache"
    return [
        compare(cold, f"{on_disk} cold", ours, theirs, unit),
        compare(warm, f"{on_disk} warm", warm_ours, warm_disk, unit),
        compare(warm, "torch's DataLoader on the mount, warm", warm_ours, warm_torch, unit),
    ]


def _files(setting: Setting) -> str:
    return f"{setting.num_files:,} files of {setting.file_bytes // 1000} kB"


def _run(
    setting: Setting,
    loader: str,
    directory: Path | str,
    environment: Mapping[str, str] | None = None,
    *,
    python: Path | None = None,
) -> Timing:
    arguments = {
        "directory": str(directory),
        "num_files": setting.num_files,
        "file_bytes": setting.file_bytes,
    }
    return run_program(
        Program(
            module="loader_programs",
            name=loader,
            arguments=arguments,
            environment=environment or {},
            python=str(python or sys.executable),
        )
    )


def _read(setting: Setting, loader: str, directory: Path) -> Sample:
    return _sample(_run(setting, loader, directory))


def _sample(timing: Timing) -> Sample:
    return Sample(seconds=timing.seconds, peak_mib=timing.peak_mib)
