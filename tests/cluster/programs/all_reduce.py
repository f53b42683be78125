"""Run by a test in two pods: sums the ranks of all, and fails if the sum is wrong."""

import os
import socket

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
print(
    f"rank {rank} of {world_size} on {socket.gethostname()} at {os.environ['NODE']}: {total.item()}"
)
assert total.item() == world_size * (world_size + 1) / 2
dist.destroy_process_group()
