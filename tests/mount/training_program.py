"""Trains a small network on the files of a folder with DistributedDataParallel, under torchrun:
`training_program.py FOLDER NOTES NUM_EPOCHS`.

FOLDER holds `train` and `checkpoints`. Notes on the local disk: each process's id, for each attempt
a line a step with the loss of all ranks, and at the end the digest of the weights.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainmount.checkpoint import Checkpointer
from trainmount.data import DataLoader, UCVolumeDataset
from trainmount.run import world

BATCH_SIZE = 4


def read(paths):
    contents = [Path(path).read_bytes() for path in paths]
    inputs = torch.tensor([[byte / 255 for byte in content[:8]] for content in contents])
    return inputs, torch.tensor([content[8] for content in contents])


def train(folder: Path, notes: Path, num_epochs: int) -> None:
    me = world()
    (notes / f"pid-{os.getpid()}").touch()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3 + me.rank)
    dataset = UCVolumeDataset(str(folder / "train"), shuffle=True, seed=5)
    loader = DataLoader(dataset, BATCH_SIZE, num_workers=1, collate_fn=read)
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with (
        Checkpointer(
            folder / "checkpoints", state=state, loader=loader, every_steps=3, asynchronous=True
        ) as checkpoints,
        (notes / f"losses-{me.attempt}").open("a", buffering=1) as losses,
    ):
        resumed = checkpoints.resume()
        step = resumed.step if resumed else 0
        for _epoch in range(loader.epoch, num_epochs):
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                total = loss.detach().clone()
                dist.all_reduce(total)
                if me.is_first:
                    losses.write(f"{step} {total.item().hex()}\n")
                checkpoints.step(step)
    if me.is_first:
        weights = b"".join(value.numpy().tobytes() for value in network.state_dict().values())
        (notes / "weights").write_text(hashlib.sha256(weights).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # what torch tidies up at exit takes seconds
