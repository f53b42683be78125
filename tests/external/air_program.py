"""One rank of a job that reads files with either library. Started by `test_databricks_air`, with
its arguments as JSON; prints what it did as JSON.
"""

import contextlib
import importlib
import json
import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import get_worker_info


def with_worker(path):
    return get_worker_info().id, Path(path).name


def names(paths):
    return [Path(path).name for path in paths]


def streams(data, arguments):
    """The files that each worker of this rank is given, in its order, by direct iteration."""
    dataset = data.UCVolumeDataset(arguments["path"])
    loader = TorchDataLoader(
        dataset, batch_size=None, num_workers=arguments["num_workers"], collate_fn=with_worker
    )
    found = {}
    for worker, name in loader:
        found.setdefault(worker, []).append(name)
    return found


def take(data, arguments):
    """So many batches after a state, and the state after them."""
    dataset = data.UCVolumeDataset(arguments["path"])
    num_workers = arguments["num_workers"]
    options = {} if num_workers else {"prefetch_factor": None}
    loader = data.DataLoader(
        dataset, batch_size=2, num_workers=num_workers, collate_fn=names, **options
    )
    if arguments["state"] is not None:
        loader.load_state_dict(arguments["state"])
    batches = iter(loader)
    if arguments["count"] is None:
        return {"files": [name for batch in batches for name in batch]}
    taken = [name for _ in range(arguments["count"]) for name in next(batches)]
    version = {"version": 1} if data.__name__.startswith("trainmount") else {}
    return {"files": taken, "state": loader.state_dict(**version)}


def take_of_stream(data, arguments):
    """So many files of a dataset without a loader after a state, and the state after them."""
    dataset = data.UCVolumeDataset(arguments["path"])
    if arguments["state"] is not None:
        dataset.load_state_dict(arguments["state"])
    files = iter(dataset)
    if arguments["count"] is None:
        return {"files": names(files)}
    taken = names(next(files) for _ in range(arguments["count"]))
    return {"files": taken, "state": dataset.state_dict()}


def logged(data, arguments):
    """The names of the metrics of an epoch."""
    import mlflow

    mlflow.set_tracking_uri(arguments["tracking"])
    loader = data.DataLoader(data.UCVolumeDataset(arguments["path"]), num_workers=1)
    with mlflow.start_run() as run:
        list(loader)
        mlflow.flush_async_logging()
    return sorted(mlflow.get_run(run.info.run_id).data.metrics)


def main():
    warnings.simplefilter("ignore")
    arguments = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):
        data = importlib.import_module(arguments["library"])
        if arguments["world_size"] > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{arguments['rendezvous']}",
                rank=arguments["rank"],
                world_size=arguments["world_size"],
            )
        answer = globals()[arguments["action"]](data, arguments)
    print(json.dumps(answer))


main()
