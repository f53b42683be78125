"""What programs do on a mount whose daemon is being killed; each ends in an error if anything in it
fails or is wrong. Run by test_kills.py.

    kills_worker.py epochs FOLDER       epochs of a DataLoader over FOLDER with four workers
    kills_worker.py checkpoints FOLDER  torch.save and rename, Checkpointer, DCP to a path, in turns
    kills_worker.py writes FOLDER LOG   eight threads of writes; LOG gets what was acknowledged

Works until standard input ends, prints a line with the number of finished rounds after each, and at
the end one JSON object of figures.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_WRITERS = 8
WORD_BYTES = 8
NUM_WEIGHTS = 200_000


class Rounds:
    """Standard input and output, as the test uses them."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._num_done = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._wait_for_end, daemon=True).start()

    def _wait_for_end(self) -> None:
        # Not through sys.stdin, whose lock a forked worker would wait for.
        while os.read(0, 1):
            pass
        self._ended.set()

    def go_on(self) -> bool:
        return not self._ended.is_set()

    def done(self) -> None:
        with self._lock:
            self._num_done += 1
            print(self._num_done, flush=True)


def epochs(rounds: Rounds, folder: Path) -> dict[str, Any]:
    import torch.utils.data

    class Files(torch.utils.data.Dataset[tuple[int, float]]):
        def __init__(self) -> None:
            self.paths = sorted(folder.iterdir())

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, index: int) -> tuple[int, float]:
            began = time.monotonic()
            data = self.paths[index].read_bytes()
            took = time.monotonic() - began
            return int.from_bytes(hashlib.sha256(data).digest()[:7], "little"), took

    worst, sums = 0.0, set()
    while rounds.go_on():
        loader = torch.utils.data.DataLoader(Files(), batch_size=4, num_workers=4, shuffle=True)
        total = 0
        for sums_of_files, seconds in loader:
            total += int(sums_of_files.sum())
            worst = max(worst, float(seconds.max()))
        sums.add(total)
        rounds.done()
    return {"worst_seconds": worst, "sums": sorted(sums)}


def checkpoints(rounds: Rounds, folder: Path) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp

    from trainmount.checkpoint import Checkpointer

    def state(number: int) -> dict[str, Any]:
        return {
            "number": torch.tensor(number),
            "weights": torch.full((NUM_WEIGHTS,), float(number)),
        }

    def check(found: dict[str, Any]) -> int:
        number = int(found["number"])
        assert torch.equal(found["weights"], torch.full((NUM_WEIGHTS,), float(number)))
        return number

    number, plain, worst = 0, folder / "plain.pt", 0.0
    model = torch.nn.Linear(NUM_WEIGHTS, 1)
    checkpointer = Checkpointer(folder / "jobs", state={"model": model}, on_sigterm=False)
    torch.save(state(0), plain)
    with Watcher(lambda: check(torch.load(plain))) as watcher:
        while rounds.go_on():
            number += 1
            began = time.monotonic()
            torch.save(state(number), plain.with_suffix(".part"))
            plain.with_suffix(".part").replace(plain)
            assert check(torch.load(plain)) == number
            torch.nn.init.constant_(model.weight, number)
            checkpointer.save(number)
            torch.nn.init.zeros_(model.weight)
            resumed = checkpointer.resume()
            assert resumed is not None and (resumed.step, resumed.skipped) == (number, ())
            assert float(model.weight.min()) == float(model.weight.max()) == number
            dcp.save(state(number), checkpoint_id=folder / f"dcp-{number % 2}")
            found = state(0)
            dcp.load(found, checkpoint_id=folder / f"dcp-{number % 2}")
            assert check(found) == number
            worst = max(worst, time.monotonic() - began)
            rounds.done()
    return {"worst_seconds": worst, "last": number, "num_seen": watcher.num_seen}


class Watcher:
    """Another thread that loads again and again; each time it must get a whole one, never an older
    one than before."""

    def __init__(self, load: Callable[[], int]) -> None:
        self._load = load
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.num_seen = 0

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        last = 0
        try:
            while not self._ended.wait(0.01):
                number = self._load()
                assert number >= last
                last, self.num_seen = number, self.num_seen + 1
        except BaseException:
            traceback.print_exc()
            os._exit(1)


class Writer:
    """One thread's files. `log` gets a line with the word and the length of each file after its
    close or fsync returned, and one before it is begun again."""

    def __init__(self, folder: Path, log: Any, number: int) -> None:
        self._folder = folder
        self._log = log
        self._random = random.Random()
        self._number = number

    def round(self) -> float:
        name = f"{self._number}-{self._random.randrange(4)}"
        size = 12_000_000 if self._random.random() < 0.1 else self._random.randrange(8, 200_000)
        # One word again and again, so that a part can be told from a mixture.
        data = self._random.randbytes(WORD_BYTES) * (size // WORD_BYTES)
        began = time.monotonic()
        # From here on the old content or the new one is right.
        self._tell("begin", name, data)
        fd = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest[: 1 << 18]) :]
        if self._random.random() < 0.5:
            os.fsync(fd)
            self._tell("fsync", name, data)
        os.close(fd)
        self._tell("close", name, data)
        return time.monotonic() - began

    def _tell(self, what: str, name: str, data: bytes) -> None:
        line = json.dumps([what, name, data[:WORD_BYTES].hex(), len(data)])
        os.write(self._log, (line + "\n").encode())


def writes(rounds: Rounds, folder: Path, log_path: Path) -> dict[str, Any]:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    worst = [0.0] * NUM_WRITERS

    def run(number: int) -> None:
        try:
            writer = Writer(folder, log, number)
            while rounds.go_on():
                worst[number] = max(worst[number], writer.round())
                rounds.done()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"worst_seconds": max(worst)}


def main() -> int:
    warnings.simplefilter("ignore")
    what, *paths = sys.argv[1:]
    work = {"epochs": epochs, "checkpoints": checkpoints, "writes": writes}[what]
    print(json.dumps(work(Rounds(), *map(Path, paths))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
