"""Writes MDS shards into a folder, or reads them there with two loader workers: what rank
`$RANK` was given, one line a sample.
"""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

NUM_SAMPLES = 400


def samples():
    for number in range(NUM_SAMPLES):
        yield {"tokens": np.random.default_rng(number).integers(0, 1 << 16, 2048, dtype=np.uint16)}


def write(folder: Path) -> None:
    with MDSWriter(out=str(folder), columns={"tokens": "ndarray"}, size_limit=1 << 18) as out:
        for sample in samples():
            out.write(sample)


def read(folder: Path) -> None:
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=8)
    lines = [
        f"{os.environ['RANK']} {hashlib.sha256(tokens.numpy().tobytes()).hexdigest()}\n"
        for batch in DataLoader(dataset, batch_size=8, num_workers=2)
        for tokens in batch["tokens"]
    ]
    # In one piece, for two ranks write into one pipe.
    os.write(1, "".join(lines).encode())


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]) / "mds/train")
