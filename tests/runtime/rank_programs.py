"""Training programs that the tests run on several ranks. Loaded by `rank_launcher`, or started by
torchrun with a program's name and its arguments as JSON.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from trainmount.checkpoint import Checkpointer
from trainmount.checkpoint.stores import DirectoryStore, GivenUp
from trainmount.data import DataLoader, UCVolumeDataset, UCVolumeReader, UCVolumeWriter
from trainmount.errors import CheckpointError, StateMismatch
from trainmount.run import world


def train(arguments: dict[str, Any]) -> None:
    """Train a small network with DDP or FSDP; write down what was consumed, and the weights when it
    begins and at the end.

    A line for each consumed sample becomes durable with the checkpoint that counts it, or at the
    end.
    """
    me = world()
    _join(me.rank, me.world_size)
    torch.manual_seed(7 + me.rank)
    root = Path(arguments["root"])
    dataset = UCVolumeDataset(str(root / "data"), shuffle=True, seed=11)
    loader = DataLoader(
        dataset,
        batch_size=arguments["batch_size"],
        num_workers=arguments.get("num_workers", 0),
        collate_fn=read_batch,
    )
    model = _model(arguments)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    saved = model.module if arguments.get("save_inner") else model
    consumed: list[str] = []
    lines = root / "consumed"

    def write_lines(step: int) -> None:
        if step == arguments.get("die_in_save_at") and me.rank == arguments["die_on_rank"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == arguments.get("raise_in_save_at") and me.rank == arguments["die_on_rank"]:
            raise OSError(28, "No space left on device")
        (lines / f"{step:04d}-{me.rank}").write_text("".join(consumed))
        consumed.clear()
        if step == arguments.get("disk_full_at") and me.rank == arguments["die_on_rank"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

    with Checkpointer(
        root / "checkpoints",
        state={"model": saved, "optimizer": optimizer, "schedule": schedule},
        loader=loader,
        every_steps=arguments.get("every_steps"),
        every_minutes=arguments.get("every_minutes"),
        asynchronous=arguments.get("asynchronous", False),
        before_commit=write_lines,
    ) as checkpoints:
        resumed = checkpoints.resume()
        step = resumed.step if resumed else 0
        if me.is_first:
            lines.mkdir(exist_ok=True)
            for file in lines.iterdir():
                if int(file.name[:4]) > step:
                    file.unlink()
            (root / "resumed_at").write_text(str(step))
        dist.barrier()
        _write_weights(model, root / "begun")
        for epoch in range(loader.epoch, arguments["num_epochs"]):
            for names, inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                schedule.step()
                step += 1
                consumed.extend(f"{epoch} {step} {me.rank} {name}\n" for name in names)
                if step == arguments.get("sigterm_at") and me.rank == 1:
                    # As torchrun does: the whole group of the rank, so its loader workers too.
                    subprocess.run(
                        ["kill", "-TERM", "--", f"-{os.getpid()}"],
                        check=True,
                        start_new_session=True,
                    )
                checkpoints.step(step)
                dist.barrier()  # a collective of the program, while a save is on its way
        write_lines(step + 1)
    _write_weights(model, root / "final")
    dist.destroy_process_group()


def _model(arguments: dict[str, Any]) -> nn.Module:
    if arguments.get("kind") == "fsdp":
        network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))
        for layer in network:
            fully_shard(layer)
        return fully_shard(network)
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
    return DistributedDataParallel(network, **arguments.get("ddp", {}))


def _write_weights(model: nn.Module, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(weights, path)


def skip(arguments: dict[str, Any]) -> None:
    """Leave out a file that is missing on each rank, save, and resume; write down what is told."""
    me = world()
    _join(me.rank, me.world_size)
    root = Path(arguments["root"])
    dataset = UCVolumeDataset(str(root / "data"), on_error="skip", max_skipped=5)
    loader = DataLoader(dataset, batch_size=2, num_workers=0)
    dist.barrier()
    for number in (0, 1) if me.is_first else ():
        (root / "data" / f"f{number:03d}").unlink()
    dist.barrier()
    next(iter(loader))
    with Checkpointer(
        root / "checkpoints", state={}, loader=loader, on_sigterm=False
    ) as checkpoints:
        checkpoints.save(1)
        checkpoints.resume()
    told = (root / f"told-{me.rank}").open("w")
    with told:
        json.dump([loader.num_skipped, loader.state_dict()["skipped"]], told)
    dist.destroy_process_group()


def quarantine(arguments: dict[str, Any]) -> None:
    """Find a damaged file on each rank in the first epoch, which is whole again in the second;
    save, and resume; write down what was delivered and what is known to be in quarantine.
    """
    me = world()
    _join(me.rank, me.world_size)
    root = Path(arguments["root"])
    dataset = UCVolumeDataset(str(root / "data"), on_error="quarantine", max_skipped=2)
    loader = DataLoader(dataset, batch_size=2, num_workers=0)
    dist.barrier()
    own = root / "data" / f"f00{me.rank}"
    content = own.read_bytes()
    own.write_bytes(b"short")
    told: list[list[str]] = []
    for _ in range(2):
        told.append([Path(path).name for batch in loader for path in batch])
        told.append(sorted(loader.quarantined))
        own.write_bytes(content)
    with Checkpointer(
        root / "checkpoints", state={}, loader=loader, on_sigterm=False
    ) as checkpoints:
        checkpoints.save(1)
        checkpoints.resume()
    told.append(sorted(loader.state_dict()["skipped"]["quarantined"]))
    (root / f"told-{me.rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


def count_on(arguments: dict[str, Any]) -> None:
    """Iterate over a dataset that has a state for each rank, save after three items a rank, or
    resume; write down the rest.
    """
    me = world()
    _join(me.rank, me.world_size)
    root = Path(arguments["root"])
    loader = DataLoader(Counting(me.rank), batch_size=None, num_workers=0)
    with Checkpointer(
        root / "checkpoints", state={}, loader=loader, on_sigterm=False
    ) as checkpoints:
        try:
            resumed = checkpoints.resume()
            items = iter(loader)
            if resumed is None:
                taken = [next(items) for _ in range(3 + me.rank)]
                checkpoints.save(1)
            else:
                taken = list(items)
            told = str(taken)
        except StateMismatch as error:
            told = str(error)
    (root / f"told-{me.rank}").write_text(told)
    dist.destroy_process_group()


class Counting(IterableDataset[int]):
    """Ten numbers of a rank, with a place of its own."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        while self._next < 10:
            self._next += 1
            yield self._rank * 100 + self._next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]


