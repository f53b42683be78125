"""Starts ranks for the tests: one process that has torch imported and forks a rank for each place
of the job.

Started by the `ranks` fixture. Reads one JSON request a line from standard input, answers each with
one JSON line: the exit codes of the ranks, negative for a signal. Importing torch takes seconds;
forking a rank does not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP needs it
import torch.distributed.fsdp

import trainmount.checkpoint.checkpointer  # noqa: F401 - imported once, for all ranks

Program = Callable[[dict[str, Any]], None]


def main() -> None:
    programs = _load_programs(Path(sys.argv[1]))
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        codes = _run(programs[request["program"]], request["world_size"], request["arguments"])
        print(json.dumps(codes), flush=True)


def _run(program: Program, world_size: int, arguments: dict[str, Any]) -> list[int]:
    with tempfile.TemporaryDirectory() as rendezvous:
        ranks = [
            _start(program, rank, world_size, arguments, rendezvous) for rank in range(world_size)
        ]
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


def _start(
    program: Program, rank: int, world_size: int, arguments: dict[str, Any], rendezvous: str
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()  # as torchrun does
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            RENDEZVOUS=f"file://{rendezvous}/store",
        )
        program(arguments)
        code = 0
    except SystemExit as exit_request:
        code = int(exit_request.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _load_programs(path: Path) -> dict[str, Program]:
    spec = importlib.util.spec_from_file_location("rank_programs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_programs"] = module
    spec.loader.exec_module(module)
    return module.PROGRAMS


if __name__ == "__main__":
    main()
    os._exit(0)  # what torch tidies up at exit takes seconds
