"""A job of two nodes with two ranks each, under torchrun, with data and checkpoints on a mount a
node: killed at random moments, its loss curve is that of an undisturbed run, bit for bit.

`TRAINMOUNT_TEST_KILLS` is how often (2 if it is not set), `TRAINMOUNT_TEST_SEED` which moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("training_program.py")
NUM_KILLS = int(os.environ.get("TRAINMOUNT_TEST_KILLS", "2"))
SEED = int(os.environ.get("TRAINMOUNT_TEST_SEED", "11"))
NUM_FILES = 62
NUM_EPOCHS = 4 + NUM_KILLS
NUM_STEPS = 4 * NUM_EPOCHS
"""Four global batches of 16 files in each epoch, the last one short."""
DEADLINE_SECONDS = 240.0
"""An attempt starts seven processes with torch, on a busy machine too."""


class Job:
    """Attempts of one job, each two agents of torchrun, one a node."""

    def __init__(self, folders: list[Path], notes: Path) -> None:
        self._folders = folders
        self.notes = notes
        self.notes.mkdir()
        self.agents: list[subprocess.Popen[bytes]] = []
        self.num_attempts = 0

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.num_attempts += 1
        with (self.notes / f"log-{self.num_attempts}").open("wb") as log:
            self.agents = [
                subprocess.Popen(
                    [*_torchrun(number, port), str(folder), str(self.notes), str(NUM_EPOCHS)],
                    env={**os.environ, "TRAINMOUNT_ATTEMPT": str(self.num_attempts - 1)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                for number, folder in enumerate(self._folders)
            ]

    def ranks(self) -> list[int]:
        """Processes that are running as ranks, of any attempt."""
        pids = [int(path.name[4:]) for path in self.notes.glob("pid-*")]
        return sorted(pid for pid in pids if str(PROGRAM) in _command(pid))

    def step(self) -> int:
        """The last step that this attempt has noted."""
        losses = self.notes / f"losses-{self.num_attempts - 1}"
        lines = losses.read_text().splitlines() if losses.exists() else []
        return int(lines[-1].split()[0]) if lines else 0

    def weights(self) -> str:
        """The digest of them at the end of the job."""
        return (self.notes / "weights").read_text()

    def has_ended(self) -> bool:
        """As the operator sees it: an attempt is over when one node's is."""
        return any(agent.poll() is not None for agent in self.agents)

    def end(self) -> list[int]:
        """Kill what is left of the attempt; the agents' exit codes."""
        for agent in self.agents:
            if all(other.poll() == 0 for other in self.agents if other is not agent):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(60)
            agent.kill()
        codes = [agent.wait() for agent in self.agents]
        for pid in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return codes

    def log(self) -> str:
        return (self.notes / f"log-{self.num_attempts}").read_text()[-6000:]


def _torchrun(node_rank: int, port: int) -> list[str]:
    nodes = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={node_rank}"]
    address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, *address, str(PROGRAM)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.fixture
def mounts(start_mount: Callable[..., Any], files_server: Any) -> list[Any]:
    """A mount a node, of one volume with the data in it."""
    _make_data(files_server.volume / "train")
    environment = files_server.environment()
    return [
        start_mount(files_server.source, name=f"node{number}", environment=environment)
        for number in range(2)
    ]


@pytest.fixture
def job(mounts: list[Any], tmp_path: Path) -> Iterator[Job]:
    made = Job([mount.mountpoint for mount in mounts], tmp_path / "disturbed")
    yield made
    made.end()


@pytest.fixture
def undisturbed(tmp_path: Path) -> Iterator[Job]:
    """The same program on the same two nodes, on the local disk."""
    _make_data(tmp_path / "disk" / "train")
    made = Job([tmp_path / "disk"] * 2, tmp_path / "undisturbed")
    yield made
    made.end()


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {DEADLINE_SECONDS:g} s"
        time.sleep(0.01)


@pytest.mark.timeout(DEADLINE_SECONDS * (2 + NUM_KILLS))
def test_a_job_that_is_killed_at_random_has_the_loss_curve_of_an_undisturbed_one(
    mounts: list[Any], job: Job, undisturbed: Job
) -> None:
    chance = random.Random(SEED)
    kinds = _kinds(chance)
    steps = sorted(chance.sample(range(1, NUM_STEPS - 1), NUM_KILLS))
    print(f"seed {SEED}: {list(zip(steps, kinds, strict=True))}")
    undisturbed.start()  # at the same time, which the test does not then take twice
    job.start()
    for kind, step in zip(kinds, steps, strict=True):
        _wait_until(lambda step=step: job.step() >= step or job.has_ended(), f"step {step}")
        assert not job.has_ended(), job.log()
        time.sleep(chance.random() * 0.2)  # within a step, a save, a read
        if kind == "daemon":
            chance.choice(mounts).kill_daemon()
            continue
        victims = job.ranks() if kind == "rank" else [agent.pid for agent in job.agents]
        os.kill(chance.choice(victims), signal.SIGKILL)
        _wait_until(job.has_ended, "the end of the attempt")
        job.end()
        job.start()
    _wait_until(job.has_ended, "the end of the job")
    assert job.end() == [0, 0], job.log()
    _wait_until(undisturbed.has_ended, "the end of the undisturbed job")
    assert undisturbed.end() == [0, 0], undisturbed.log()
    losses = _losses(job.notes)
    assert losses == _losses(undisturbed.notes)
    assert sorted(losses) == list(range(1, NUM_STEPS + 1))
    assert job.weights() == undisturbed.weights()
    assert job.num_attempts == 1 + sum(kind != "daemon" for kind in kinds)


def _kinds(chance: random.Random) -> list[str]:
    """What is killed, in order; each kind about as often."""
    kinds = (["rank", "daemon", "agent"] * NUM_KILLS)[:NUM_KILLS]
    chance.shuffle(kinds)
    return kinds


def _losses(notes: Path) -> dict[int, set[str]]:
    """By step, what was noted of it: repeated steps too have to be equal."""
    losses: dict[int, set[str]] = defaultdict(set)
    for file in notes.glob("losses-*"):
        for line in file.read_text().splitlines():
            step, loss = line.split()
            losses[int(step)].add(loss)
    return dict(losses)


def _make_data(folder: Path) -> None:
    folder.mkdir(parents=True)
    content = random.Random(1)
    for number in range(NUM_FILES):
        data = content.randbytes(8) + bytes([number % 4]) + bytes(number * 97)
        (folder / f"{number:03d}.bin").write_bytes(data)
