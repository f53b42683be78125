"""The demonstration behind `make demo`: kill a rank, the mount's daemon and the whole run.

Runs the digits job twice on this machine with `trainmount run --local`, once undisturbed and once
disturbed, and compares what came out. Everything it makes lies in `demo-out/`: the volume, both
logs, the state of the runs, `loss.png`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import check
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import write_digits
import yaml

HERE = Path(__file__).resolve().parent
VOLUME = "main/default/digits"

PROGRESS = re.compile(r"epoch (\d+) step (\d+) loss ([0-9.]+)")
FOLDER = re.compile(r"^-- run \S+, folder (.+)$", re.MULTILINE)
ATTEMPT = re.compile(r"attempt (\d+): (starts|resumed) at step (\d+)")

START_DEADLINE_SECONDS = 180.0
"""Until the first step of an attempt: PyTorch's first import on a slow disk is most of it."""

STEP_DEADLINE_SECONDS = 120.0
"""Between two lines of a job that trains; a job that is silent for longer hangs."""

ACCURACY_WANTED = 0.95


@dataclass
class Story:
    """What a run printed, as numbers."""

    losses: list[tuple[int, int, float]] = field(default_factory=list)
    """(part, step, loss): a part is what one attempt trained without a break."""

    kills: list[tuple[int, str]] = field(default_factory=list)
    """(step, what was killed)."""

    resumed_at: list[int] = field(default_factory=list)
    """The step at which each attempt after the first went on."""

    part: int = -1
    step: int = 0


def say(text: str) -> None:
    print(text, flush=True)


