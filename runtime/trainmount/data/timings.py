"""How long batches take, in the active MLflow run. Called by `loader`.

MLflow is never imported here: without it, or without an active run, there is nothing to log to.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

__all__ = ["Timings"]

_log = logging.getLogger(__name__)

# Rare enough that the requests cost nothing, often enough to see a stall.
_PERIOD_SECONDS: Final = 10.0


class Timings:
    """Means and variances of the time in `next()` and of the time between two calls of it, in
    seconds, over about ten seconds each and at the end of an epoch.
    """

    def __init__(
        self, rank: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._fetch = Sample()
        self._between_next = Sample()
        self._num_batches = 0
        self._logged_at = clock()
        self._has_failed = False

    def timed(
        self, batches: Iterator[Any], gauges: Callable[[], dict[str, float]]
    ) -> Iterator[Any]:
        """The same batches. `gauges` gives further numbers to log with the times."""
        clock = self._clock
        self._logged_at = clock()
        asked = clock()
        for batch in batches:
            given = clock()
            self._fetch.add(given - asked)
            self._num_batches += 1
            if given - self._logged_at >= _PERIOD_SECONDS:
                self._log(gauges())
            given = clock()
            yield batch
            asked = clock()
            self._between_next.add(asked - given)
        self._log(gauges())

    def _log(self, gauges: dict[str, float]) -> None:
        samples = {"fetch_seconds": self._fetch, "between_next_seconds": self._between_next}
        self._fetch, self._between_next = Sample(), Sample()
        self._logged_at = self._clock()
        mlflow = sys.modules.get("mlflow")
        if mlflow is None:
            return
        rank = self._rank()
        metrics = {f"dataloader/{name}/rank_{rank}": value for name, value in gauges.items()}
        for name, sample in samples.items():
            if sample.count:
                metrics[f"dataloader/{name}/rank_{rank}"] = sample.mean
                metrics[f"dataloader/{name}_variance/rank_{rank}"] = sample.variance
        try:
            if mlflow.active_run() is not None:
                # Not waited for: a slow tracking server must not hold a step up.
                mlflow.log_metrics(metrics, step=self._num_batches, synchronous=False)
        except Exception as error:
            if not self._has_failed:
                _log.warning("cannot log times to MLflow", extra={"reason": str(error)})
            self._has_failed = True


class Sample:
    """Count, mean and variance of numbers, as they come (Welford)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        difference = value - self.mean
        self.mean += difference / self.count
        self._squares += difference * (value - self.mean)

    @property
    def variance(self) -> float:
        """Of the whole population; 0 for a single number."""
        return self._squares / self.count if self.count else 0.0
