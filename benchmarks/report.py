"""The table and the picture of docs/BENCHMARKS.md. Called by `run`.

What was measured is kept in results.json, one entry a topic, so that a topic can be measured again
alone; the document is made from that file alone.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from measure import Comparison

__all__ = ["record", "table", "write"]

_RESULTS: Final = Path(__file__).with_name("results.json")
_DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
_DOCUMENT: Final = _DOCS / "BENCHMARKS.md"
_PICTURE: Final = _DOCS / "benchmarks.png"

_TITLES: Final = {
    "mount_reads": "A file on the mount",
    "mount_peers": "The mount beside rclone and s3fs",
    "mount_memory": "The memory of a mount",
    "loader": "The loader",
    "checkpoints": "Checkpoints",
    "takeover": "The death of a daemon",
    "files_api": "The Files API",
    "server_bodies": "The local server",
    "apply_to_pods": "From apply to pods",
}
"""The topics in the document's order."""

_HEADER: Final = """\
# Benchmarks

Written by `benchmarks/run.py` from `benchmarks/results.json`; don't edit it by hand.

**How to read it.** Every line compares two sides that took turns in one run on one machine. The
ratio says **how many times as fast the first side is**: 1.00 is equal, more is faster. Given is the
median of the rounds, with the smallest and the largest. "Here" has both sides in units, the first
side first; it is for orientation only, since another machine gives other numbers. Memory is the
peak above what a process held when the clock began; a mount's daemon is counted whole, and the
seconds after it are the processor time it took in its best round, all its threads together. Where
the page cache is "cold", the kernel was told to drop the pages of these files before the round, and
those of the mount's own cache. Lines about memory say how many times as much the limit is.

![The ratios as bars](benchmarks.png)
"""

_FOOTER: Final = """\
## What is measured

The store is `trainmount serve` on the same machine, without fsync and with the bytes in memory: it
shall cost as little as it can, so that the ratios show what our side costs. Server, mount and
program share the cores, so a mount competes with the store that it reads from. A file that is read
"with nothing cached" is one that this mount has never seen. Each program runs in a fresh process,
imports left out, and checks what it reads. What moves one file has spoken to its store before.

The table beside rclone and s3fs has all mounts on one S3 server (versitygw, a directory served as a
bucket), mounted at the same time, with caches of their own on one disk; a peer that is not
installed is left out (`apt install rclone s3fs`). Latency comes from a relay before that server,
which holds each request back. rclone is there twice: with `--vfs-cache-mode full` and nothing else,
where names are believed for five minutes, and tuned as its documentation says for data that nobody
changes: `--vfs-read-ahead 128Mi --vfs-read-chunk-size 32Mi --max-read-ahead 1Mi --no-modtime
--vfs-fast-fingerprint --no-checksum --dir-cache-time 1h --attr-timeout 1m`. s3fs has `use_cache`,
`kernel_cache`, `enable_noobj_cache`, eight requests at once and a cache of names for all files; it
believes names for fifteen minutes. Our mount is there twice too: as it is by default, where every
open asks the store for the file's version, and with `--metadata-timeout 3600 --open-timeout 3600`,
which is the one that promises no more than the peers do. rclone's `close` returns before anything
is uploaded, so it has no line for written files.

## Where the time goes when a ratio is low

A first reading, from sampled stacks and from the code, on a machine that was busy (its load stands
above each table): wide ranges mean that, and no ratio here should be quoted without them.

- *Many small files on the mount*: every `open` asks the store for the file's version, so that it
  sees what another node has closed. The requests of one mount share one Python process, and the
  store of this table shares the cores with it; the page cache does not help, the request remains.
- *A file that is not cached*: on two cores the store, the daemon, the disk of the cache and the
  program share what a bare loop has for itself and the store. Bytes are copied twice more than
  there: into the kernel's pages and out of them.
- *A checkpoint without a mount*: each writer sends one part after another and each reader reads one
  range at a time, where the peers have eight under way.

## Again

All topics but the cluster's; or one topic, where the others keep their lines:

    make benchmarks
    .venv/bin/python benchmarks/run.py --only loader

On a Kubernetes (of `KUBECONFIG`, or one of its own), on your workspace, and to see whether
everything runs, which writes nothing here:

    .venv/bin/python benchmarks/run.py --only apply_to_pods --cluster
    .venv/bin/python benchmarks/run.py --only files_api --volume /Volumes/c/s/v
    .venv/bin/python benchmarks/run.py --quick

It needs `/dev/fuse` and 12 GiB of disk, and leaves nothing behind. Root can raise the read-ahead of
a mount, others can't: as another user the reads through the mount are slower.
"""


