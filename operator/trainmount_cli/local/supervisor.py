"""`python -m trainmount_cli.local.supervisor FOLDER`: one run, in namespaces of its own.

Started by `launch` in a session of its own, so that a run goes on when whoever watches goes away.
It makes the namespaces, becomes the parent of the run's first process (`agent`) and waits. `kill
-9` of either one leaves no process and no mount of the run: the first process dies with its parent,
and with it everything in its PID namespace. SIGTERM stops the run in order.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Final

from trainmount_cli.local.agent import CANCEL_FILE, run_agent
from trainmount_cli.local.children import exit_code_of
from trainmount_cli.local.namespaces import die_with_parent, enter_namespaces
from trainmount_cli.local.progress import Progress
from trainmount_cli.local.store import RunFolder
from trainmount_operator.spec import parse_job

__all__ = ["main"]

_log = logging.getLogger(__name__)

_EXIT_ALREADY_RUNNING: Final = 3


def main(arguments: list[str] | None = None) -> int:
    """Supervise the run of a prepared folder; secrets come as JSON on standard input."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    (path,) = sys.argv[1:] if arguments is None else arguments
    folder = RunFolder(Path(path))
    secrets: dict[str, str] = json.loads(sys.stdin.read() or "{}")
    lock = folder.lock()
    if lock is None:
        print(f"another supervisor has {path}", file=sys.stderr)
        return _EXIT_ALREADY_RUNNING
    (folder.path / CANCEL_FILE).unlink(missing_ok=True)
    return _supervise(folder, secrets)


def _supervise(folder: RunFolder, secrets: Mapping[str, str]) -> int:
    spec = folder.read_spec()
    job = parse_job(spec["manifest"])
    data = Path(spec["dataDirectory"])
    progress = Progress(folder, job.name, job.spec.compute.num_nodes, str(data))
    # Before the namespaces change: the ids in there are the ones that others know.
    proc_fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    progress.pids["supervisor"] = int(os.readlink("self", dir_fd=proc_fd))
    try:
        enter_namespaces()
    except OSError as error:
        progress.begin()
        progress.failed("SandboxUnavailable", _explain(error))
        return 1
    parent_lives, parent_end = os.pipe2(os.O_CLOEXEC)
    # Between the fork and the child's own handlers a signal must not be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    child = os.fork()
    if child == 0:
        os.close(parent_end)
        die_with_parent()
        if select.select([parent_lives], [], [], 0)[0]:
            os._exit(1)  # the parent was gone before the kernel could know
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
            run_agent(folder, job, progress, data=data, secrets=secrets, proc_fd=proc_fd)
        except BaseException:
            _log.exception("The run's first process failed")
            logging.shutdown()
            os._exit(1)
        logging.shutdown()
        os._exit(0)
    os.close(parent_lives)
    code = _wait(child)
    _finish(folder, code, progress)
    return code


def _wait(child: int) -> int:
    """Hand signals down until the child ends; its exit code."""

    def hand_down(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    signal.signal(signal.SIGTERM, hand_down)
    signal.signal(signal.SIGINT, hand_down)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    _, status = os.waitpid(child, 0)
    return exit_code_of(status)


def _finish(folder: RunFolder, code: int, progress: Progress) -> None:
    """Where the first process could not say how it ended, say it."""
    if code == 0:
        return
    job_name, num_nodes = folder.read_status().get("jobName", ""), progress.status.nodes
    data = folder.read_spec()["dataDirectory"]
    last = Progress(folder, job_name, num_nodes, data)
    if not last.status.is_terminal:
        last.interrupted(f"the run's first process ended with exit code {code}")


def _explain(error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.ENOSPC, errno.EINVAL, errno.EACCES):
        return "this machine lets you make no namespaces; `trainmount doctor` says what to do"
    return f"namespaces cannot be made: {error.strerror}"


if __name__ == "__main__":
    sys.exit(main())