def disagree(arguments: dict[str, Any]) -> None:
    """Save while one rank is a step ahead; write down what each rank was told."""
    me = world()
    _join(me.rank, me.world_size)
    root = Path(arguments["root"])
    loader = DataLoader(UCVolumeDataset(str(root / "data")), batch_size=2, num_workers=0)
    batches = iter(loader)
    for _ in range(1 + (me.rank == 1)):
        next(batches)
    with Checkpointer(
        root / "checkpoints", state={}, loader=loader, on_sigterm=False
    ) as checkpoints:
        try:
            checkpoints.save(1)
            told = "saved"
        except CheckpointError as error:
            told = str(error)
    (root / f"told-{me.rank}").write_text(told)
    dist.destroy_process_group()


def end_in_the_midst(arguments: dict[str, Any]) -> None:
    """Raise, or be killed, while the others wait in a collective; write down each rank's error and
    what was added to it.
    """
    me = world()
    _join(me.rank, me.world_size)
    root, how = Path(arguments["root"]), arguments["how"]
    try:
        with Checkpointer(root / "checkpoints", state={}, on_sigterm=False):
            dist.barrier()  # all are connected
            if how == "all raise" or (me.rank == 1 and how == "raise"):
                raise ValueError("f\udcff.bin cannot be read\nat byte 5")
            if how == "each raise":
                raise KeyError(me.rank)
            if me.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.zeros(1))
    except (RuntimeError, ValueError, KeyError) as error:
        told = [type(error).__name__, getattr(error, "__notes__", [])]
        (root / f"told-{me.rank}").write_text(json.dumps(told))


def consume(arguments: dict[str, Any]) -> None:
    """Go through the epochs without training; die at a step. What was consumed becomes durable with
    the loader's state.
    """
    me = world()
    _join(me.rank, me.world_size)
    root = Path(arguments["root"])
    saves = root / "saves"
    dataset = UCVolumeDataset(str(root / "data"), shuffle=True, seed=arguments["seed"])
    loader = DataLoader(
        dataset,
        arguments["batch_size"],
        num_workers=arguments["num_workers"],
        collate_fn=lambda paths: [Path(path).name for path in paths],
    )
    states = sorted(saves.glob("*.json"))
    step = int(states[-1].stem) if states else 0
    if states:
        loader.load_state_dict(json.loads(states[-1].read_text()))
    consumed: list[str] = []
    for epoch in range(loader.epoch, arguments["num_epochs"]):
        for names in loader:
            step += 1
            consumed += [f"{epoch} {step} {name}\n" for name in names]
            if step == arguments.get("die_at") and me.rank == me.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 3 == 0 or loader.epoch != epoch:
                (saves / f"{step:04d}-{me.rank}").write_text("".join(consumed))
                consumed.clear()
                dist.barrier()
                if me.is_first:
                    (saves / "new").write_text(json.dumps(loader.state_dict()))
                    (saves / "new").rename(saves / f"{step:04d}.json")
                dist.barrier()
    dist.destroy_process_group()