def table(results: Sequence[Comparison]) -> str:
    """The lines as Markdown."""
    lines = ["| what | against | times as fast | here | peak memory |", "|---|---|---|---|---|"]
    for one in results:
        ratio = f"**{one.median:.2f}** ({min(one.ratios):.2f}–{max(one.ratios):.2f})"  # noqa: RUF001
        lines.append(f"| {one.what} | {one.against} | {ratio} | {one.here} | {one.memory} |")
    return "\n".join(lines)


def record(topic: str, results: Sequence[Comparison]) -> None:
    """Keep the lines of a topic, in the place of older ones."""
    kept = _kept()
    kept[topic] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": _machine(),
        "lines": [asdict(one) for one in results],
    }
    temporary = _RESULTS.with_suffix(".new")
    temporary.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    temporary.replace(_RESULTS)


def write() -> None:
    """Make the document and the picture from what is kept."""
    kept = _kept()
    parts = [_HEADER]
    drawn: list[Comparison] = []
    for topic, title in _TITLES.items():
        if topic in kept:
            entry = kept[topic]
            lines = [_comparison(line) for line in entry["lines"]]
            rounds = len(lines[0].ratios)
            about = f"{entry['date']}, {rounds} rounds; {entry['machine']}."
            parts.append(f"## {title}\n\n{about}\n\n{table(lines)}\n")
            drawn += lines
    _DOCUMENT.write_text("\n".join([*parts, _FOOTER]))
    _draw(drawn)


def _kept() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    return kept


def _comparison(line: dict[str, Any]) -> Comparison:
    return Comparison(**{**line, "ratios": tuple(line["ratios"])})


def _machine() -> str:
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    kernel = re.match(r"\d+\.\d+", platform.release())
    return (
        f"{os.cpu_count()} cores, {memory_gib:.0f} GiB of memory, "
        f"Linux {kernel[0] if kernel else platform.release()}, Python {platform.python_version()}, "
        f"torch {version('torch').partition('+')[0]}; load {os.getloadavg()[0]:.1f} at the end"
    )


def _draw(lines: Sequence[Comparison]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = list(reversed(lines))  # the first line shall be on top
    medians = [line.median for line in lines]
    spread = [
        [line.median - min(line.ratios) for line in lines],
        [max(line.ratios) - line.median for line in lines],
    ]
    figure, axes = pyplot.subplots(figsize=(13, 1.2 + 0.5 * len(lines)))
    places = range(len(lines))
    # From 1 on: to the left is slower, to the right is faster.
    widths = [value - 1.0 for value in medians]
    colours = ["#2a7f62" if value >= 1.0 else "#c9822b" for value in medians]
    axes.barh(places, widths, left=1.0, color=colours, height=0.6)
    axes.errorbar(medians, places, xerr=spread, fmt="none", ecolor="#444444", capsize=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("times as fast as the other side (median, smallest and largest round)")
    names = [f"{line.what}\nagainst {line.against}".replace("`", "") for line in lines]
    axes.set_yticks(places, names, fontsize=8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    right = max(max(line.ratios) for line in lines)
    for place, line in zip(places, lines, strict=True):
        axes.text(right * 1.1, place, f"{line.median:.2f}", va="center", fontsize=9)
    left = min(min(line.ratios) for line in lines) / 1.3
    axes.set_xlim(left, right * 1.6)
    scale = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    ticks = [value for value in scale if left <= value <= right * 1.6]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(_PICTURE, dpi=110)
    pyplot.close(figure)
