"""A distributed checkpoint by two nodes, each on a mount of its own: `$RANK` saves its shard or
loads all of it, and prints the digest of what it has.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

SHAPE = (512, 1024)


def main(action: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(11))
    given = whole if action == "save" else torch.zeros(SHAPE)
    tensors = {"weight": distribute_tensor(given, mesh, [Shard(0)])}
    try:
        if action == "save":
            dcp.save(tensors, checkpoint_id=str(folder))
            dist.barrier()
            sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
            line = f"{dist.get_rank()} {sorted(sizes)} {min(sizes.values()) > 0}"
        else:
            dcp.load(tensors, checkpoint_id=str(folder))
            digest = hashlib.sha256(tensors["weight"].full_tensor().numpy().tobytes()).hexdigest()
            line = f"{dist.get_rank()} {digest == hashlib.sha256(whole.numpy()).hexdigest()}"
    finally:
        dist.destroy_process_group()
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
