"""`trainmount.data` beside `databricks.air.data`, as its users run it: the same files for the same
streams, and each continues what the other has saved.

That library is installed into an environment of its own and only run. It reads below `/Volumes`
alone, which a namespace of the programs has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tests.environments import environment

PROGRAM = Path(__file__).with_name("air_program.py")
TREE = Path(__file__).resolve().parents[2]
THEIRS, OURS = "databricks.air.data", "trainmount.data"
VERSION = "0.1.1"
DIRECTORY = "/Volumes/main/default/data"
NUM_FILES = 23

# A root with everything of this machine, and a `/Volumes` of its own.
NAMESPACE = """
set -e
root=$1 volumes=$2
shift 2
mount -t tmpfs tmpfs "$root"
for entry in /*; do
  name=$(basename "$entry")
  if [ -L "$entry" ]; then cp -P "$entry" "$root/$name"
  elif [ "$name" != Volumes ] && [ -d "$entry" ]; then
    mkdir "$root/$name" && mount --rbind "$entry" "$root/$name"
  fi
done
mkdir "$root/Volumes"
mount --bind "$volumes" "$root/Volumes"
exec chroot "$root" "$@"
"""


def air_python() -> Path:
    """The interpreter of an environment that has the other library; torch is this one's."""
    folder = environment(
        "peers",
        f"databricks-sdk-air=={VERSION}",
        ["--no-deps", f"databricks-sdk-air=={VERSION}"],
        ["mlflow-skinny>=2.17,<4", "sqlalchemy", "alembic"],
    )
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    (site / "site-packages" / "torch_of_tests.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


class Jobs:
    """Runs the program on ranks, with either library."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = air_python()
        self.num_runs = 0
        directory = root / "volumes" / DIRECTORY.removeprefix("/Volumes/")
        directory.mkdir(parents=True)
        for number in range(NUM_FILES):
            (directory / f"f{number:02d}").write_bytes(b"." * number)
        self.files = sorted(path.name for path in directory.iterdir())

    def run(
        self,
        library: str,
        action: str,
        grid: tuple[int, int] = (1, 0),
        states: list[Any] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """What each rank of a grid of ranks and workers answers."""
        self.num_runs += 1
        world_size, num_workers = grid
        given = {
            "library": library,
            "action": action,
            "path": DIRECTORY,
            "world_size": world_size,
            "num_workers": num_workers,
            "rendezvous": str(self.root / f"rendezvous-{self.num_runs}"),
            **arguments,
        }
        ranks = []
        for rank in range(world_size):
            state = states[rank] if states is not None else None
            ranks.append(self._start({**given, "rank": rank, "state": state}))
        answers = [rank.communicate(timeout=180) for rank in ranks]
        for rank, (_, errors) in zip(ranks, answers, strict=True):
            assert rank.returncode == 0, errors
        return [json.loads(output) for output, _ in answers]

    def _start(self, arguments: dict[str, Any]) -> subprocess.Popen[str]:
        root = self.root / f"root-{self.num_runs}-{arguments['rank']}"
        root.mkdir()
        unshare = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
        return subprocess.Popen(
            [
                *unshare,
                *("sh", "-c", NAMESPACE, "sh", str(root), str(self.root / "volumes")),
                *(str(self.python), str(PROGRAM), json.dumps(arguments)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(TREE / name) for name in ("runtime", "fuse")),
                "OMP_NUM_THREADS": "1",
                "MLFLOW_ALLOW_FILE_STORE": "true",
            },
        )


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("air"))


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=str)
def test_the_same_streams_have_the_same_files_in_the_same_order(
    jobs: Jobs, grid: tuple[int, int]
) -> None:
    theirs = jobs.run(THEIRS, "streams", grid)
    assert theirs == jobs.run(OURS, "streams", grid)
    assert sorted(name for rank in theirs for one in rank.values() for name in one) == jobs.files


@pytest.mark.parametrize("grid", [(1, 0), (2, 2)], ids=str)
@pytest.mark.parametrize(("first", "second"), [(THEIRS, OURS), (OURS, THEIRS)])
def test_a_loader_continues_what_the_other_library_s_has_saved(
    jobs: Jobs, first: str, second: str, grid: tuple[int, int]
) -> None:
    before = jobs.run(first, "take", grid, count=3)
    states = [rank["state"] for rank in before]
    after = jobs.run(second, "take", grid, states, count=None)
    delivered = [name for rank in before + after for name in rank["files"]]
    assert sorted(delivered) == jobs.files


def test_what_goes_back_and_forth_is_delivered_once(jobs: Jobs) -> None:
    states, delivered = None, []
    for library in (THEIRS, OURS):
        [rank] = jobs.run(library, "take", (1, 2), states, count=2)
        states = [rank["state"]]
        delivered += rank["files"]
    [rank] = jobs.run(THEIRS, "take", (1, 2), states, count=None)
    assert sorted(delivered + rank["files"]) == jobs.files


@pytest.mark.parametrize(("first", "second"), [(THEIRS, OURS), (OURS, THEIRS)])
def test_a_stream_continues_what_the_other_library_s_has_saved(
    jobs: Jobs, first: str, second: str
) -> None:
    [before] = jobs.run(first, "take_of_stream", count=7)
    [after] = jobs.run(second, "take_of_stream", states=[before["state"]], count=None)
    assert before["files"] + after["files"] == jobs.files


def test_the_same_metrics_are_logged(jobs: Jobs, tmp_path: Path) -> None:
    names = {
        library: jobs.run(library, "logged", tracking=f"file://{tmp_path}/{library}")
        for library in (THEIRS, OURS)
    }
    assert names[OURS] == names[THEIRS]
    assert len(names[OURS][0]) == 4
