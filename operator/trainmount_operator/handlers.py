"""kopf's part: watching. Every event of a job or a child asks the work queue to look at the job.

The only module that imports kopf, called by `main`. There are event handlers only, so kopf keeps no
progress of its own: no annotation, no finalizer, no write. Objects that exist at the start arrive
as events too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any, Final

import kopf

from trainmount_operator import labels
from trainmount_operator.reconcile import Reconciler
from trainmount_operator.spec import GROUP, KIND, PLURAL, VERSION
from trainmount_operator.workqueue import Workqueue

__all__ = ["run"]

# The pods of a gang change together: one look for all of them.
_GATHER_SECONDS: Final = 0.1


async def run(
    reconciler: Reconciler,
    *,
    namespaces: tuple[str, ...],
    stop: asyncio.Event,
    ready: asyncio.Event | None = None,
    liveness: str | None = None,
) -> None:
    """Watch and reconcile until `stop` is set.

    `namespaces` empty means all. `ready` is set once the watches are up; `liveness` is an HTTP URL
    to answer probes at.
    """
    queue = Workqueue(reconciler.reconcile)
    registry = kopf.OperatorRegistry()
    _register(registry, queue)
    try:
        await kopf.operator(
            registry=registry,
            settings=_settings(),
            # kopf's own would ask for the user's name, which a container's uid need not have.
            identity=socket.gethostname(),  # type: ignore[arg-type]
            namespaces=namespaces,
            clusterwide=not namespaces,
            standalone=True,
            stop_flag=stop,
            ready_flag=ready,
            liveness_endpoint=liveness,
        )
    finally:
        await queue.close()


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # The kind was installed before this process: no right to watch namespaces and CRDs is needed.
    settings.scanning.disabled = True
    # Selected by the server: the cluster's other pods never reach this process.
    managed = f"{labels.MANAGED_BY}={labels.MANAGED_BY_VALUE}"
    settings.watching.label_selectors["", "v1", "pods"] = managed
    settings.watching.label_selectors["batch", "v1", "jobs"] = managed
    return settings


def _register(registry: kopf.OperatorRegistry, queue: Workqueue) -> None:
    @kopf.on.login(registry=registry)
    async def on_login(**arguments: Any) -> kopf.ConnectionInfo | None:
        # The same credentials as `cluster.connect()`, fetched again when they expire.
        return await asyncio.to_thread(kopf.login_via_client, **arguments)

    @kopf.on.event(GROUP, VERSION, PLURAL, id="job", registry=registry)
    async def on_job(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            queue.add((namespace, name))

    async def on_child(body: Mapping[str, Any], namespace: str | None, **_: Any) -> None:
        owner = _owner(body)
        if namespace and owner:
            queue.add((namespace, owner), _GATHER_SECONDS)

    managed = {labels.MANAGED_BY: labels.MANAGED_BY_VALUE}
    kopf.on.event("batch", "v1", "jobs", id="child", labels=managed, registry=registry)(on_child)

    async def on_pod(body: Mapping[str, Any], namespace: str | None, **_: Any) -> None:
        # A pod's owner is its Job; the job is known by name.
        job_name = (body["metadata"].get("annotations") or {}).get(labels.JOB_ANNOTATION)
        if namespace and job_name:
            queue.add((namespace, job_name), _GATHER_SECONDS)

    kopf.on.event("", "v1", "pods", id="pod", labels=managed, registry=registry)(on_pod)


def _owner(body: Mapping[str, Any]) -> str | None:
    for reference in body["metadata"].get("ownerReferences") or ():
        if reference["kind"] == KIND and reference["apiVersion"].startswith(f"{GROUP}/"):
            return str(reference["name"])
    return None
