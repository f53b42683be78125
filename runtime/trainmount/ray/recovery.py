"""How a run takes up what an earlier one has committed. Called by Ray when it plans a run whose
checkpoint's directory is there.

    take over    whoever still writes for an earlier run can commit no more
    claim        nor what it has pending
    sweep        the data files of the claimed, and of no other, are deleted
    load         the ids of what is committed
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from trainmount.errors import CheckpointError
from trainmount.ray.internals import IdColumnCheckpointManager, ray, without_scheme
from trainmount.ray.leftovers import claim, sweep

__all__ = ["ExactCheckpointManager"]

_log = logging.getLogger(__name__)


class ExactCheckpointManager(IdColumnCheckpointManager):  # type: ignore[misc, unused-ignore]
    """Ray's manager, but that it knows which data file is whose, and takes over first."""

    def load_checkpoint(
        self, data_file_dir: str | None = None, data_file_filesystem: Any = None
    ) -> tuple[Any, int]:
        """The sorted ids that are committed, by reference, and their bytes; None and 0 if none are.

        Raises:
            CheckpointError: an id was committed twice.
        """
        handler = self.filesystem.handler
        handler.take_over()
        if data_file_dir is not None:
            claim(handler)
            data = data_file_filesystem or self.filesystem
            deleted = sweep(handler, without_scheme(data_file_dir), data)
            if deleted:
                _log.info("Removed data files of tasks that did not commit", extra={"num": deleted})
        # A task that was about to write its pending file when we took over may still do so.
        handler.committed_only = True
        ids, num_bytes = super().load_checkpoint(None, None)
        if ids is not None and handler.unique_ids:
            repeated = ray.get(_first_repeated.remote(ids))
            if repeated is not None:
                raise CheckpointError(
                    f"the id {repeated} in {self.checkpoint_path} stands for rows of several files:"
                    " give each row an id of its own, a new checkpoint path and a new output"
                )
        return ids, num_bytes


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator, misc, unused-ignore]
def _first_repeated(ids: Any) -> str | None:
    """Of sorted ids, one that is there twice."""
    at = np.flatnonzero(ids[1:] == ids[:-1])
    return repr(ids[at[:1]].tolist()[0]) if len(at) else None
