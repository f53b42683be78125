"""Tar shards through WebDataset: what node `$RANK` of `$WORLD_SIZE` gets with two workers, sorted,
one line a sample.
"""

import hashlib
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import webdataset as wds
from PIL import Image
from torch.utils.data import DataLoader

NUM_SHARDS = 8
SAMPLES_PER_SHARD = 25


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"train-{shard:06d}.tar", "w") as tar:
            for number in range(shard * SAMPLES_PER_SHARD, (shard + 1) * SAMPLES_PER_SHARD):
                pixels = np.random.default_rng(number).integers(0, 256, (48, 48, 3), dtype=np.uint8)
                picture = io.BytesIO()
                Image.fromarray(pixels).save(picture, format="png")
                for suffix, data in (
                    ("png", picture.getvalue()),
                    ("json", json.dumps({"number": number}).encode()),
                ):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def described(sample):
    picture, label = sample
    return f"{label['number']} {hashlib.sha256(np.asarray(picture).tobytes()).hexdigest()}"


def read(folder: Path) -> None:
    urls = f"{folder}/train-{{000000..{NUM_SHARDS - 1:06d}}}.tar"
    dataset = (
        wds.WebDataset(urls, shardshuffle=1000, nodesplitter=wds.split_by_node, seed=7)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("png", "json")
        .map(described)
    )
    for line in sorted(DataLoader(dataset, batch_size=None, num_workers=2)):
        print(line)


if __name__ == "__main__":
    os.environ.setdefault("RANK", "0")
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]) / "wds")
