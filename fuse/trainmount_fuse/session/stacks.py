"""What every task and thread of the daemon waits for, as text; daemon.py logs it at SIGUSR2."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator

import trio

__all__ = ["describe_stacks"]


def describe_stacks() -> str:
    """The innermost frames of each trio task and each thread. Call it from a task."""
    root = trio.lowlevel.current_root_task()
    tasks = [] if root is None else list(_descendants(root))
    parts = [f"task {task.name}\n{_await_frames(task)}" for task in tasks]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts += [
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return "\n".join(parts)


def _descendants(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _descendants(child)


def _await_frames(task: trio.lowlevel.Task) -> str:
    frames = traceback.StackSummary.extract(task.iter_await_frames())
    return "".join(frames.format())
