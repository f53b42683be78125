"""Train a small CNN on handwritten digits in a volume, and survive whatever dies.

Started by torchrun, one process an accelerator. Reads `<data>/train` and `<data>/test`, where a
file is called `<index>_<label>.png`, and writes below `<output>`:

    checkpoints/                                whole or absent; a restarted job goes on from there
    consumed/<from>-<to>/rank-<r>.jsonl         a line for each sample of steps <from>+1 to <to>
    result.json                                 held-out accuracy, and SHA-256 of the final weights

One thing here is worth copying into a job of your own: what a job keeps beside its weights (here:
the lines of consumed samples) is written in `before_commit`, so that it belongs to the checkpoint,
and whatever is newer than the checkpoint is removed at the start of a resumed run.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainmount.checkpoint import Checkpointer
from trainmount.data import DataLoader, UCVolumeDataset
from trainmount.run import parameters, world


class DigitsNet(nn.Module):
    """Two convolutions and a linear layer: 8 x 8 grey pixels in, 10 logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def decode(paths: list[str]) -> tuple[list[str], Tensor, Tensor]:
    """The batch of these files: names, images (n, 1, 8, 8) in 0..1, labels (n,)."""
    images, labels = [], []
    for path in paths:
        pixels = np.asarray(Image.open(io.BytesIO(Path(path).read_bytes())), dtype=np.float32)
        images.append(torch.from_numpy(pixels / 255.0).unsqueeze(0))
        labels.append(int(Path(path).stem.rpartition("_")[2]))
    names = [Path(path).name for path in paths]
    # A rank may get no sample of an epoch's last batch; it still takes part in the step.
    stacked = torch.stack(images) if images else torch.zeros(0, 1, 8, 8)
    return names, stacked, torch.tensor(labels, dtype=torch.long)


class ConsumedSamples:
    """The samples consumed since the last checkpoint, written before the next one is committed."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._lines: list[str] = []
        self._since = 0

    def start_from(self, step: int) -> None:
        """Forget what was consumed after `step`: it will be consumed again."""
        self._since = step
        if self._rank == 0 and self._directory.is_dir():
            for segment in self._directory.iterdir():
                if int(segment.name.partition("-")[2]) > step:
                    shutil.rmtree(segment)
        dist.barrier()

    def add(self, *, epoch: int, step: int, names: list[str]) -> None:
        for name in names:
            line = {"epoch": epoch, "step": step, "rank": self._rank, "file": name}
            self._lines.append(json.dumps(line) + "\n")

    def write(self, step: int) -> None:
        if step > self._since:
            segment = self._directory / f"{self._since:06d}-{step:06d}"
            segment.mkdir(parents=True, exist_ok=True)
            (segment / f"rank-{self._rank}.jsonl").write_text("".join(self._lines))
        self._lines, self._since = [], step


def accuracy(model: nn.Module, directory: Path) -> float:
    """The share of held-out files whose digit the model names."""
    _, images, labels = decode(sorted(str(path) for path in directory.glob("*.png")))
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).double().mean())


def weights_sha256(model: nn.Module) -> str:
    """Equal for two models if and only if every weight is equal bit for bit."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> float:
    """One optimizer step over the global batch; returns its mean loss, the same on every rank."""
    total = torch.tensor([float(len(labels))])
    dist.all_reduce(total)
    # DDP averages over ranks, which may hold different numbers of samples: weigh the sum by the
    # global count.
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum") / total.item()
    optimizer.zero_grad()
    (loss * dist.get_world_size()).backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean)


def main() -> None:
    here, options = world(), parameters()
    data, output = Path(options["data"]), Path(options["output"])
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    dist.init_process_group("gloo")

    network = DigitsNet()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=options["learning_rate"])
    loader = DataLoader(
        UCVolumeDataset(str(data / "train"), shuffle=True, seed=options["seed"], pattern="*.png"),
        batch_size=options["global_batch_size"] // here.world_size,
        num_workers=options["loader_workers"],
        collate_fn=decode,
    )
    consumed = ConsumedSamples(output / "consumed", here.rank)
    with Checkpointer(
        str(output / "checkpoints"),
        state={"model": model, "optimizer": optimizer},
        loader=loader,
        every_steps=options["checkpoint_every_steps"],
        keep_last=2,
        before_commit=consumed.write,
    ) as checkpoints:
        resumed = checkpoints.resume()
        step = resumed.step if resumed else 0
        consumed.start_from(step)
        if here.is_first:
            how = "resumed" if resumed else "starts"
            print(f"attempt {here.attempt}: {how} at step {step}", flush=True)
        for epoch in range(loader.epoch, options["epochs"]):
            for names, images, labels in loader:
                loss = train_step(model, optimizer, images, labels)
                step += 1
                consumed.add(epoch=epoch, step=step, names=names)
                if here.is_first:
                    print(f"epoch {epoch} step {step} loss {loss:.6f}", flush=True)
                checkpoints.step(step)
        checkpoints.save(step)

    if here.is_first:
        result = {
            "accuracy": accuracy(network, data / "test"),
            "steps": step,
            "weights_sha256": weights_sha256(network),
            "world_size": here.world_size,
        }
        (output / "result.json").write_text(json.dumps(result) + "\n")
        print(f"held-out accuracy {result['accuracy']:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
