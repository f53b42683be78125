"""The loaders that people have, unchanged: the samples of a mount are those of a disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DIGEST = re.compile(r"[0-9a-f]{64}")


@pytest.fixture
def torchrun(run):
    """`torchrun(python, program, *arguments)` by two ranks; what they print, in order of rank."""

    def start(python: str, program: str, *arguments: str | Path) -> list[str]:
        path = Path(__file__).with_name(program)
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        lines = run(*command, path, *arguments).splitlines()
        # A stable sort: each rank's own order stays.
        return sorted((line for line in lines if DIGEST.search(line)), key=lambda line: line[:2])

    return start


@pytest.mark.quotes(
    "MosaicML Streaming, WebDataset | shards are written, and read by two ranks, as on a disk",
)
def test_mds_shards_written_on_a_mount_stream_to_two_ranks_as_from_a_disk(
    places, run, torchrun, streaming_python
):
    def program(folder: Path) -> list[str]:
        run("mds_program.py", "write", folder, python=streaming_python)
        return torchrun(streaming_python, "mds_program.py", "read", folder)

    lines = places.both(program)
    assert len(lines) == 400
    assert len({line[2:] for line in lines}) == 400
    assert [line[0] for line in lines] == ["0"] * 200 + ["1"] * 200
    stored = sorted(path.name for path in (places.volume / "mds/train").iterdir())
    assert stored[0] == "index.json"
    assert stored == sorted(path.name for path in (places.on_disk / "mds/train").iterdir())


@pytest.mark.quotes(
    "MosaicML Streaming, WebDataset | shards are written, and read by two ranks, as on a disk",
)
def test_tar_shards_are_split_by_node_and_worker_as_on_a_disk(places, run):
    def program(folder: Path) -> list[list[str]]:
        run("webdataset_program.py", "write", folder)
        return [
            run(
                "webdataset_program.py",
                "read",
                folder,
                environment={"RANK": str(rank), "WORLD_SIZE": "2"},
            ).splitlines()
            for rank in range(2)
        ]

    first, second = places.both(program)
    numbers = [int(line.split()[0]) for line in first + second]
    assert sorted(numbers) == list(range(200))
    assert len(first) == len(second) == 100


@pytest.mark.quotes(
    "`np.memmap` | windows read by eight workers; written, flushed and opened again",
)
def test_windows_of_a_memory_map_are_the_same_in_eight_workers(places, run):
    lines = places.both(lambda folder: run("memmap_program.py", folder).splitlines())
    assert len(lines) == 128
    assert all(DIGEST.fullmatch(line) for line in lines)
