"""Measures what the project's parts cost, as ratios of one run, and writes docs/BENCHMARKS.md.

    python benchmarks/run.py [--only TOPIC ...] [--quick] [--cluster] [--volume /Volumes/c/s/v]

Every side of a comparison runs in the same minutes on the same machine as the other. A topic that
is run replaces its own lines of the table; --quick writes nothing into docs/.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import report
from measure import say
from topics import Setting

TOPICS: Final = (
    "mount_reads",
    "mount_peers",
    "mount_memory",
    "loader",
    "checkpoints",
    "takeover",
    "files_api",
    "many_files",
    "server_bodies",
    "imports",
    "apply_to_pods",
)


def main() -> int:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, _leave)
    # The S3 server is started as for the tests.
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    folder = Path(tempfile.mkdtemp(prefix="trainmount-benchmarks-", dir=options.folder))
    try:
        for name in options.only or TOPICS:
            _run_topic(name, options, folder / name)
    finally:
        shutil.rmtree(folder)
    return 0


def _run_topic(name: str, options: argparse.Namespace, folder: Path) -> None:
    setting = Setting(folder=folder, volume=options.volume, cluster=options.cluster)
    if options.quick:
        setting = setting.quick()
    if options.rounds:
        setting = replace(setting, repeats=options.rounds)
    say(f"{name}: load of this machine is {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    folder.mkdir()
    try:
        results = importlib.import_module(name).run(setting)
    finally:
        # The disk holds one topic at a time. Nothing is mounted below any more.
        shutil.rmtree(folder)
    if not results:
        return
    print(report.table(results), flush=True)
    if not options.quick:
        report.record(name, results)
        report.write()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", action="append", choices=TOPICS, metavar="TOPIC", help=", ".join(TOPICS)
    )
    parser.add_argument("--quick", action="store_true", help="small: whether everything runs")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each comparison (5)")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="measure apply_to_pods too: on the cluster of KUBECONFIG, or on a rig of its own",
    )
    parser.add_argument(
        "--volume",
        metavar="/Volumes/C/S/V",
        help="measure files_api on a workspace, with the credentials of the environment",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/var/tmp"),
        help="where files are put; must be a disk, and needs about 12 GiB (%(default)s)",
    )
    return parser


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit("told to stop")


if __name__ == "__main__":
    sys.exit(main())
