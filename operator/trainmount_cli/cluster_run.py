"""Jobs on a cluster: submit, show, cancel. Called by the commands, which import it only then."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Final

from trainmount_cli.cluster import ClusterApi, connect
from trainmount_cli.code_pack import pack_code
from trainmount_cli.documents import load_job_file
from trainmount_cli.errors import EXIT_FAILED, CliError
from trainmount_cli.output import Output, print_data, print_line, timestamp
from trainmount_cli.summary import describe
from trainmount_operator.status import JobStatus

__all__ = [
    "cancel_job",
    "describe_document",
    "describe_job",
    "describe_jobs",
    "get_job",
    "show_logs",
    "submit",
]

CANCELLED_ANNOTATION: Final = "trainmount.dev/cancelled"
"""When a person cancelled the job; it is suspended since."""

_GONE_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.5
_ENDED_WORDS: Final = frozenset({"SUCCESS", "FAILED", "CANCELED", "TIMEDOUT"})


def submit(
    path: Path,
    overrides: list[str],
    *,
    namespace: str | None,
    context: str | None,
    watch: bool,
    dry_run: bool,
    output: Output,
) -> int:
    """Apply what the file holds, pack its code, create the job; the exit status."""
    file = load_job_file(path, overrides)
    for notice in file.job.notices:
        print(f"trainmount: {notice}", file=sys.stderr)
    for document in file.others:
        kind = document.get("kind")
        if not ClusterApi.knows(str(kind)) or kind in ("TrainingJob", "Pod"):
            raise CliError(f"{path}: a document of kind {kind}: apply it with kubectl")
    code, manifest = pack_code(file)
    api = connect(namespace=namespace or file.job.namespace, context=context)
    name = file.job.name
    if dry_run:
        _report(output, "DRY_RUN_OK", None, f"{name} is valid", is_dry=True)
        return 0
    _make_room(api, name)
    for document in (*file.others, *([code] if code else [])):
        api.apply(_in_namespace(document, api.namespace))
    created = api.create(_in_namespace(manifest, api.namespace))
    if code is not None:
        _give_to(api, code, created)
    if not watch:
        way = f"follow it: trainmount logs {name} -n {api.namespace} -f"
        _report(output, "PENDING", name, f"{name} is submitted; {way}")
        return 0
    if output is Output.JSON:
        print_line({"type": "SUBMITTED", "ts": timestamp(), "run_id": name})
    from trainmount_cli.cluster_logs import watch_job

    return watch_job(api, name, output)


def show_logs(
    name: str,
    *,
    follow: bool,
    node: int | None,
    attempt: int | None,
    namespace: str | None,
    context: str | None,
    output: Output,
) -> int:
    """Print a job's output; the exit status."""
    from trainmount_cli.cluster_logs import print_logs, watch_job

    api = connect(namespace=namespace, context=context)
    if follow:
        return watch_job(api, name, output, node=node, first_attempt=attempt)
    return print_logs(api, name, output, node=node, attempt=attempt)


def get_job(api: ClusterApi, name: str) -> dict[str, Any]:
    """Raises CliError."""
    document = api.find("TrainingJob", name)
    if document is None:
        message = f"there is no TrainingJob {name!r} in the namespace {api.namespace}"
        raise CliError(message, code="NOT_FOUND")
    return document


def describe_job(name: str, *, namespace: str | None, context: str | None) -> dict[str, Any]:
    """What `get` shows."""
    api = connect(namespace=namespace, context=context)
    return describe_document(get_job(api, name))


def describe_jobs(*, namespace: str | None, context: str | None) -> list[dict[str, Any]]:
    """What `list` shows, newest first."""
    documents = connect(namespace=namespace, context=context).list("TrainingJob")
    documents.sort(key=lambda d: str(d["metadata"].get("creationTimestamp")), reverse=True)
    return [describe_document(document) for document in documents]


def describe_document(document: dict[str, Any]) -> dict[str, Any]:
    name = document["metadata"]["name"]
    status = JobStatus.from_document(document.get("status") or {})
    described = describe(name, name, status, experiment=document["spec"]["experimentName"])
    if _is_cancelled(document) and described["status"] not in _ENDED_WORDS:
        described["status"] = "CANCELED"
    return described


def cancel_job(name: str, *, namespace: str | None, context: str | None) -> None:
    """Stop the job's pods; the object, its status and the volumes stay. Raises CliError."""
    api = connect(namespace=namespace, context=context)
    described = describe_document(get_job(api, name))
    if described["status"] in _ENDED_WORDS:
        message = f"{name} has ended already: {described['status']}"
        raise CliError(message, code="CONFLICT", exit_status=EXIT_FAILED)
    change = {
        "metadata": {"annotations": {CANCELLED_ANNOTATION: timestamp()}},
        "spec": {"suspend": True},
    }
    api.patch("TrainingJob", name, change)


def _make_room(api: ClusterApi, name: str) -> None:
    """Remove an ended job of the same name; one that is not over is in the way."""
    document = api.find("TrainingJob", name)
    if document is None:
        return
    word = describe_document(document)["status"]
    if word not in _ENDED_WORDS:
        raise CliError(
            f"{name} exists in the namespace {api.namespace} and is {word}; cancel it first, or "
            "use another name",
            code="CONFLICT",
            exit_status=EXIT_FAILED,
        )
    api.delete("TrainingJob", name)
    deadline = time.monotonic() + _GONE_SECONDS
    while api.find("TrainingJob", name) is not None:
        if time.monotonic() > deadline:
            message = f"the ended job {name} does not go away"
            raise CliError(message, code="INTERNAL_ERROR", exit_status=EXIT_FAILED)
        time.sleep(_POLL_SECONDS)


def _is_cancelled(document: dict[str, Any]) -> bool:
    annotations = document["metadata"].get("annotations") or {}
    return CANCELLED_ANNOTATION in annotations and bool(document["spec"].get("suspend"))


def _in_namespace(document: dict[str, Any], namespace: str) -> dict[str, Any]:
    return document | {"metadata": document["metadata"] | {"namespace": namespace}}


def _give_to(api: ClusterApi, config_map: dict[str, Any], job: dict[str, Any]) -> None:
    """Let the packed code go when the job goes."""
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
    }
    metadata = config_map["metadata"] | {"ownerReferences": [owner]}
    api.apply(_in_namespace(config_map | {"metadata": metadata}, api.namespace))


def _report(
    output: Output, status: str, run_id: str | None, sentence: str, *, is_dry: bool = False
) -> None:
    if output is Output.JSON:
        print_data({"status": status, "dry_run": is_dry, "run_id": run_id})
    else:
        print(sentence)
