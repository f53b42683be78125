"""From `kubectl apply` of a TrainingJob until both its pods run, against a bare Indexed Job.

The bare Job has the very pod of the TrainingJob, taken from a run before, so the difference is the
operator's. With a volume, both have it, and the kubelet calls the driver for both.

Runs where `--cluster` is given: on the cluster of KUBECONFIG, where the chart has to be installed,
or on a rig of tests/cluster, which is made for it and taken down.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apply_objects import (
    NAMESPACE,
    Cluster,
    bare_job,
    files_api_objects,
    training_job,
)
from measure import Comparison, Sample, compare, say, take_turns
from topics import Setting, as_seconds

__all__ = ["run"]

_PROJECT = Path(__file__).resolve().parent.parent
_RIG = f"benchmark-{os.getpid()}"
_POLL_SECONDS = 0.02
_DEADLINE_SECONDS = 300.0


def run(setting: Setting) -> list[Comparison]:
    if not setting.cluster:
        say("apply_to_pods: left out, because it needs a Kubernetes: give --cluster")
        return []
    with _kubeconfig() as kubeconfig, Cluster.namespace(kubeconfig) as cluster:
        cluster.create(*files_api_objects())
        cluster.wait_for_deployment("files-api", _DEADLINE_SECONDS)
        plain = _samples(setting, cluster, with_volume=False)
        volume = _samples(setting, cluster, with_volume=True)
    what = "apply a TrainingJob until both its pods run"
    peer = "an Indexed Job with the same pod"
    lines = [
        compare(f"{what}, no volume", peer, *plain, as_seconds),
        compare(f"{what}, with a volume", f"{peer} and volume", *volume, as_seconds),
        compare(
            f"{what}, with a volume",
            "the same TrainingJob without",
            volume[0],
            plain[0],
            as_seconds,
        ),
    ]
    return [_without_memory(line) for line in lines]


def _samples(
    setting: Setting, cluster: Cluster, *, with_volume: bool
) -> tuple[list[Sample], list[Sample]]:
    kind = "volume" if with_volume else "plain"
    # The first one is not counted: it gives the pod, and what happens only once on each node.
    model = f"{kind}-model"
    cluster.create(training_job(model, with_volume=with_volume))
    _wait_running(cluster, f"{model}-0")
    template = cluster.pod_template(f"{model}-0")
    cluster.delete_training_job(model, _DEADLINE_SECONDS)

    def of_training_job(number: int) -> Sample:
        name = f"{kind}-{number}"
        manifest = training_job(name, with_volume=with_volume)
        seconds = _timed(cluster, manifest, f"{name}-0")
        cluster.delete_training_job(name, _DEADLINE_SECONDS)
        return Sample(seconds=seconds, peak_mib=0.0)

    def of_bare_job(number: int) -> Sample:
        name = f"{kind}-bare-{number}"
        seconds = _timed(cluster, bare_job(name, template), name)
        cluster.delete_job(name, _DEADLINE_SECONDS)
        return Sample(seconds=seconds, peak_mib=0.0)

    # The pod's ConfigMap goes with the TrainingJob that it was made for; a copy stays.
    cluster.create(*template.needed)
    sides: dict[str, Callable[[int], Sample]] = {
        f"TrainingJob, {kind}": of_training_job,
        f"bare Job, {kind}": of_bare_job,
    }
    ours, theirs = take_turns(sides, setting.repeats).values()
    return ours, theirs


def _timed(cluster: Cluster, manifest: dict[str, Any], job_name: str) -> float:
    began = time.perf_counter()
    cluster.create(manifest)
    _wait_running(cluster, job_name)
    return time.perf_counter() - began


def _wait_running(cluster: Cluster, job_name: str) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while True:
        phases = cluster.pod_phases(job_name)
        # A program as short as `true` may have ended before it was seen running.
        if len(phases) == 2 and all(phase in ("Running", "Succeeded") for phase in phases):
            return
        if "Failed" in phases or time.monotonic() > deadline:
            raise RuntimeError(f"pods of {job_name} do not run: {cluster.describe(job_name)}")
        time.sleep(_POLL_SECONDS)


@contextmanager
def _kubeconfig() -> Iterator[Path]:
    given = os.environ.get("KUBECONFIG")
    if given:
        yield Path(given)
        return
    rig = [sys.executable, str(_PROJECT / "tests" / "cluster")]
    try:
        # Progress goes to the error output, the place of the kubeconfig to the other.
        started = subprocess.run(
            [*rig, "up", "--name", _RIG], stdout=subprocess.PIPE, text=True, check=True
        )
        kubeconfig = Path(started.stdout.strip().removeprefix("export KUBECONFIG="))
        _install_chart(kubeconfig)
        yield kubeconfig
    finally:
        subprocess.run([*rig, "down", "--name", _RIG], check=False)


def _install_chart(kubeconfig: Path) -> None:
    import helm_python

    say("  installing the chart")
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE) as config:
        config.install(
            _PROJECT / "charts" / "trainmount",
            "trainmount",
            namespace=NAMESPACE,
            create_namespace=True,
            wait="watcher",
            timeout=180,
        )


def _without_memory(line: Comparison) -> Comparison:
    return Comparison(
        what=line.what,
        against=line.against,
        ratios=line.ratios,
        here=line.here,
        memory="–",  # noqa: RUF001
    )