class Run:
    """One `trainmount run --local --watch` and the lines that it prints."""

    def __init__(self, arguments: list[str], out: Path, log: Path) -> None:
        self.folder = out
        self._log = log.open("a")
        self._lines: queue.Queue[str | None] = queue.Queue()
        command = [sys.executable, "-m", "trainmount_cli", "run", *arguments, "--local"]
        self.process = subprocess.Popen(
            [*command, "--watch"],
            env={**os.environ, "XDG_STATE_HOME": str(out / "state"), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._log.write(line)
            self._log.flush()
            self._lines.put(line)
        self._lines.put(None)

    def follow(self, story: Story) -> Iterator[int]:
        """Yield each step as its line appears, and keep the story; ends with the run."""
        deadline = START_DEADLINE_SECONDS
        while True:
            try:
                line = self._lines.get(timeout=deadline)
            except queue.Empty:
                raise SystemExit(
                    f"The run printed nothing for {deadline:.0f} s; its log is {self._log.name}"
                ) from None
            if line is None:
                self._log.close()
                return
            if found := FOLDER.search(line):
                self.folder = Path(found[1])
            elif found := ATTEMPT.search(line):
                story.part += 1
                if found[2] == "resumed":
                    story.resumed_at.append(int(found[3]))
            elif found := PROGRESS.search(line):
                deadline = STEP_DEADLINE_SECONDS
                story.step = int(found[2])
                story.losses.append((story.part, story.step, float(found[3])))
                yield story.step

    def pids(self) -> dict[str, Any]:
        """Who is who, as the run itself records it."""
        pids: dict[str, Any] = json.loads((self.folder / "status.json").read_text())["pids"]
        return pids

    def finish(self, story: Story) -> None:
        """Wait for the end. Raises SystemExit, naming the log, when it is not a success."""
        for _ in self.follow(story):
            pass
        if (code := self.process.wait()) != 0:
            raise SystemExit(f"The run ended with exit code {code}; its log is {self._log.name}")


def ranks(job: str) -> list[int]:
    """Pids of the training processes, without the launchers above and the loader workers below."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # A process may end, or be somebody else's, while we look.
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if (
                    b"train.py" in command
                    and b"LOCAL_RANK=" in environment
                    and f"TRAINMOUNT_JOB={job}\0".encode() in environment
                ):
                    found[int(entry.name)] = parent
    return sorted(pid for pid, parent in found.items() if parent not in found)


def write_job(out: Path, name: str) -> Path:
    """The example's file with a name and an output of its own."""
    documents: list[dict[str, Any]] = list(
        yaml.safe_load_all((HERE / "trainingjob.yaml").read_text())
    )
    for document in documents:
        if document["kind"] == "TrainingJob":
            document["metadata"]["name"] = name
            document["spec"]["parameters"]["output"] = f"/Volumes/{VOLUME}/runs/{name}"
    path = out / f"{name}.yaml"
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return path


def start(out: Path, name: str) -> list[str]:
    return ["-f", str(write_job(out, name)), "--data", str(out / "volumes")]


def undisturbed(out: Path) -> Story:
    story = Story()
    Run(start(out, "undisturbed"), out, out / "undisturbed.log").finish(story)
    return story


def until(run: Run, story: Story, step: int) -> None:
    for reached in run.follow(story):
        if reached >= step:
            return
    raise SystemExit(f"The run ended before step {step}; its log is in demo-out/")


def disturbed(out: Path, steps: int) -> Story:
    """Kill a rank at a quarter, the daemon at a half, the whole run at three quarters."""
    name, story, log = "disturbed", Story(), out / "disturbed.log"
    run = Run(start(out, name), out, log)

    def kill(at: int, what: str, find: Callable[[], int], consequence: str) -> None:
        until(run, story, at)
        os.kill(find(), signal.SIGKILL)
        story.kills.append((story.step, what))
        say(f"    step {story.step}: killed {what}. {consequence}")

    kill(
        steps // 4,
        "one rank",
        lambda: ranks(name)[-1],
        "The attempt ends; the next one resumes from the newest whole checkpoint.",
    )
    kill(
        steps // 2,
        "the mount's daemon",
        lambda: run.pids()["mounts"][0]["daemon"],
        "Its successor takes the mount over; the job does not notice.",
    )
    before = story.part
    until(run, story, story.step + 10)
    if story.part != before:
        raise SystemExit("The daemon's death ended the attempt; it should have gone unnoticed.")
    kill(
        steps * 3 // 4,
        "the whole run",
        lambda: run.pids()["supervisor"],
        "Nothing of it is left on this machine.",
    )
    for _ in run.follow(story):
        pass
    run.process.wait()
    wait_gone(name)
    say("    started it again")
    Run(["--resume", name], out, log).finish(story)
    for step in story.resumed_at:
        say(f"    an attempt went on from step {step}")
    return story


def wait_gone(job: str) -> None:
    """Wait until no process of a killed run is left."""
    deadline = time.monotonic() + 30
    while left := ranks(job):
        if time.monotonic() > deadline:
            raise SystemExit(f"processes of the killed run are still there: {left}")
        time.sleep(0.1)


def picture(path: Path, calm: Story, stormy: Story) -> None:
    """The loss curve with the kills marked, and the undisturbed one below it."""
    figure, axes = plt.subplots(figsize=(10, 5))
    axes.plot(
        [step for _, step, _ in calm.losses],
        [loss for _, _, loss in calm.losses],
        color="0.75",
        linewidth=5,
        label="undisturbed",
    )
    for part in range(stormy.part + 1):
        points = [(step, loss) for number, step, loss in stormy.losses if number == part]
        axes.plot(*zip(*points, strict=True), linewidth=1.3, label=f"attempt {part}")
    top = max(loss for _, _, loss in stormy.losses)
    for step, what in stormy.kills:
        axes.axvline(step, color="crimson", linestyle="--", linewidth=1)
        axes.text(step - 1, top, f"killed {what}", rotation=90, va="top", ha="right", fontsize=8)
    axes.set(xlabel="optimizer step", ylabel="training loss", yscale="log")
    axes.set_title("Digits: 2 nodes x 2 processes, killed three times, same weights")
    axes.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def verdict(out: Path, epochs: int) -> bool:
    """Print what was proved; true if all of it holds."""
    volume = out / "volumes" / VOLUME
    calm = check.report(volume, volume / "runs" / "undisturbed", epochs)
    stormy = check.report(volume, volume / "runs" / "disturbed", epochs)
    once = stormy.exactly_once and calm.exactly_once
    equal = stormy.weights_sha256 == calm.weights_sha256
    good = stormy.accuracy >= ACCURACY_WANTED
    say(f"    held-out accuracy: {stormy.accuracy:.1%} (wanted: {ACCURACY_WANTED:.0%})")
    say(
        f"    samples: {epochs} epochs x {stormy.samples} files, {sum(stormy.consumed)} consumed, "
        f"{sum(stormy.missing)} missing, {sum(stormy.repeated)} repeated: "
        f"{'every one exactly once' if once else 'NOT exactly once'}"
    )
    say(
        f"    final weights: sha256 {stormy.weights_sha256[:16]}… "
        f"{'bit for bit those' if equal else 'NOT those'} of the undisturbed run"
    )
    return once and equal and good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    out: Path = parser.parse_args().out.resolve()
    started = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    say("1/4 writing the 1,797 handwritten digits of scikit-learn into a volume, as PNG files")
    write_digits.main(out / "volumes" / VOLUME)
    job = list(yaml.safe_load_all((HERE / "trainingjob.yaml").read_text()))[-1]
    epochs: int = job["spec"]["parameters"]["epochs"]
    say(f"2/4 training undisturbed: 2 nodes x 2 processes, {epochs} epochs, real mount")
    calm = undisturbed(out)
    say(f"    {calm.step} steps")
    say("3/4 training again, and killing")
    stormy = disturbed(out, calm.step)
    say("4/4 comparing")
    held = verdict(out, epochs)
    picture(out / "loss.png", calm, stormy)
    say(f"    loss curve with the kills marked: {out / 'loss.png'}")
    seconds = time.monotonic() - started
    say(f"{'All of it holds' if held else 'SOMETHING DOES NOT HOLD'}, after {seconds:.0f} s")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
