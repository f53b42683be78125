"""How a handle is read, forward or in equal steps, and what its readers want next. Pure; called by
`prefetch`.

The window of a reader that goes forward grows with each of its reads, so a read of a header fetches
little too much. A read elsewhere starts another reader, without a window: who reads at random gets
nothing ahead.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Stream", "Streams"]

_MAX_STREAMS: Final = 8
"""Readers told apart in one handle: forked processes share a descriptor and each read a part
forward.
"""

_FIRST_WINDOW_BYTES: Final = 2 << 20
_FIRST_READS_AHEAD: Final = 32
"""Of a reader of first bytes. The kernel asks for more at once the larger a program's reads are:
16 KiB for a header, 1 MiB for who copies.
"""

_GROWTH: Final = 4
"""64 MiB are reached with the second read of a MiB: doubling took as long as a tenth of a GiB from
a store with 20 ms latency.
"""

_SHORT_READS: Final = 4
"""A reader that stops after fewer reads went forward only by chance, as far as we know."""

_MIN_EQUAL_STEPS: Final = 2
_MAX_STEPS_AHEAD: Final = 32


@dataclass(slots=True)
class Stream:
    """One forward reader of a handle."""

    start: int
    next_offset: int
    window_bytes: int = 0
    scheduled_until: int = 0
    num_reads: int = 1
    stop: int | None = None
    """Where it ends if it is like the reads before it, which were in equal steps."""


@dataclass(slots=True)
class Streams:
    """The readers of one handle."""

    streams: list[Stream] = field(default_factory=list)
    """The most recent last."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when the handle is released: fetches that nobody waits for end."""

    ahead: list[tuple[int, int]] = field(default_factory=list)
    """Ranges that were fetched for it and not read yet."""

    step: int = 0
    """Distance of the last two reads that began a reader."""

    num_steps: int = 0
    """How often in a row it was the same."""

    steps_until: int = 0
    """Ranges in equal steps are asked for up to here."""

    num_short: int = 0
    """Readers in a row that ended after a few reads."""

    def follow(self, offset: int, size: int, max_bytes: int) -> Stream:
        """The reader that a read belongs to, moved on, with the window it has earned."""
        end = offset + size
        for stream in self.streams:
            # The kernel's own read-ahead sends requests slightly out of order, and none for pages
            # that it was given.
            furthest = max(stream.next_offset, stream.scheduled_until)
            if stream.next_offset - 2 * size <= offset <= furthest + 4 * size:
                self.streams.remove(stream)
                self.streams.append(stream)
                self._move(stream, end, max_bytes)
                return stream
        self._note_start(offset)
        stream = Stream(offset, end, scheduled_until=end)
        if self.num_steps >= _MIN_EQUAL_STEPS and self.streams:
            stream.stop = offset + self._length()
        elif offset == 0:
            # Most readers of a first byte want the rest.
            wanted = max(_FIRST_WINDOW_BYTES, _FIRST_READS_AHEAD * size)
            stream.window_bytes = min(max_bytes, wanted)
        self.streams.append(stream)
        del self.streams[:-_MAX_STREAMS]
        return stream

    def window_ahead(self, stream: Stream) -> tuple[int, int]:
        """What a forward reader wants next and was not asked for yet; start and end are equal for
        nothing.
        """
        start = max(stream.scheduled_until, stream.next_offset)
        end = stream.next_offset + stream.window_bytes
        if stream.stop is not None:
            end = min(end, stream.stop)
        return start, max(start, end)

    def steps_ahead(self, stream: Stream, max_bytes: int) -> list[tuple[int, int]]:
        """The next ranges of a reader that goes in equal steps, and were not asked for yet."""
        if stream.stop is None or stream.num_reads > 1:
            return []
        length = stream.stop - stream.start
        num_ahead = min(1 << self.num_steps, _MAX_STEPS_AHEAD, max_bytes // length)
        starts = [stream.start + number * self.step for number in range(1, num_ahead + 1)]
        new = [start for start in starts if start >= self.steps_until]
        if new:
            self.steps_until = new[-1] + length
        return [(start, start + length) for start in new]

    def _move(self, stream: Stream, end: int, max_bytes: int) -> None:
        stream.num_reads += 1
        if stream.num_reads >= _SHORT_READS:
            self.num_short = 0
        if stream.stop is not None and end > stream.stop:
            stream.stop = None
        if stream.num_reads > self.num_short:
            grown = max(_FIRST_WINDOW_BYTES, _GROWTH * stream.window_bytes)
            stream.window_bytes = min(max_bytes, grown)
        stream.next_offset = max(stream.next_offset, end)

    def _note_start(self, offset: int) -> None:
        if not self.streams:
            return
        last = self.streams[-1]
        step = offset - last.start
        if step > 0 and step == self.step:
            self.num_steps += 1
        else:
            self.step, self.num_steps, self.steps_until = step, 0, 0
        if last.num_reads < _SHORT_READS:
            self.num_short = min(self.num_short + 1, _SHORT_READS)

    def _length(self) -> int:
        """Bytes that the last reader took."""
        last = self.streams[-1]
        return last.next_offset - last.start
