"""Saves tensors by every library that people use into a folder, loads them, and prints digests."""

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter


def state():
    generator = torch.Generator().manual_seed(5)
    return {f"layer.{n}": torch.randn(256, 1024, generator=generator) for n in range(8)}


def digest(tensors):
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + tensors[name].numpy().tobytes())
    return whole.hexdigest()


def main(folder: Path) -> None:
    tensors = state()
    for _again in range(2):  # the second time over what is there
        save_file(tensors, folder / "model.safetensors")
        torch.save(tensors, folder / "model.pt")
        torch.save(tensors, folder / "model.pt.tmp")
        (folder / "model.pt.tmp").rename(folder / "renamed.pt")
        dcp.save(tensors, checkpoint_id=str(folder / "dcp"))
        consolidating = HuggingFaceStorageWriter(
            str(folder / "hugging-face"), save_distributed=True, enable_consolidation=True
        )
        dcp.save(tensors, storage_writer=consolidating)
    print("safetensors", digest(load_file(folder / "model.safetensors")))
    print("torch", digest(torch.load(folder / "model.pt")))
    print("mapped", digest(torch.load(folder / "renamed.pt", mmap=True)))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=str(folder / "dcp"))
    print("dcp", digest(loaded))
    consolidated = folder / "hugging-face/model-00001-of-00001.safetensors"
    print("consolidated", digest(load_file(consolidated)))
    print(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
