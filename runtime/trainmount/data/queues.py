"""Queues to and from loader workers that hand small messages over at once. Called by `loader`.

The library's queue writes all messages in a thread of its own. For each batch that thread has to be
woken twice, once with the numbers of its samples and once with the batch, and in a worker it waits
for the interpreter's lock behind the reading of the next batch: as much time as two small files
take. A message that fits into what the pipe has room for needs no thread.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import multiprocessing.queues
import select
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Lock, Semaphore
from typing import Any, Final

from torch.utils.data import DataLoader

__all__ = ["PromptQueue", "prompt_queues"]

# What a pipe takes whole without waiting wherever it takes anything, less the length in front.
_MAX_BYTES: Final = select.PIPE_BUF - 4


class PromptQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg] # not at run time
    """`multiprocessing.Queue` whose `put` writes a small message itself, where that needs no
    waiting and nothing is before it. For one thread that puts in each process.
    """

    # What the library's has, and its types leave out.
    _closed: bool
    _on_queue_feeder_error: Callable[[Exception, Any], None]
    _sem: Semaphore
    _wlock: Lock
    _writer: Connection

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """As of the library's queue. Raises ValueError after `close`, and what pickling raises."""
        try:
            message = ForkingPickler.dumps(obj)
        except Exception as error:
            # As the thread would: a loader worker ends here, after it has told why.
            self._on_queue_feeder_error(error, obj)
            raise
        if self._closed or self._num_given != self._num_written or not self._write(message):
            # Pickled once: tensors in it are shared by then, which takes descriptors.
            self._messages.append(message)
            try:
                super().put(None, block, timeout)
            except BaseException:
                self._messages.pop()
                raise
            self._num_given += 1

    def _write(self, message: memoryview) -> bool:
        """True if the message is on its way."""
        if len(message) > _MAX_BYTES or not self._wlock.acquire(block=False):
            return False
        try:
            if not self._has_room() or not self._sem.acquire(block=False):
                return False
            self._writer.send_bytes(message)
        finally:
            self._wlock.release()
        return True

    @functools.cached_property
    def _has_room(self) -> Callable[[], bool]:
        room = select.poll()
        room.register(self._writer.fileno(), select.POLLOUT)
        return lambda: bool(room.poll(0))

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)  # type: ignore[misc]
        self._messages: deque[memoryview] = deque()
        self._num_given = self._num_written = 0
        # The thread takes this function when it starts.
        self._send_bytes = self._send_next

    def _send_next(self, _nothing: object) -> None:
        self._writer.send_bytes(self._messages.popleft())
        self._num_written += 1


@contextmanager
def prompt_queues(loader: DataLoader[Any]) -> Iterator[None]:
    """Workers that torch's loader starts meanwhile get such queues, unless it was given a context
    that has queues of its own. What it was given is there again afterwards.
    """
    given = loader.multiprocessing_context
    context = multiprocessing.get_context() if given is None else given
    if not loader.num_workers or type(context).Queue is not BaseContext.Queue:
        yield
        return
    prompt = copy.copy(context)
    queue = functools.partial(PromptQueue, ctx=context.get_context())
    prompt.Queue = queue  # type: ignore[method-assign]
    loader.multiprocessing_context = prompt
    try:
        yield
    finally:
        loader.multiprocessing_context = given
