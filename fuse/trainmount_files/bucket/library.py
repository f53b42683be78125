"""obstore, as this process may use it: the only module that loads it.

obstore runs its requests on threads of its own, which a forked child does not have: there, the
library of the parent would wait for ever. A child therefore loads a second copy of it, with threads
of its own (20 ms, 15 MB), from a file that only it has.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

from trainmount_files.bucket.answers import to_volume_error
from trainmount_files.bucket.blocking import BlockingCalls
from trainmount_files.ending import close_stores_at_end
from trainmount_files.errors import Cancelled, Unsupported, VolumeError
from trainmount_files.per_process import PerProcess
from trainmount_files.retry import Cancellation

__all__ = ["Calls", "obstore"]

T = TypeVar("T")

_MODULE: Final = "obstore._obstore"

_LOOK_SECONDS: Final = 0.05
"""How often a waiting call looks at its cancel event."""

_CLOSE_SECONDS: Final = 5.0

_SETTLE_SECONDS: Final = 0.05
"""For obstore's threads to let go of the buffers of the last requests."""

_LEAVE_SECONDS: Final = 1.0
"""For those that are inside the interpreter, where a busy machine may keep them, to leave it."""

_POLL_SECONDS: Final = 0.005


class _Fork:
    """Whether this process inherited a loaded obstore, whose threads it does not have."""

    inherited: bool = False


def _after_fork_in_child() -> None:
    if _MODULE in sys.modules:
        _Fork.inherited = True


os.register_at_fork(after_in_child=_after_fork_in_child)


def _load() -> ModuleType:
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        raise Unsupported(
            "open", "", "buckets need obstore: pip install 'trainmount[bucket]'"
        ) from error
    return _copy_of(module) if _Fork.inherited else module


def _copy_of(module: ModuleType) -> ModuleType:
    """A second instance of an extension module: the loader knows a library by its file."""
    assert module.__file__ is not None
    descriptor = os.memfd_create("obstore", os.MFD_CLOEXEC)
    try:
        with Path(module.__file__).open("rb") as library:
            while os.sendfile(descriptor, library.fileno(), None, 1 << 30):
                pass
        path = f"/proc/self/fd/{descriptor}"
        loader = ExtensionFileLoader(_MODULE, path)
        spec = spec_from_file_location(_MODULE, path, loader=loader)
        assert spec is not None
        copied = module_from_spec(spec)
        loader.exec_module(copied)
    finally:
        os.close(descriptor)
    return copied


_OBSTORE: Final = PerProcess(_load)


def obstore() -> ModuleType:
    """obstore's functions; its stores are in `_store`, its errors in `exceptions`.

    Raises:
        Unsupported: the extra `bucket` is not installed.
    """
    return _OBSTORE.get()


class Calls:
    """obstore's coroutines for callers that have threads. One a volume and process.

    A caller waits where it can be cancelled and interrupted, which it could not be inside obstore's
    blocking functions. Any thread may call.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self.pid: Final = os.getpid()
        # Both guarded by the lock.
        self._open = True
        self._running: set[Future[Any]] = set()
        self._blocking = BlockingCalls()
        _BLOCKING.add(self._blocking)
        self._thread = threading.Thread(target=self._serve, name="trainmount-bucket", daemon=True)
        self._thread.start()
        _KEPT.append(self)

    def run(
        self,
        operation: str,
        path: str,
        make: Callable[[], Coroutine[Any, Any, T]],
        cancel: Cancellation | None = None,
    ) -> T:
        """What the coroutine returns; it is cancelled where this raises.

        Raises:
            VolumeError: what obstore raised, translated. Cancelled: `cancel` is set, or the volume
            was closed meanwhile.
        """
        if cancel is not None and cancel.is_set():
            raise Cancelled(operation, path, "cancelled")
        with self._lock:
            if not self._open:
                raise ValueError(f"{operation} on a closed volume")
            future = asyncio.run_coroutine_threadsafe(make(), self._loop)
            self._running.add(future)
        failure: VolumeError
        try:
            return _wait(operation, path, future, cancel)
        except CancelledError:
            failure = Cancelled(operation, path, "the volume was closed")
        except VolumeError:
            raise
        except Exception as error:
            failure = to_volume_error(error, operation, path)
        finally:
            future.cancel()
            with self._lock:
                self._running.discard(future)
            _Ended.at = time.monotonic()
        # Outside of the handler: obstore's own text may hold what must not be said.
        raise failure

    def run_blocking(
        self,
        operation: str,
        path: str,
        function: Callable[[], T],
        cancel: Cancellation | None = None,
    ) -> T:
        """As `run`, for a function that does one short request: quicker, but what is given up goes
        on to its end.
        """
        if cancel is not None and cancel.is_set():
            raise Cancelled(operation, path, "cancelled")
        if not self._open:
            raise ValueError(f"{operation} on a closed volume")
        failure: VolumeError
        try:
            return self._blocking.run(operation, path, function, cancel)
        except VolumeError:
            raise
        except Exception as error:
            failure = to_volume_error(error, operation, path)
        finally:
            _Ended.at = time.monotonic()
        raise failure

    def close(self) -> None:
        """End all calls and the thread; safe to repeat."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            running = list(self._running)
        self._blocking.close()
        for future in running:
            future.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        with suppress(ValueError):
            _KEPT.remove(self)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()


# Never dropped in a forked child: closing the inherited loop would deafen the parent's, with which
# it shares the kernel's poll set.
_KEPT: Final[list[Calls]] = []

_BLOCKING: Final[weakref.WeakSet[BlockingCalls]] = weakref.WeakSet()
"""Those that a thread is in outlive their volume."""


class _Ended:
    """When the last call of this process ended, of whichever volume; it may be closed now."""

    at: float | None = None


def _close_all() -> None:
    """At the interpreter's end: a thread of obstore's that wanted it after that would abort the
    process.
    """
    for calls in [calls for calls in _KEPT if calls.pid == os.getpid()]:
        calls.close()
    if _Ended.at is None:
        return
    deadline = time.monotonic() + _CLOSE_SECONDS
    for blocking in list(_BLOCKING):
        blocking.join(deadline - time.monotonic())
    time.sleep(max(0.0, _Ended.at + _SETTLE_SECONDS - time.monotonic()))
    deadline = time.monotonic() + _LEAVE_SECONDS
    while _has_foreign_thread() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _has_foreign_thread() -> bool:
    """Whether a thread that Python did not start is in Python code, as obstore's are while they
    hand over what they brought.
    """
    ours = {thread.ident for thread in threading.enumerate()}
    return any(ident not in ours for ident in sys._current_frames())


close_stores_at_end(_close_all)


def _wait(operation: str, path: str, future: Future[T], cancel: Cancellation | None) -> T:
    if cancel is None:
        return future.result()
    while True:
        try:
            return future.result(_LOOK_SECONDS)
        except TimeoutError:
            if future.done():
                raise
            if cancel.is_set():
                raise Cancelled(operation, path, "cancelled") from None
