"""Run by tests beside the example's `train.py`: the same training, held at a gate.

Two parameters more than the example's, both optional:

    gate_step    after this step rank 0 waits until the file `go` is in the output folder, so that a
                 test can do its damage before the job can end
    hog_step     after this step rank 3 of attempt 0 allocates memory until it is killed
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import train  # type: ignore[import-not-found]

from trainmount.run import parameters, world

HOG_RANK = 3
HOG_BYTES = 64 << 20


class GatedSamples(train.ConsumedSamples):  # type: ignore[misc]
    """Learns of every step, as the class that it replaces does."""

    def add(self, *, epoch: int, step: int, names: list[str]) -> None:
        super().add(epoch=epoch, step=step, names=names)
        here, options = world(), parameters()
        if here.rank == 0 and step == options.get("gate_step"):
            while not Path(options["output"], "go").exists():
                time.sleep(0.1)
        first = os.environ["TRAINMOUNT_ATTEMPT"] == "0"
        if here.rank == HOG_RANK and first and step == options.get("hog_step"):
            hoard = []
            while True:
                # A bytearray is written when it is made, so the memory is really used.
                hoard.append(bytearray(HOG_BYTES))


if __name__ == "__main__":
    train.ConsumedSamples = GatedSamples
    train.main()
