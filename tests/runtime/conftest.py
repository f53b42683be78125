"""Fixtures of the runtime's tests: ranks in real processes, directories of small files."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., list[int]]


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunRanks]:
    """`run_ranks(program, world_size, **arguments)`: exit codes of a program on that many ranks."""
    here = Path(__file__).parent
    errors = tmp_path_factory.mktemp("ranks") / "stderr"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, str(here / "rank_launcher.py"), str(here / "rank_programs.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        ) as launcher,
    ):
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        requests, answers = launcher.stdin, launcher.stdout
        assert answers.readline() == "ready\n", errors.read_text()

        def run(program: str, world_size: int, **arguments: Any) -> list[int]:
            request = {"program": program, "world_size": world_size, "arguments": arguments}
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            codes: list[int] = json.loads(answers.readline())
            if any(codes):
                print(errors.read_text()[-4000:])
            return codes

        yield run
        requests.close()


@pytest.fixture
def make_files() -> Callable[[Path, int], list[str]]:
    """`make_files(directory, count)`: that many files of nine bytes and more; returns their names
    in order.
    """

    def make(directory: Path, count: int) -> list[str]:
        directory.mkdir(parents=True, exist_ok=True)
        content = random.Random(count)
        names = [f"f{number:03d}" for number in range(count)]
        for number, name in enumerate(names):
            (directory / name).write_bytes(
                content.randbytes(8) + bytes([number % 4]) + b"." * number
            )
        return names

    return make
