"""What the daemon does when a command asks for it. Called by `server`, on the event loop's thread.

Long work runs in threads of its own, so that requests of the kernel never wait behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, Protocol

import trio

from trainmount_files.errors import VolumeError
from trainmount_files.trees import Report
from trainmount_fuse.control.eviction import Eviction
from trainmount_fuse.control.metrics import Snapshot, metrics_text
from trainmount_fuse.control.mount_status import (
    conflicting_files,
    local_files,
    mount_status,
    resident_bytes,
)
from trainmount_fuse.control.protocol import ControlError
from trainmount_fuse.control.refreshing import StaleNames, forget_metadata
from trainmount_fuse.control.warming import Warming
from trainmount_fuse.filesystem import Filesystem
from trainmount_fuse.request_counts import RequestCounter

__all__ = ["Commands", "KernelNames", "Tell"]

Tell = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Sends a message to whoever asked."""

_PROGRESS_SECONDS: Final = 0.2
_PIECE_LETTERS: Final = 32 * 1024
_MAX_RUNS: Final = 8
"""Commands with threads of their own at once; more wait for their turn."""


class KernelNames(Protocol):
    """What the kernel remembers of names."""

    async def forget(self, stale: StaleNames) -> None:
        """Let the kernel ask again for these; whoever reads or waits goes on."""
        ...


class Commands:
    """The requests of one mount's control socket."""

    def __init__(
        self, filesystem: Filesystem, requests: RequestCounter, kernel: KernelNames
    ) -> None:
        self._filesystem = filesystem
        self._requests = requests
        self._kernel = kernel
        self._started_at = time.monotonic()
        self._start_time_seconds = time.time()
        self._limiter = trio.CapacityLimiter(_MAX_RUNS)
        self._by_name = {
            "status": self._status,
            "metrics": self._metrics,
            "warm": self._warm,
            "evict": self._evict,
            "flush": self._flush,
            "refresh": self._refresh,
        }

    async def run(self, request: str, patterns: Sequence[str], tell: Tell) -> dict[str, Any]:
        """Carry out one request and return its result. Cancel to give up what was begun.

        Raises:
            ControlError: it is not known, or cannot be carried out.
        """
        function = self._by_name.get(request)
        if function is None:
            raise ControlError(f"this mount's daemon does not know the command {request!r}")
        try:
            return await function(patterns, tell)
        except VolumeError as error:
            raise ControlError(str(error)) from error
        except OSError as error:
            place = "" if error.filename is None else f"{error.filename}: "
            raise ControlError(f"{place}{error.strerror or error}") from error

    async def metrics(self) -> str:
        """The mount's numbers in Prometheus' text format."""
        core = self._filesystem.core
        writing = await core.workers.call(core.staging.statistics)
        return metrics_text(
            Snapshot(
                source=core.settings.source,
                start_time_seconds=self._start_time_seconds,
                resident_bytes=resident_bytes(),
                num_open_inodes=len(core.handles.open_inos()),
                requests=self._requests.statistics(),
                metadata=core.metadata.statistics(),
                cache=core.blocks.statistics(),
                prefetch=core.prefetcher.statistics(),
                memory=core.memory.statistics(),
                writing=writing,
            )
        )

    async def _status(self, _patterns: Sequence[str], tell: Tell) -> dict[str, Any]:
        core = self._filesystem.core
        files = await core.workers.call(local_files, core)
        conflicts = await core.workers.call(conflicting_files, core)
        for one in [*files, *conflicts]:
            await tell({"file": asdict(one)})
        return mount_status(core, files, self._started_at)

    async def _metrics(self, _patterns: Sequence[str], tell: Tell) -> dict[str, Any]:
        text = await self.metrics()
        for start in range(0, len(text), _PIECE_LETTERS):
            await tell({"text": text[start : start + _PIECE_LETTERS]})
        return {}

    async def _warm(self, patterns: Sequence[str], tell: Tell) -> dict[str, Any]:
        cancel = threading.Event()
        warming = Warming(self._filesystem.core, cancel)
        await self._in_thread(warming.run, patterns, cancel, warming.report, tell)
        await _tell_failures(warming.report, tell)
        for path in warming.unfit_paths:
            await tell({"failed": {"path": path, "reason": f"does not fit: {warming.full_reason}"}})
        return {
            **_counts(warming.report),
            "num_unfit": warming.num_unfit,
            "unfit_bytes": warming.unfit_bytes,
            "full_reason": warming.full_reason,
        }

    async def _evict(self, patterns: Sequence[str], tell: Tell) -> dict[str, Any]:
        core = self._filesystem.core
        before = core.blocks.statistics().evicted_bytes
        cancel = threading.Event()
        eviction = Eviction(core, cancel)
        await self._in_thread(eviction.run, patterns, cancel, eviction.report, tell)
        await _tell_failures(eviction.report, tell)
        freed = core.blocks.statistics().evicted_bytes - before
        return {**_counts(eviction.report), "freed_bytes": freed}

    async def _flush(self, _patterns: Sequence[str], tell: Tell) -> dict[str, Any]:
        core = self._filesystem.core
        before = len(core.staging.unsent())
        # Whoever asked may leave; what failed before and is tried again must not stay half way.
        with trio.CancelScope(shield=True):
            await self._filesystem.upload_all()
        files = await core.workers.call(local_files, core)
        for one in files:
            reason = one.reason or "was written again meanwhile"
            await tell({"failed": {"path": one.path, "reason": reason, "bytes": one.local_path}})
        return {"num_dirty": before, "num_left": len(files)}

    async def _refresh(self, patterns: Sequence[str], _tell: Tell) -> dict[str, Any]:
        stale = await forget_metadata(self._filesystem.core, patterns)
        await self._kernel.forget(stale)
        return {"num_names": len(stale.names)}

    async def _in_thread(
        self,
        run: Callable[[Sequence[str]], None],
        patterns: Sequence[str],
        cancel: threading.Event,
        report: Report,
        tell: Tell,
    ) -> None:
        """Run it while its progress is told. Cancelling sets the event and waits for the end."""
        if not patterns:
            raise ControlError("name the files")
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tell_progress, report, tell)
            nursery.start_soon(_set_when_cancelled, cancel)
            try:
                await trio.to_thread.run_sync(run, patterns, limiter=self._limiter)
            except (VolumeError, OSError) as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure


async def _tell_progress(report: Report, tell: Tell) -> None:
    told: dict[str, int] = {}
    while True:
        counts = _counts(report)
        if counts != told:
            await tell({"progress": counts})
            told = counts
        await trio.sleep(_PROGRESS_SECONDS)


async def _set_when_cancelled(cancel: threading.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        cancel.set()


async def _tell_failures(report: Report, tell: Tell) -> None:
    for failure in sorted(report.failures, key=lambda failure: failure.path):
        await tell({"failed": {"path": failure.path, "reason": failure.error.reason}})


def _counts(report: Report) -> dict[str, int]:
    return {
        "num_found": report.num_found,
        "num_bytes_found": report.num_bytes_found,
        "num_done": report.num_done,
        "num_bytes": report.num_bytes,
    }
