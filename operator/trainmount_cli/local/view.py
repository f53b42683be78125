"""Prints a run of this machine: as it goes (`run --watch`, `logs -f`) and as it stands (`get`)."""

from __future__ import annotations

from typing import Any

from trainmount_cli.errors import EXIT_FAILED
from trainmount_cli.interrupts import detachable
from trainmount_cli.local.follow import EventNote, LogLine, follow
from trainmount_cli.local.store import RunFolder
from trainmount_cli.output import Output, print_data, print_line, timestamp
from trainmount_cli.summary import describe, is_success, progress_line, status_word
from trainmount_operator.status import JobStatus

__all__ = ["describe_run", "exit_status", "run_status", "watch"]


def run_status(folder: RunFolder) -> JobStatus:
    return JobStatus.from_document(folder.read_status())


def describe_run(folder: RunFolder) -> dict[str, Any]:
    """What `get` shows; `pids`, `server` and the folder besides what a cluster's job has."""
    is_alive = folder.is_alive()
    document = folder.read_status()
    manifest = folder.read_spec()["manifest"]
    described = describe(
        folder.run_id,
        manifest["metadata"]["name"],
        JobStatus.from_document(document),
        experiment=manifest["spec"]["experimentName"],
        is_alive=is_alive,
    )
    described["attempts"] = document.get("attempts", [])
    described["folder"] = str(folder.path)
    described["data_directory"] = folder.read_spec()["dataDirectory"]
    described["server_url"] = document.get("server", {}).get("url")
    described["pids"] = document.get("pids", {}) if is_alive else {}
    return described


def exit_status(folder: RunFolder) -> int:
    """0 only for a job that succeeded."""
    return 0 if is_success(run_status(folder)) else EXIT_FAILED


def watch(
    folder: RunFolder,
    output: Output,
    *,
    skip_events: int = 0,
    first_attempt: int = 0,
    node: int | None = None,
) -> int:
    """Print what a run does until it has ended; its exit status. Ctrl-C leaves it running."""
    printer = _Printer(output, node)
    with detachable(f"run {folder.run_id}", f"trainmount logs --local {folder.run_id} -f"):
        for item in follow(
            folder,
            skip_events=skip_events,
            first_attempt=first_attempt,
            on_status=printer.see_status,
        ):
            printer.show(item)
    status = run_status(folder)
    word = status_word(status, is_alive=False)
    if output is Output.JSON:
        print_data(describe_run(folder))
    else:
        print(f"{folder.run_id}: {word}: {progress_line(status)}", flush=True)
        if word == "INTERRUPTED":
            print(f"go on with it: trainmount run --local --resume {folder.run_id}", flush=True)
    return exit_status(folder)


class _Printer:
    """Lines on a terminal, or JSON lines."""

    def __init__(self, output: Output, node: int | None) -> None:
        self._output = output
        self._node = node
        self._word = ""

    def show(self, item: LogLine | EventNote) -> None:
        if isinstance(item, LogLine):
            if self._node in (None, item.node):
                self._show_line(item)
        elif self._output is Output.TEXT:
            print(f"-- {item.message}", flush=True)

    def see_status(self, document: dict[str, Any]) -> None:
        word = status_word(JobStatus.from_document(document))
        if word != self._word and self._output is Output.JSON:
            event = {"type": "STATUS", "status": word, "previous_status": self._word or None}
            print_line(event | {"ts": timestamp()})
        self._word = word

    def _show_line(self, line: LogLine) -> None:
        if self._output is Output.TEXT:
            print(f"[node {line.node}] {line.text}", flush=True)
        else:
            event = {"type": "LOG", "attempt": line.attempt, "node": line.node, "line": line.text}
            print_line(event | {"ts": timestamp()})
