"""How far an epoch is, for people: a bar on a terminal, a line now and then elsewhere. Called by
`loader`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Bars", "require_rich"]

_log = logging.getLogger(__name__)

# Of a log that is read afterwards: two lines a minute.
_LOG_PERIOD_SECONDS: Final = 30.0


def require_rich() -> None:
    """Raises ImportError, with what to install, where the bars cannot be drawn."""
    try:
        import rich.progress  # noqa: F401
    except ImportError as error:
        raise ImportError("progress=True needs rich: pip install rich", name="rich") from error


class Bars:
    """The bars of all loaders of this process: a terminal has one place for them."""

    def __init__(self) -> None:
        self._display: Progress | None = None
        self._num_shown = 0

    def shown(
        self, batches: Iterator[Any], title: str, total: int | None, done: int
    ) -> Iterator[Any]:
        """The same batches, `done` of whose `total` have been before."""
        display = self._open()
        task = display.add_task(title, total=total, completed=done)
        logged_at = time.monotonic()
        try:
            for batch in batches:
                yield batch
                done += 1
                display.update(task, completed=done)
                if not display.console.is_terminal:
                    now = time.monotonic()
                    if now - logged_at >= _LOG_PERIOD_SECONDS:
                        logged_at = now
                        _log.info(
                            "batches consumed", extra={"of": title, "num": done, "total": total}
                        )
        finally:
            display.refresh()
            display.remove_task(task)
            self._close()

    def _open(self) -> Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        if self._display is None:
            self._display = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._display.start()
        self._num_shown += 1
        return self._display

    def _close(self) -> None:
        self._num_shown -= 1
        if self._num_shown == 0 and self._display is not None:
            self._display.stop()
            self._display = None


BARS: Final = Bars()
"""Of this process."""
