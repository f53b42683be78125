"""This process's place in the job, the job's parameters, and a sign of life. Called by training
programs; needs no torch.

`torchrun` sets the ranks; the operator (or `trainmount run --local`) sets the node, the attempt and
the path of the parameters; whoever watches the job sets the path of the heartbeat, and looks at it:

    python -m trainmount.run --check-heartbeat [PATH] --older-than SECONDS
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmount.errors import LaunchError

__all__ = ["World", "heartbeat", "parameters", "world"]

_log = logging.getLogger(__name__)

PARAMETERS_VARIABLE: Final = "HYPERPARAMETERS_PATH"
HEARTBEAT_VARIABLE: Final = "TRAINMOUNT_HEARTBEAT_PATH"

# A file a second costs nothing beside a step, and who looks for a hang waits for minutes.
_SECONDS_BETWEEN_BEATS: Final = 1.0

_next_beat = 0.0
"""By `time.monotonic`. Only `heartbeat` writes it; two threads at once write two whole files."""

_TORCHRUN_HINT: Final = (
    "start the program with torchrun, for example: "
    "torchrun --nnodes=$NUM_NODES --nproc_per_node=$LOCAL_WORLD_SIZE --node_rank=$NODE_RANK "
    "--master_addr=$MASTER_ADDR --master_port=$MASTER_PORT train.py"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where this process stands in the job."""

    rank: int
    """0 to `world_size` - 1, unique in the job."""

    local_rank: int
    """0 to `local_world_size` - 1, unique on the node; the index of the GPU to use."""

    world_size: int
    """Number of processes of the job."""

    local_world_size: int
    """Number of processes on this node."""

    node_rank: int
    """0 to `num_nodes` - 1."""

    num_nodes: int

    attempt: int = 0
    """How often the job was started anew before: 0 in the first attempt."""

    job_name: str = ""
    """Empty outside of a TrainingJob."""

    @property
    def is_first(self) -> bool:
        """True on the one process that should print and write what belongs to the whole job."""
        return self.rank == 0