def stream(arguments: dict[str, Any]) -> None:
    """Iterate files directly, in torch's own loader; write down what this rank was given."""
    me = world()
    root = Path(arguments["root"])
    early = UCVolumeDataset(str(root / "data"))
    _join(me.rank, me.world_size)
    late = UCVolumeDataset(str(root / "data"))
    for made in arguments["made"]:
        dataset = early if made == "early" else late
        loader = TorchDataLoader(
            dataset, 1, num_workers=1, multiprocessing_context=arguments["method"]
        )
        names = [Path(path).name for [path] in loader]
        (root / f"{made}-{me.rank}").write_text(" ".join(names))
    dist.destroy_process_group()


def save_with_a_failure(arguments: dict[str, Any]) -> None:
    """Save where a thread of one rank fails and all other writes wait until they are stopped; write
    down what each rank was told.
    """
    me = world()
    _join(me.rank, me.world_size)
    root = Path(arguments["root"])
    was_stopped = []
    fails = threading.Event()

    def write(name: str, pieces: Any, stop: threading.Event, **_options: Any) -> None:
        if me.rank == arguments["failed_rank"] and name.endswith("-001.bin"):
            fails.wait(60)
            raise OSError(28, "No space left on device")
        fails.set()
        was_stopped.append(stop.wait(60))
        raise GivenUp("the save was given up")

    store = DirectoryStore(root / "saved")
    store.write = write  # type: ignore[method-assign]
    writer = UCVolumeWriter(root / "saved", thread_count=2)
    writer._store = store
    # Each rank has two files.
    state = {f"tensor-{me.rank}-{number}": torch.ones(5) for number in range(2)}
    reasons = {}
    try:
        save(state, storage_writer=writer)
    except CheckpointException as error:
        reasons = {
            rank: f"{type(failure).__name__}: {failure}"
            for rank, (failure, _) in error.failures.items()
        }
    answer = {"was_stopped": was_stopped and all(was_stopped), "reasons": reasons}
    (root / f"failed-{me.rank}").write_text(json.dumps(answer))
    dist.destroy_process_group()


_SHARDED = {"weights": (6001, 1000), "bias": (1_500_001,), "small": (10, 3)}


def _sharded_state(is_empty: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(
            torch.zeros(shape)
            if is_empty
            else torch.arange(float(math.prod(shape))).reshape(shape),
            mesh,
            [Shard(0)],
        )
        for name, shape in _SHARDED.items()
    }


def save_sharded(arguments: dict[str, Any]) -> None:
    """Save tensors whose rows are distributed over the ranks."""
    me = world()
    _join(me.rank, me.world_size)
    writer = UCVolumeWriter(Path(arguments["root"]) / "saved", thread_count=2)
    save(_sharded_state(is_empty=False), storage_writer=writer)
    dist.destroy_process_group()


def load_sharded(arguments: dict[str, Any]) -> None:
    """Load them; write down how many bytes a rank needed and read."""
    me = world()
    _join(me.rank, me.world_size)
    root = Path(arguments["root"])
    state, expected = _sharded_state(is_empty=True), _sharded_state(is_empty=False)
    reader = UCVolumeReader(root / "saved")
    load(state, storage_reader=reader)
    local = {name: one.to_local() for name, one in state.items()}
    answer = {
        "is_right": all(torch.equal(local[name], expected[name].to_local()) for name in local),
        "needed": sum(one.nbytes for one in local.values()),
        "read": reader.num_bytes_read,
    }
    (root / f"loaded-{me.rank}").write_text(json.dumps(answer))
    dist.destroy_process_group()


def read_batch(paths: list[str]) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    contents = [Path(path).read_bytes() for path in paths]
    inputs = torch.tensor([[byte / 255 for byte in content[:8]] for content in contents])
    labels = torch.tensor([content[8] for content in contents])
    return [Path(path).name for path in paths], inputs, labels


def _join(rank: int, world_size: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=os.environ.get("RENDEZVOUS", "env://"),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )


PROGRAMS = {
    "load_sharded": load_sharded,
    "save_sharded": save_sharded,
    "save_with_a_failure": save_with_a_failure,
    "consume": consume,
    "count_on": count_on,
    "disagree": disagree,
    "end_in_the_midst": end_in_the_midst,
    "quarantine": quarantine,
    "skip": skip,
    "stream": stream,
    "train": train,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](json.loads(sys.argv[2]))
    os._exit(0)  # what torch tidies up at exit takes seconds
