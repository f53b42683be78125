"""Batch jobs of Ray Data that fail and are killed, on a real cluster, with their checkpoints and
data on each kind of place.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.external.ray_cluster import RayCluster, running_ray_cluster
from tests.external.s3_server import running_s3_server
from tests.mount.conftest import FilesServer, make_mounts

FILES = 12
ROWS = 50
ROWS_IN_ALL = Counter(
    {(f"u{file}-{row}", 2 * row): 1 for file in range(FILES) for row in range(ROWS)}
)

pytestmark = pytest.mark.timeout(600)
DEADLINE_SECONDS = 120


@dataclass(frozen=True)
class Place:
    """Where a job reads and writes."""

    url: str
    """As the job is told."""
    directory: Path
    """The same, as this test sees it."""
    options: dict[str, Any] | None = None

    def jobs(self, log: Path, **settings: Any) -> dict[str, Any]:
        paths = {"input": "in", "output": "out", "checkpoint": "ck"}
        urls = {name: f"{self.url}/{folder}" for name, folder in paths.items()}
        return {**urls, "options": self.options, "log": str(log), **settings}

    def committed(self) -> list[Path]:
        found = sorted((self.directory / "ck").glob("*.parquet"))
        return [path for path in found if ".pending." not in path.name]

    def rows(self) -> Counter[tuple[str, int]]:
        """Ids and values that are in the output."""
        found: Counter[tuple[str, int]] = Counter()
        for path in (self.directory / "out").glob("*.parquet"):
            table = pq.ParquetFile(path).read(["uid", "x"])
            found.update(zip(table["uid"].to_pylist(), table["x"].to_pylist(), strict=True))
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running_ray_cluster(cpus=4) as cluster:
        yield cluster


def write_input(directory: Path) -> None:
    directory.mkdir(parents=True)
    for file in range(FILES):
        ids = [f"u{file}-{row}" for row in range(ROWS)]
        table = pa.table({"uid": ids, "x": range(ROWS), "file": [file] * ROWS})
        pq.write_table(table, directory / f"{file:02}.parquet")


@pytest.fixture
def directory(tmp_path: Path) -> Place:
    place = local(tmp_path)
    write_input(place.directory / "in")
    return place


def local(folder: Path) -> Place:
    return Place(str(folder / "data"), folder / "data")


def served(stack: ExitStack, folder: Path) -> FilesServer:
    server = FilesServer(folder)
    stack.callback(server.stop)
    server.start("--no-fsync")
    return server


def volume(stack: ExitStack, folder: Path) -> Place:
    server = served(stack, folder)
    options = {"volumes": {"host": server.url, "token": "right"}}
    return Place(f"volumes://{server.source}", server.volume, options)


def plain_path(_stack: ExitStack, folder: Path) -> Place:
    return local(folder)


def bucket(stack: ExitStack, folder: Path) -> Place:
    return bucket_by(stack, folder, "path")


def bucket_in_host(stack: ExitStack, folder: Path) -> Place:
    return bucket_by(stack, folder, "virtual")


def bucket_by(stack: ExitStack, folder: Path, style: str) -> Place:
    server = stack.enter_context(running_s3_server(folder, is_virtual=style == "virtual"))
    options = {
        "key": server.access_key,
        "secret": server.secret_key,
        "client_kwargs": {"endpoint_url": server.endpoint, "region_name": "us-east-1"},
        "config_kwargs": {"s3": {"addressing_style": style}},
    }
    return Place(f"s3://{server.bucket}", server.directory / server.bucket, {"s3": options})


def mount(stack: ExitStack, folder: Path) -> Place:
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse")
    server = served(stack, folder)
    start = stack.enter_context(make_mounts(folder))
    mounted = start(server.source, environment=server.environment()).mountpoint
    return Place(str(mounted), mounted)


def kill_when(condition: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    with driver:
        try:
            while not condition():
                assert driver.poll() is None, driver.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            driver.kill()


def lines(log: Path) -> list[str]:
    """One for each batch that was ever begun."""
    return log.read_text().splitlines() if log.exists() else []


def rows_begun(log: Path) -> int:
    return sum(map(int, lines(log)))


def kill_after_a_commit(cluster: RayCluster, place: Place, log: Path) -> None:
    """Run until two batches more were begun and one of them, or both, committed; then kill."""
    committed, gate = len(place.committed()), len(lines(log)) + 2
    driver = cluster.start(place.jobs(log, gate=gate))
    kill_when(lambda: len(place.committed()) > committed and len(lines(log)) >= gate, driver)


@pytest.mark.parametrize(
    ("place_of", "kills"),
    [(plain_path, 5), (volume, 5), (bucket, 5), (bucket_in_host, 1), (mount, 5)],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_rows_are_written_exactly_once_over_kills_of_the_driver(
    cluster: RayCluster, tmp_path: Path, place_of: Callable[[ExitStack, Path], Place], kills: int
) -> None:
    log = tmp_path / "log"
    with ExitStack() as stack:
        place = place_of(stack, tmp_path)
        write_input(place.directory / "in")
        for kill in range(kills):
            kill_after_a_commit(cluster, place, log)
            if kill % 2:
                # As after a kill between the data of a task and its commit.
                path = place.committed()[0]
                path.rename(path.with_name(path.name.replace(".parquet", ".pending.parquet")))
        left = FILES - len(place.committed())
        before = rows_begun(log)

        # The last one with the other of Ray's two readers, which is its default.
        (end,) = cluster.run(place.jobs(log, v2=True))

        assert end["error"] == "", end["text"]
        assert place.rows() == ROWS_IN_ALL
        assert rows_begun(log) - before == left * ROWS
        assert place.committed() == []


@pytest.mark.parametrize("how", ["ray", "ours"])
def test_names_that_begin_alike_cost_no_committed_file(
    cluster: RayCluster, directory: Place, tmp_path: Path, how: str
) -> None:
    log = tmp_path / "log"
    job = directory.jobs(log, how=how, names="unpadded")
    driver = cluster.start(job | {"gate": FILES - 1})
    kill_when(lambda: len(directory.committed()) == FILES - 1, driver)
    by_task = {int(path.stem.rpartition("-")[2]): path for path in directory.committed()}
    assert {1, 10} <= by_task.keys()
    by_task[1].rename(by_task[1].with_name(f"{by_task[1].stem}.pending.parquet"))
    (kept,) = (directory.directory / "out").glob("*_part-10-*")
    inode = kept.stat().st_ino

    (end,) = cluster.run(job)

    assert end["error"] == "", end["text"]
    assert kept.stat().st_ino == inode
    assert directory.rows() == ROWS_IN_ALL
    assert rows_begun(log) == (FILES + 1) * ROWS


def test_a_failed_job_goes_on_with_other_blocks_and_not_with_other_input(
    cluster: RayCluster, directory: Place, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    job = directory.jobs(log, id="row_hash")
    (end,) = cluster.run(job | {"poison": FILES - 1})
    assert "a sample that cannot be read" in end["text"]
    # What is committed is written; what was written and is not committed may be there too.
    kept = [pq.read_table(path)["row_hash"].to_pylist() for path in directory.committed()]
    written = {
        row
        for path in (directory.directory / "out").glob("*.parquet")
        for row in pq.ParquetFile(path).read(["row_hash"])["row_hash"].to_pylist()
    }
    committed = {row for rows in kept for row in rows}
    assert committed <= written

    added = directory.directory / "in" / "12.parquet"
    added.write_bytes((directory.directory / "in" / "00.parquet").read_bytes())
    (refused,) = cluster.run(job)
    added.unlink()
    filtered = cluster.run(*[job | {"plan": "filter", "v2": v2} for v2 in (False, True)])
    before = rows_begun(log)
    (end,) = cluster.run(job | {"v2": True, "batch": 20, "block_bytes": 2000, "blocks": 5})

    assert refused["error"] == "PipelineRefused", refused["text"]
    assert f"the input file {added} is new; row_hash would mean other rows" in refused["text"]
    for each in filtered:
        assert each["error"] == "PipelineRefused", each["text"]
        assert "the filter of the read was" in each["text"]
    assert end["error"] == "", end["text"]
    assert directory.rows() == ROWS_IN_ALL
    assert rows_begun(log) - before == FILES * ROWS - len(committed)


REFUSED = {
    "RandomShuffle does not treat each row by itself": {"plan": "shuffle"},
    "this run writes nothing": {"plan": "count"},
    "the id column 'uid' is no column of the input": {"plan": "select"},
    "FromItems reads from memory": {"source": "memory"},
    "mode='overwrite' removes or refuses": {"mode": "overwrite"},
    "OneNameForAllRuns gives two write tasks one file name": {"names": "one"},
    "the id 0 stands for several rows of the input ('x')": {"how": "check", "id": "x"},
    "stands for several rows of the output ('uid')": {"how": "check", "change": "explode"},
    "the output has no column 'uid' (columns: x, file)": {"how": "check", "change": "drop"},
    # By the first write, where nobody has asked before.
    "of 'uid' stands for several output rows": {"change": "explode"},
    "ID column uid is absent in the block to be written": {"change": "drop"},
}


def test_what_would_lose_or_repeat_rows_is_refused_before_it_is_written(
    cluster: RayCluster, directory: Place, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    jobs = [directory.jobs(log, **settings) for settings in REFUSED.values()]
    nested = directory.jobs(log, checkpoint=f"{directory.url}/out/ck")
    ends = cluster.run(*jobs, nested, directory.jobs(log, how="check"))

    for says, end in zip(REFUSED, ends, strict=False):
        assert says in end["text"], end["text"]
    assert "must not be one in another" in ends[-2]["text"]
    assert ends[-1]["error"] == ""
    assert directory.rows() == Counter()
