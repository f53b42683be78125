"""A tree of small files through the Files API: `trainmount cp -r` against a loop over the
databricks SDK, up and down, on a local server that both sides share.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from measure import (
    Comparison,
    Program,
    Sample,
    compare,
    run_program,
    take_turns,
)
from places import ROOT, Store, serving
from topics import Setting, as_files

__all__ = ["run"]

_FILES_IN_A_DIRECTORY: Final = 100
_FILE_BYTES: Final = 10_000
_NUM_THREADS: Final = 8

_SDK: Final = "databricks SDK, `files.%s` for each file: one thread"
_SDK_THREADS: Final = f"databricks SDK, `files.%s` for each file: {_NUM_THREADS} threads"


def run(setting: Setting) -> list[Comparison]:
    num_files = setting.num_small_files
    source = setting.folder / "source"
    _write_tree(source, num_files)
    with serving(setting.folder / "store") as store:
        ways = _Ways(setting.folder, source, store)
        up = take_turns(
            {
                "up, cp -r": lambda _round: ways.upload_cp(),
                "up, engine": lambda _round: ways.upload("upload_engine"),
                "up, SDK": lambda _round: ways.upload("upload_sdk"),
                "up, SDK threads": lambda _round: ways.upload(
                    "upload_sdk", num_threads=_NUM_THREADS
                ),
            },
            setting.repeats,
        )
        shutil.copytree(source, store.directory / "tree")
        down = take_turns(
            {
                "down, cp -r": lambda _round: ways.download_cp(),
                "down, engine": lambda _round: ways.download("download_engine"),
                "down, SDK": lambda _round: ways.download("download_sdk"),
                "down, SDK threads": lambda _round: ways.download(
                    "download_sdk", num_threads=_NUM_THREADS
                ),
            },
            setting.repeats,
        )
    return [*_lines(up, "up", "upload", num_files), *_lines(down, "down", "download", num_files)]


def _lines(
    samples: Mapping[str, list[Sample]], way: str, verb: str, num_files: int
) -> list[Comparison]:
    what = f"{num_files:,} files of 10 kB, {verb}"
    command, engine = samples[f"{way}, cp -r"], samples[f"{way}, engine"]
    loop, threads = samples[f"{way}, SDK"], samples[f"{way}, SDK threads"]
    unit = as_files(num_files)
    whole = f"{what}: `trainmount cp -r`, the whole process"
    return [
        compare(whole, _SDK % verb, command, loop, unit),
        compare(whole, _SDK_THREADS % verb, command, threads, unit),
        compare(f"{what}: `copy_tree`", _SDK % verb, engine, loop, unit),
    ]


class _Ways:
    """Each side once, from and to places that nobody has used before."""

    def __init__(self, folder: Path, source: Path, store: Store) -> None:
        self._folder = folder
        self._source = source
        self._store = store
        self._num_used = 0

    def upload_cp(self) -> Sample:
        name = self._name()
        sample = self._command("cp", "-r", str(self._source), f"{ROOT}/{name}")
        return self._checked(sample, self._store.directory / name)

    def upload(self, program: str, **more: object) -> Sample:
        name = self._name()
        arguments = {"source": str(self._source), "path": f"{ROOT}/{name}", **more}
        return self._checked(self._program(program, arguments), self._store.directory / name)

    def download_cp(self) -> Sample:
        target = self._folder / self._name()
        sample = self._command("cp", "-r", f"{ROOT}/tree", str(target))
        return self._checked(sample, target)

    def download(self, program: str, **more: object) -> Sample:
        target = self._folder / self._name()
        arguments = {"path": f"{ROOT}/tree", "folder": str(target), **more}
        return self._checked(self._program(program, arguments), target)

    def _name(self) -> str:
        self._num_used += 1
        return f"copy-{self._num_used}"

    def _program(self, name: str, arguments: Mapping[str, object]) -> Sample:
        timing = run_program(
            Program(
                module="tree_programs",
                name=name,
                arguments=arguments,
                environment=self._store.environment,
            )
        )
        return Sample(seconds=timing.seconds, peak_mib=timing.peak_mib)

    def _command(self, *arguments: str) -> Sample:
        """The command as a person runs it: its start is part of the time, and of the memory."""
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "trainmount_cli", *arguments],
            env={**os.environ, **self._store.environment},
            stdout=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise RuntimeError(f"trainmount {' '.join(arguments)} failed")
        return Sample(seconds=seconds, peak_mib=usage.ru_maxrss / 1024)

    def _checked(self, sample: Sample, result: Path) -> Sample:
        """Every file must be there, of its size; then the place is cleared for the next."""
        sizes = sorted(path.stat().st_size for path in result.rglob("*") if path.is_file())
        wanted = sorted(path.stat().st_size for path in self._source.rglob("*") if path.is_file())
        if sizes != wanted:
            raise RuntimeError(f"{len(sizes)} files arrived of {len(wanted)}")
        shutil.rmtree(result)
        return sample


def _write_tree(root: Path, num_files: int) -> None:
    for number in range(num_files):
        directory = root / f"directory-{number // _FILES_IN_A_DIRECTORY:04}"
        if not number % _FILES_IN_A_DIRECTORY:
            directory.mkdir(parents=True)
        (directory / f"sample-{number:06}").write_bytes(os.urandom(_FILE_BYTES))
