"""What a reader notices when the mount's daemon is killed, against mounting again by hand.

The reader reads at random, past the page cache, so that every read needs a daemon. By hand means:
the mount's processes are killed, somebody unmounts the dead mount, mounts again, opens the file and
reads once.
"""

from __future__ import annotations

import mmap
import os
import random
import select
import sys
import time
from pathlib import Path

from measure import (
    MIB,
    Comparison,
    Program,
    Sample,
    Timing,
    compare,
    finish_program,
    measured,
    say,
    start_program,
)
from places import Mount, mounted, serving, write_blocks
from programs import Checker
from topics import Setting, as_seconds

from trainmount_fuse.session.mounting import unmount

__all__ = ["read_at_random", "run"]

_NOTABLE_SECONDS = 0.001
"""Reads that took less are not the one that waited for a successor."""

_CALM_SECONDS = 1.0
"""Of undisturbed reading before each kill."""


def run(setting: Setting) -> list[Comparison]:
    size = min(64, setting.read_mib) * MIB
    with serving(setting.folder / "store") as store:
        write_blocks(store.directory / "data", size)
        with (
            mounted(store, setting.folder / "mount") as mount,
            mounted(store, setting.folder / "by-hand") as by_hand,
        ):
            survivor = mount.path / "data"
            reader = Program(
                module="takeover",
                name="read_at_random",
                arguments={"path": str(survivor), "size_bytes": size},
            )
            process = start_program(reader)
            kills: list[float] = []
            remounts: list[Sample] = []
            try:
                for number in range(setting.repeats):
                    time.sleep(_CALM_SECONDS)
                    kills.append(time.monotonic())
                    mount.kill_daemon()
                    time.sleep(_CALM_SECONDS)
                    remounts.append(_remount(by_hand))
                    say(f"  {number + 1}/{setting.repeats} by hand: {remounts[-1].seconds:.3f} s")
            except BaseException:
                process.kill()
                process.wait()
                raise
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
            timing = finish_program(reader, process)
    pauses = [
        Sample(seconds=seconds, peak_mib=timing.peak_mib)
        for seconds in _pauses(timing.details["slow"], kills)
    ]
    say(f"  pauses: {', '.join(f'{pause.seconds:.3f} s' for pause in pauses)}")
    worst = max(pause.seconds for pause in pauses)
    num_reads = timing.details["num_reads"]
    line = compare(
        "mount: pause of a reader whose daemon is killed, "
        f"{len(kills)} times in {num_reads:,} reads, none failed",
        "kill, unmount, mount again, open and read by hand",
        pauses,
        remounts,
        as_seconds,
    )
    return [
        Comparison(
            what=line.what,
            against=line.against,
            ratios=line.ratios,
            here=f"{line.here}; longest pause {as_seconds(worst)}",
            memory="–",  # noqa: RUF001
        )
    ]


def read_at_random(path: str, size_bytes: int) -> Timing:
    """Read MiBs at random until the input ends; `details` has the reads that took long."""
    # Memory of whole pages, as O_DIRECT wants it on other file systems.
    buffer = mmap.mmap(-1, MIB)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    slow: list[tuple[float, float]] = []
    num_reads = 0
    with measured() as timing, memoryview(buffer) as view:
        while not select.select([sys.stdin], [], [], 0)[0]:
            offset = random.randrange(size_bytes // MIB) * MIB
            began = time.monotonic()
            if os.preadv(descriptor, [view], offset) != MIB:
                raise RuntimeError("a read was short")
            seconds = time.monotonic() - began
            Checker(offset).feed(view)
            num_reads += 1
            if seconds > _NOTABLE_SECONDS:
                slow.append((began, seconds))
    os.close(descriptor)
    timing.details = {"slow": slow, "num_reads": num_reads}
    return timing


def _pauses(slow: list[tuple[float, float]], kills: list[float]) -> list[float]:
    """The longest read that was under way or began after each kill, before the next."""
    pauses = []
    for number, kill in enumerate(kills):
        end = kills[number + 1] if number + 1 < len(kills) else float("inf")
        pauses.append(
            max(seconds for began, seconds in slow if began < end and began + seconds >= kill)
        )
    return pauses


def _remount(mount: Mount) -> Sample:
    data = mount.path / "data"
    began = time.perf_counter()
    mount.kill()
    unmount(mount.path, lazy=True)
    mount.start()
    _read_first(data)
    return Sample(seconds=time.perf_counter() - began, peak_mib=0.0)


def _read_first(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        Checker().feed(file.read(MIB))
