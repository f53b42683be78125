"""The output of a job's pods, through its attempts until it ends. Called by `cluster_run`.

One thread follows one pod. A stream that breaks is taken up again after the last line that was
told: every line has the time at which the container runtime got it.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

from trainmount_cli.cluster import ClusterApi
from trainmount_cli.errors import EXIT_FAILED, CliError
from trainmount_cli.interrupts import detachable
from trainmount_cli.output import Output, print_data, print_line, timestamp
from trainmount_operator.labels import ATTEMPT, COMPLETION_INDEX, CONTAINER_NAME, job_selector

__all__ = ["print_logs", "watch_job"]

_POLL_SECONDS: Final = 1.0
_MAX_STREAM_FAILURES: Final = 5
_ENDED_WORDS: Final = frozenset({"SUCCESS", "FAILED", "CANCELED", "TIMEDOUT"})


@dataclass(frozen=True, slots=True)
class _Line:
    attempt: int
    node: int
    text: str


def watch_job(
    api: ClusterApi,
    name: str,
    output: Output,
    *,
    node: int | None = None,
    first_attempt: int | None = None,
) -> int:
    """Print what a job does until it has ended; its exit status. Ctrl-C leaves it running."""
    watcher = _Watcher(api, name, output, node=node, first_attempt=first_attempt or 0)
    with detachable(f"job {name}", f"trainmount logs {name} -n {api.namespace} -f"):
        described = watcher.run()
    if output is Output.JSON:
        print_data(described)
    else:
        print(f"{name}: {described['status']}: {described['message']}", flush=True)
    return 0 if described["status"] == "SUCCESS" else EXIT_FAILED


def print_logs(
    api: ClusterApi, name: str, output: Output, *, node: int | None, attempt: int | None
) -> int:
    """Print what the pods of one attempt, or of all, have said so far, and how they ended."""
    from trainmount_cli.cluster_run import describe_document, get_job

    described = describe_document(get_job(api, name))
    pods = [_Pod(document) for document in api.list("Pod", labels=job_selector(name))]
    chosen = [p for p in pods if attempt in (None, p.attempt) and node in (None, p.node)]
    printer = _Printer(output)
    for pod in sorted(chosen, key=lambda pod: (pod.attempt, pod.node)):
        if not pod.has_started:
            continue
        for raw in api.stream_log(pod.name, CONTAINER_NAME, follow=False):
            printer.line(_Line(pod.attempt, pod.node, _split(raw)[1]))
        if pod.exit_code is not None:
            printer.exit(pod.attempt, pod.node, pod.exit_code)
    if not printer.has_printed:
        reasons = [pod.reason for pod in chosen if pod.reason] or [described["message"]]
        raise CliError(f"no output: {reasons[0] or 'no pod has started'}", code="NOT_FOUND")
    return 0


class _Pod:
    """What matters of a pod."""

    def __init__(self, document: dict[str, Any]) -> None:
        metadata = document["metadata"]
        labels = metadata.get("labels") or {}
        self.name: str = metadata["name"]
        self.uid: str = metadata["uid"]
        self.attempt = int(labels.get(ATTEMPT, 0))
        self.node = int(labels.get(COMPLETION_INDEX, 0))
        statuses = document.get("status", {}).get("containerStatuses") or []
        own: dict[str, Any] = next((s for s in statuses if s.get("name") == CONTAINER_NAME), {})
        state = own.get("state") or {}
        self.has_started = "running" in state or "terminated" in state
        self.has_ended = "terminated" in state
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        self.exit_code: int | None = ended.get("exitCode")
        self.reason = _reason(waiting, ended)


def _reason(waiting: dict[str, Any], ended: dict[str, Any]) -> str:
    """Why there is no output."""
    if ended:
        code = ended.get("exitCode")
        return f"the container ended with exit code {code} ({ended.get('reason', 'Error')})"
    if waiting:
        message = waiting.get("message") or ""
        return f"the container waits: {waiting.get('reason', '')} {message}".strip()
    return ""


class _Watcher:
    """Follows every pod of a job as it comes."""

    def __init__(
        self, api: ClusterApi, name: str, output: Output, *, node: int | None, first_attempt: int
    ) -> None:
        self._api = api
        self._name = name
        self._output = output
        self._node = node
        self._first_attempt = first_attempt
        self._lines: queue.SimpleQueue[_Line] = queue.SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}
        self._told = ("", "")
        self._printer = _Printer(output)

    def run(self) -> dict[str, Any]:
        """Until the job has ended and every line is told; what `get` would show then."""
        from trainmount_cli.cluster_run import describe_document, get_job

        while True:
            described = describe_document(get_job(self._api, self._name))
            self._follow_new_pods()
            self._tell(described)
            is_over = described["status"] in _ENDED_WORDS
            self._print_lines(until_silent=is_over)
            if is_over:
                return described

    def _follow_new_pods(self) -> None:
        for document in self._api.list("Pod", labels=job_selector(self._name)):
            pod = _Pod(document)
            is_wanted = pod.attempt >= self._first_attempt and self._node in (None, pod.node)
            if is_wanted and pod.has_started and pod.uid not in self._threads:
                thread = threading.Thread(target=self._follow, args=(pod,), daemon=True)
                self._threads[pod.uid] = thread
                thread.start()

    def _follow(self, pod: _Pod) -> None:
        last, failures = "", 0
        while failures < _MAX_STREAM_FAILURES:
            try:
                stream = self._api.stream_log(
                    pod.name, CONTAINER_NAME, follow=True, since=last[:19] + "Z" if last else None
                )
                for raw in stream:
                    moment, text = _split(raw)
                    # Asked for whole seconds, so the first lines may have been told already.
                    if moment > last:
                        self._lines.put(_Line(pod.attempt, pod.node, text))
                        last, failures = moment, 0
            except CliError as error:
                if error.code == "NOT_FOUND":
                    return  # the pod is gone, and what it had not sent with it
                failures += 1
                time.sleep(_POLL_SECONDS)
                continue
            return

    def _print_lines(self, *, until_silent: bool) -> None:
        deadline = time.monotonic() + _POLL_SECONDS
        while True:
            is_alive = any(thread.is_alive() for thread in self._threads.values())
            if until_silent and not is_alive and self._lines.empty():
                return
            if not until_silent and time.monotonic() >= deadline:
                return
            try:
                self._printer.line(self._lines.get(timeout=0.1))
            except queue.Empty:
                continue

    def _tell(self, described: dict[str, Any]) -> None:
        now = (described["status"], described["message"])
        if now == self._told:
            return
        before, self._told = self._told[0], now
        if self._output is Output.JSON:
            event = {"type": "STATUS", "status": now[0], "previous_status": before or None}
            print_line(event | {"ts": timestamp()})
        else:
            print(f"-- {now[0]}: {now[1]}" if now[1] else f"-- {now[0]}", flush=True)


def _split(raw: bytes) -> tuple[str, str]:
    """The time of a line and its text."""
    moment, _, text = raw.decode("utf-8", errors="replace").partition(" ")
    return moment, text


class _Printer:
    """Prints lines, and in text where the lines of another attempt begin."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._attempt = 0
        self.has_printed = False

    def line(self, line: _Line) -> None:
        if self._output is Output.JSON:
            event = {"type": "LOG", "attempt": line.attempt, "node": line.node, "line": line.text}
            print_line(event | {"ts": timestamp()})
        else:
            self._begin(line.attempt)
            print(f"[node {line.node}] {line.text}", flush=True)
        self.has_printed = True

    def exit(self, attempt: int, node: int, code: int) -> None:
        """How a node ended."""
        if self._output is Output.JSON:
            event = {"type": "EXIT", "attempt": attempt, "node": node, "exit_code": code}
            print_line(event | {"ts": timestamp()})
        elif self.has_printed:
            self._begin(attempt)
            print(f"-- node {node} ended with exit code {code}", flush=True)

    def _begin(self, attempt: int) -> None:
        if attempt != self._attempt:
            self._attempt = attempt
            print(f"-- attempt {attempt}", flush=True)