def world(environment: Mapping[str, str] = os.environ) -> World:
    """The place of this process as `torchrun` and the operator describe it.

    Raises:
        LaunchError: a variable is missing (the program was not started by `torchrun`) or not a
            number in range.
    """
    rank = _number(environment, "RANK")
    world_size = _number(environment, "WORLD_SIZE")
    local_rank = _number(environment, "LOCAL_RANK")
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE")
    if local_world_size > world_size:
        raise LaunchError(
            f"LOCAL_WORLD_SIZE is {local_world_size}, "
            f"but must not be greater than WORLD_SIZE, which is {world_size}"
        )
    if rank >= world_size:
        raise LaunchError(
            f"RANK is {rank}, but must be less than WORLD_SIZE, which is {world_size}"
        )
    if local_rank >= local_world_size:
        raise LaunchError(
            f"LOCAL_RANK is {local_rank}, "
            f"but must be less than LOCAL_WORLD_SIZE, which is {local_world_size}"
        )
    # torchrun's own words for the node come first: with elastic rendezvous they differ from the
    # operator's.
    node_rank = _first_number(environment, ("GROUP_RANK", "NODE_RANK"), rank // local_world_size)
    num_nodes = _first_number(
        environment, ("GROUP_WORLD_SIZE", "NUM_NODES"), max(1, world_size // local_world_size)
    )
    if node_rank >= num_nodes:
        raise LaunchError(
            f"the rank of the node (GROUP_RANK or NODE_RANK) is {node_rank}, but must be less than "
            f"the number of nodes (GROUP_WORLD_SIZE or NUM_NODES), which is {num_nodes}"
        )
    return World(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        attempt=_first_number(environment, ("TRAINMOUNT_ATTEMPT",), 0),
        job_name=environment.get("TRAINMOUNT_JOB", ""),
    )


def parameters(defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The job's `parameters`, over `defaults`.

    With `defaults`, a program also runs by hand, where no job has set a path.

    Raises:
        LaunchError: HYPERPARAMETERS_PATH is not set and there are no defaults; or the file cannot
            be read, is not YAML, or is not a mapping.
    """
    path = os.environ.get(PARAMETERS_VARIABLE, "")
    if not path:
        if defaults is None:
            raise LaunchError(
                f"{PARAMETERS_VARIABLE} is not set: start the program as a TrainingJob, "
                "or pass defaults to parameters()"
            )
        return dict(defaults)
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{PARAMETERS_VARIABLE}: cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise LaunchError(f"{PARAMETERS_VARIABLE}: {path} is not YAML: {error}") from error
    if loaded is None:
        loaded = {}
    if not isinstance(loaded, dict):
        raise LaunchError(
            f"{PARAMETERS_VARIABLE}: {path} must hold a mapping, not {type(loaded).__name__}"
        )
    return {**(defaults or {}), **loaded}


def heartbeat(step: int) -> bool:
    """Leave a sign of life, as `Checkpointer.step` does: a JSON file that says when which step was
    done.

    The file is at TRAINMOUNT_HEARTBEAT_PATH, with `.1`, `.2` and so on behind it for the other
    processes of the node. It is whole at any time, and holds `time` (seconds since 1970), `step`,
    `rank` and `attempt`. Cheap enough for each step: at most one a second is written. Nothing
    happens where the variable is not set. What goes wrong is logged, and ends no training.

    Returns whether it was written.
    """
    global _next_beat
    path = os.environ.get(HEARTBEAT_VARIABLE, "")
    now = time.monotonic()
    if not path or now < _next_beat:
        return False
    _next_beat = now + _SECONDS_BETWEEN_BEATS
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if local_rank != "0":
        path = f"{path}.{local_rank}"
    unfinished = Path(f"{path}.{os.getpid()}.tmp")
    try:
        beat = {
            "time": time.time(),
            "step": step,
            "rank": _first_number(os.environ, ("RANK",), 0),
            "attempt": _first_number(os.environ, ("TRAINMOUNT_ATTEMPT",), 0),
        }
        unfinished.write_text(json.dumps(beat) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except (OSError, LaunchError) as error:
        _log.warning("heartbeat not written", extra={"path": path, "reason": str(error)})
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Whether each process of this node that has a heartbeat did a step in the last SECONDS, as an
    exit code (0 if so, else 1) and one line that says what was found.

    Processes of earlier attempts do not count. Where nothing is found the answer is 1.
    """
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m trainmount.run",
        description="Exit with 1 if a training process of this node has shown no sign of life.",
    )
    parser.add_argument(
        "--check-heartbeat",
        metavar="PATH",
        nargs="?",
        const="",
        required=True,
        help=f"the file that the program writes; {HEARTBEAT_VARIABLE} if it is not given",
    )
    parser.add_argument("--older-than", metavar="SECONDS", type=int, required=True)
    given = parser.parse_args(arguments)
    path = given.check_heartbeat or os.environ.get(HEARTBEAT_VARIABLE, "")
    if not path:
        parser.error(f"name a PATH, or set {HEARTBEAT_VARIABLE}")
    if given.older_than < 1:
        parser.error(f"--older-than must be at least 1, got {given.older_than}")
    try:
        oldest = _oldest_beat(Path(path))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    age_seconds = time.time() - oldest.time
    step = f"step {oldest.step} of rank {oldest.rank}"
    said = f"{oldest.path}: {step} was done {age_seconds:.0f} s ago"
    if age_seconds > given.older_than:
        print(f"{said}, more than {given.older_than} s: it hangs", file=sys.stderr)
        return 1
    print(said)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beat:
    """What `heartbeat` has written."""

    path: Path

    time: float
    """Seconds since 1970."""

    step: int
    rank: int
    attempt: int

    @classmethod
    def read(cls, path: Path) -> _Beat:
        """Raises ValueError, which names the file, where something else has written it."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                path=path,
                time=float(said["time"]),
                step=int(said["step"]),
                rank=int(said["rank"]),
                attempt=int(said["attempt"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no heartbeat: {error}") from error


def _oldest_beat(path: Path) -> _Beat:
    """Of the newest attempt's processes at `path`, `path`.1, `path`.2 and so on, that which has
    waited longest.

    Raises:
        OSError: a file or its directory cannot be read.
        ValueError: there is none, or one is no heartbeat.
    """
    beats = [
        _Beat.read(file)
        for file in path.parent.iterdir()
        if file == path or (file.stem == path.name and file.suffix[1:].isdecimal())
    ]
    if not beats:
        raise ValueError(
            f"{path} is not there: no step was done yet, or the program's {HEARTBEAT_VARIABLE} is "
            "another one"
        )
    attempt = max(beat.attempt for beat in beats)
    return min((beat for beat in beats if beat.attempt == attempt), key=lambda beat: beat.time)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text:
        raise LaunchError(f"{name} is not set: {_TORCHRUN_HINT}")
    if not text.isdecimal():
        raise LaunchError(f"{name} must be a number from 0, but is {text!r}")
    return int(text)


def _first_number(environment: Mapping[str, str], names: tuple[str, ...], otherwise: int) -> int:
    for name in names:
        if environment.get(name):
            return _number(environment, name)
    return otherwise


if __name__ == "__main__":
    sys.exit(main())
