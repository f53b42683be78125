"""What a mount holds in memory: idle, while 200 files are read at once, some seconds later, and
after a long listing.

The ratios say how many times as much the limit is: 1.00 is at the limit, more is below it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from measure import (
    MIB,
    Comparison,
    Program,
    Sample,
    compare,
    resident_mib_of,
    run_program,
    say,
    shared_out_mib_of,
    take_turns,
)
from places import ROOT, Mount, Store, mounted, serving, write_blocks, write_names
from topics import Setting, as_files

__all__ = ["run"]

_BUDGET_MIB: Final = 256
_PEAK_MIB: Final = _BUDGET_MIB + 64
_IDLE_MIB: Final = 80

_LEFT_FRACTION: Final = 1.1
"""Of what the daemon held before, some seconds after."""

_SETTLE_SECONDS: Final = 15.0
"""Threads that nobody needs end after ten."""

_NUM_FILES: Final = 200
_BYTES_AN_ENTRY: Final = 1024


def run(setting: Setting) -> list[Comparison]:
    with serving(setting.folder / "store") as store:
        return [*_many_readers(setting, store), *_long_listing(setting, store)]


def _many_readers(setting: Setting, store: Store) -> list[Comparison]:
    """A new mount each round, as its peak says nothing the second time."""
    size_mib = setting.open_file_mib
    _store_files(setting.folder / "block", store.directory / "open", size_mib)
    idle: list[float] = []
    peaks: list[float] = []
    left: list[float] = []
    for number in range(setting.repeats):
        folder = setting.folder / f"mount-{number}"
        with mounted(store, folder, ["--memory", f"{_BUDGET_MIB}Mi"]) as mount:
            idle.append(sum(shared_out_mib_of(pid) for pid in mount.pids))
            # What is loaded with the first file belongs to the state before.
            (mount.path / "open" / "first").read_bytes()
            before = resident_mib_of(mount.daemon_pid)
            sample = _read_at_once(mount, size_mib)
            peaks.append(sample.daemon_mib)
            left.append(_settled_mib(mount, before) / before)
        say(
            f"  {number + 1}/{setting.repeats} idle {idle[-1]:.0f} MiB in all, daemon before "
            f"{before:.0f} MiB, peak {peaks[-1]:.0f} MiB, after {left[-1] * before:.0f} MiB; "
            f"{sample.seconds:.1f} s"
        )
    files = f"{_NUM_FILES} files of {size_mib} MiB read at once"
    budget = f"budget {_BUDGET_MIB} MiB"
    return [
        _below("memory of an idle mount, all its processes", f"{_IDLE_MIB} MiB", idle, _IDLE_MIB),
        _below(
            f"memory of the daemon, {budget}: {files}, peak", f"{_PEAK_MIB} MiB", peaks, _PEAK_MIB
        ),
        _below(
            f"memory of the daemon, {budget}: {files}, {_SETTLE_SECONDS:g} s later at most",
            "a tenth more than before",
            left,
            _LEFT_FRACTION,
        ),
    ]


def _long_listing(setting: Setting, store: Store) -> list[Comparison]:
    """The first listing of a directory, by a new mount each round, and the client's own."""
    count = setting.num_listed
    write_names(store.directory / "long", count)
    growth: list[float] = []

    def through_mount(number: int) -> Sample:
        with mounted(store, setting.folder / f"listing-{number}") as mount:
            (mount.path / "open" / "first").read_bytes()
            before = resident_mib_of(mount.daemon_pid)
            path = str(mount.path / "long")
            arguments = {"path": path, "num_files": count}
            program = Program(module="peer_programs", name="list_directory", arguments=arguments)
            sample = mount.sample(lambda: run_program(program))
            growth.append((resident_mib_of(mount.daemon_pid) - before) * MIB / count)
            say(f"  {growth[-1]:,.0f} bytes an entry")
        return sample

    def by_client(_round: int) -> Sample:
        timing = run_program(
            Program(
                module="peer_programs",
                name="list_client",
                arguments={"root": ROOT, "path": "long", "num_files": count},
                environment=store.environment,
            )
        )
        return Sample(seconds=timing.seconds, peak_mib=timing.peak_mib)

    sides = {"volume client, pages of its own": by_client, "mount": through_mount}
    samples = take_turns(sides, setting.repeats)
    listed = f"list {count:,} files"
    return [
        *(
            compare(f"mount: {listed}, names only", name, samples["mount"], theirs, as_files(count))
            for name, theirs in samples.items()
            if name != "mount"
        ),
        _below(
            f"memory of the daemon: growth an entry, {listed}",
            f"{_BYTES_AN_ENTRY:,} bytes",
            growth,
            _BYTES_AN_ENTRY,
        ),
    ]


def _store_files(block: Path, directory: Path, size_mib: int) -> None:
    """Many names of one file: to the mount these are as many files."""
    write_blocks(block, size_mib * MIB)
    directory.mkdir()
    for name in ["first", *(f"file-{number:03}" for number in range(_NUM_FILES))]:
        (directory / name).hardlink_to(block)


def _read_at_once(mount: Mount, size_mib: int) -> Sample:
    arguments = {
        "path": str(mount.path / "open"),
        "prefix": "file-",
        "num_files": _NUM_FILES,
        "file_bytes": size_mib * MIB,
    }
    program = Program(module="peer_programs", name="read_at_once", arguments=arguments)
    return mount.sample(lambda: run_program(program))


def _settled_mib(mount: Mount, before_mib: float) -> float:
    """What the daemon holds when it is back, or when it had its time."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        now = resident_mib_of(mount.daemon_pid)
        if now <= _LEFT_FRACTION * before_mib or time.monotonic() > deadline:
            return now
        time.sleep(0.5)


def _below(what: str, limit_text: str, measured: list[float], limit: float) -> Comparison:
    unit = "" if limit == _LEFT_FRACTION else " MiB" if limit_text.endswith("MiB") else " bytes"
    text = ", ".join(f"{one:.2f}" if not unit else f"{one:,.0f}" for one in measured)
    return Comparison(
        what=what,
        against=limit_text,
        ratios=tuple(limit / max(one, limit / 1000) for one in measured),
        here=f"{text}{unit}",
        memory="–",  # noqa: RUF001
    )
