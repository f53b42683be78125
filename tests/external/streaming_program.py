"""Jobs that read MosaicML's shards by `trainmount.data`. Started by `test_mosaicml_streaming`; gets
a job a line as JSON, runs its ranks as forks of itself, and prints what they did, a line a job.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch.distributed as dist
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from trainmount.checkpoint import Checkpointer
from trainmount.data import DataLoader
from trainmount.errors import DataError

LOADERS = {"trainmount": DataLoader, "streaming": StreamingDataLoader}


def write(job):
    """Shards of some forty samples, which are the numbers from 0."""
    options = {"columns": {"number": "int"}, "size_limit": 1 << 9, "hashes": ["sha1"]}
    with MDSWriter(out=job["path"], **options) as out:
        for number in range(job["count"]):
            out.write({"number": number})


def read(job):
    """What the loader said at each of the steps."""
    options = {"shuffle": True, "batch_size": job["batch_size"], "num_canonical_nodes": 1}
    if "copies" in job:
        options |= {"remote": job["path"], "validate_hash": "sha1", "download_retry": 1}
    dataset = StreamingDataset(local=job.get("copies", job["path"]), **options)
    make = LOADERS[job.get("library", "trainmount")]
    loader = make(dataset, batch_size=job["batch_size"], num_workers=job["num_workers"])
    batches, answers = iter(()), []
    for step, argument in job["steps"]:
        if step == "load":
            loader.load_state_dict(argument)
        elif step == "iterate":
            batches = iter(loader)
        elif step == "take":
            answers.append([next(batches)["number"].tolist() for _ in range(argument)])
        elif step == "rest":
            answers.append([batch["number"].tolist() for batch in batches])
        elif step == "state":
            answers.append(loader.state_dict())
        elif step == "fail":
            try:
                answers.append(len(list(loader)))
            except DataError as error:
                answers.append(str(error))
        elif step == "save":
            checkpointer_of(loader, argument).save(1)
        elif step == "resume":
            checkpointer_of(loader, argument).resume()
    return answers


def checkpointer_of(loader, path):
    return Checkpointer(path, state={}, loader=loader, on_sigterm=False)


def rank_of(job, rank, folder):
    """Runs in a process of its own."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job["world_size"])))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if job["world_size"] > 1:
                rendezvous = f"file://{folder}/rendezvous"
                place = {"rank": rank, "world_size": job["world_size"]}
                dist.init_process_group("gloo", init_method=rendezvous, **place)
            answer = {"write": write, "read": read}[job["action"]](job)
        Path(folder, str(rank)).write_text(json.dumps(answer))
    except BaseException:
        traceback.print_exc()


def run(job):
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(job["world_size"]):
            pid = os.fork()
            if pid == 0:
                rank_of(job, rank, folder)
                os._exit(0)
            ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(len(ranks))]


for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)
