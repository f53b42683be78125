"""The digits example on the cluster: its Files API, its jobs, and what came out of them.

`Digits` is a namespace with the example's objects. Its jobs train for two epochs and can be held at
a gate (`programs/digits_gated.py`), so that no test depends on how fast training is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from rig.kubectl import Kubectl
from rig.locations import PROJECT
from rig.waiting import wait_for

__all__ = ["EXAMPLE", "GATE_STEP", "SHORT", "STEPS", "Digits", "DigitsJob"]

EXAMPLE = PROJECT / "manifests" / "examples" / "digits"
PROGRAMS = Path(__file__).resolve().parent.parent / "programs"

VOLUME = "main/default/digits"

SHORT = {"epochs": 2, "checkpoint_every_steps": 8}
"""Parameters of the jobs here; the others are the example's."""

STEPS = 46
"""Two epochs of 1,438 samples in batches of 64."""

GATE_STEP = 30
"""Where a gated job waits: two checkpoints and the end of its second epoch are still to come."""

DEADLINE_SECONDS = 600.0
"""For anything that a job does. PyTorch's start on a busy machine takes most of it."""

_LABEL = "trainmount.dev/job-name"
_ATTEMPT = "trainmount.dev/attempt"
_INDEX = "batch.kubernetes.io/job-completion-index"
_STEP = re.compile(r"^epoch \d+ step (\d+) loss", re.MULTILINE)


class Digits:
    """A namespace with a Files API server that holds the digits."""

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        self.kubectl = kubectl
        self.namespace = namespace

    @classmethod
    def create(cls, kubectl: Kubectl, namespace: str, *, node: str) -> Digits:
        """Apply the example's `files-api.yaml` in a new namespace, its pod on this node."""
        kubectl("create", "namespace", namespace)
        digits = cls(kubectl, namespace)
        # Its Secret names the server by namespace, since mount pods are in another one.
        text = (EXAMPLE / "files-api.yaml").read_text()
        objects = list(yaml.safe_load_all(text.replace(".default.svc", f".{namespace}.svc")))
        [deployment] = [item for item in objects if item["kind"] == "Deployment"]
        pod = deployment["spec"]["template"]["spec"]
        pod["nodeSelector"] = {"kubernetes.io/hostname": node}
        kubectl.apply(objects, namespace=namespace)
        code = [EXAMPLE / "train.py", PROGRAMS / "digits_gated.py"]
        data = {file.name: file.read_text() for file in code}
        digits.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "digits-gated"},
                "data": data,
            }
        )
        digits("rollout", "status", "deployment/files-api", "--timeout=300s", timeout_seconds=320)
        return digits

    def __call__(
        self, *arguments: str, stdin: str | None = None, timeout_seconds: float = 120
    ) -> str:
        """kubectl in this namespace."""
        return self.kubectl(
            "-n", self.namespace, *arguments, stdin=stdin, timeout_seconds=timeout_seconds
        )

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl.apply(list(objects), namespace=self.namespace)

    def in_server(self, *command: str, stdin: str | None = None) -> str:
        """Run a command beside the Files API server; the volume is below /data there."""
        return self("exec", "-i", "deployment/files-api", "--", *command, stdin=stdin)

    def run(
        self,
        name: str,
        *,
        gate_step: int | None = None,
        hog_step: int | None = None,
        output: str | None = None,
        compute: dict[str, Any] | None = None,
        pod_template: dict[str, Any] | None = None,
    ) -> DigitsJob:
        """Start a short job of the example; `output` is another job's name, to go on from it."""
        documents = yaml.safe_load_all((EXAMPLE / "trainingjob.yaml").read_text())
        [job] = [item for item in documents if item["kind"] == "TrainingJob"]
        job["metadata"]["name"] = name
        spec = job["spec"]
        spec["codeSource"] = {"configMap": {"name": "digits-gated"}}
        spec["command"] = spec["command"].replace("train.py", "digits_gated.py")
        spec["parameters"] |= SHORT | {"output": f"/Volumes/{VOLUME}/runs/{output or name}"}
        for key, step in (("gate_step", gate_step), ("hog_step", hog_step)):
            if step is not None:
                spec["parameters"][key] = step
        spec["compute"] |= compute or {}
        if pod_template:
            spec["podTemplate"] = pod_template
        self.apply(job)
        return DigitsJob(self, name, output=output or name, epochs=SHORT["epochs"])


class DigitsJob:
    """One TrainingJob of the example."""

    def __init__(self, digits: Digits, name: str, *, output: str, epochs: int) -> None:
        self.digits = digits
        self.name = name
        self.epochs = epochs
        self.output = f"/data/{VOLUME}/runs/{output}"
        """The output folder as the Files API server's pod sees it."""

    def status(self) -> dict[str, Any]:
        """Its `status`, empty while the operator has not seen it."""
        job = json.loads(self.digits("get", "trainingjob", self.name, "-o", "json"))
        status: dict[str, Any] = job.get("status", {})
        return status

    def attempts(self) -> list[dict[str, Any]]:
        """Its attempts as the status has them, oldest first."""
        attempts: list[dict[str, Any]] = self.status().get("attempts", [])
        return attempts

    def outcomes(self) -> list[tuple[str | None, str | None]]:
        """Outcome and reason of each attempt; None for one that goes on."""
        return [(a.get("outcome"), a.get("reason")) for a in self.attempts()]

    def patch(self, **spec: Any) -> None:
        """Change fields of its spec, as `kubectl edit` would."""
        text = json.dumps({"spec": spec})
        self.digits("patch", "trainingjob", self.name, "--type=merge", "-p", text)

    def pods(self, attempt: int) -> list[dict[str, Any]]:
        """The pods of an attempt, by node rank."""
        selector = f"{_LABEL}={self.name},{_ATTEMPT}={attempt}"
        found = json.loads(self.digits("get", "pods", "-l", selector, "-o", "json"))["items"]
        return sorted(found, key=lambda pod: int(pod["metadata"]["labels"][_INDEX]))

    def nodes(self, attempt: int) -> list[str]:
        """Where an attempt's pods are, by node rank."""
        return [pod["spec"]["nodeName"] for pod in self.pods(attempt)]

    def log(self, attempt: int, *, rank: int = 0) -> str:
        """What a node of an attempt printed so far; empty while it has not started."""
        pods = self.pods(attempt)
        if len(pods) <= rank:
            return ""
        arguments = ("-n", self.digits.namespace, "logs", pods[rank]["metadata"]["name"])
        return self.digits.kubectl.run(*arguments).stdout

    def step(self, attempt: int) -> int:
        """The newest step that an attempt's log tells of; 0 before the first."""
        steps = _STEP.findall(self.log(attempt))
        return int(steps[-1]) if steps else 0

    def wait_step(self, step: int, *, attempt: int = 0) -> int:
        """Wait until an attempt has reached `step`; return where it is."""

        def reached() -> int | None:
            at = self.step(attempt)
            if at < step:
                self.check_goes_on(attempt)
            return at if at >= step else None

        what = f"step {step} of {self.name}"
        return wait_for(what, reached, timeout_seconds=DEADLINE_SECONDS, period_seconds=0.5)

    def check_goes_on(self, attempt: int) -> None:
        """Fail at once where an attempt has ended that a test still waits for."""
        attempts = {record["number"]: record for record in self.attempts()}
        assert "outcome" not in attempts.get(attempt, {}), f"{self.name}: {attempts[attempt]}"

    def wait_attempt_ended(self, attempt: int) -> dict[str, Any]:
        """Wait until the operator has judged an attempt; return its record."""

        def ended() -> dict[str, Any] | None:
            found = [a for a in self.attempts() if a["number"] == attempt and "outcome" in a]
            return found[0] if found else None

        what = f"the end of attempt {attempt} of {self.name}"
        return wait_for(what, ended, timeout_seconds=DEADLINE_SECONDS, period_seconds=0.5)

    def open_gate(self) -> None:
        """Let a gated job go on."""
        self.digits.in_server("sh", "-c", f"mkdir -p {self.output} && touch {self.output}/go")

    def wait_succeeded(self) -> dict[str, Any]:
        """Wait for its end, which must be a good one; return the status."""

        def ended() -> dict[str, Any] | None:
            status = self.status()
            conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
            return status if conditions.get("Succeeded") in ("True", "False") else None

        what = f"the end of {self.name}"
        status = wait_for(what, ended, timeout_seconds=DEADLINE_SECONDS, period_seconds=0.5)
        [end] = [c for c in status["conditions"] if c["type"] == "Succeeded"]
        assert end["status"] == "True", f"{end['message']}\n{self._logs()}"
        return status

    def _logs(self) -> str:
        last = len(self.attempts()) - 1
        return "\n".join(self.log(last, rank=rank)[-3000:] for rank in range(2))

    def check(self) -> dict[str, Any]:
        """What the example's own check reports, once it found every sample of every epoch consumed
        exactly once."""
        arguments = ("python", "-", f"/data/{VOLUME}", self.output, str(self.epochs))
        check = (EXAMPLE / "check.py").read_text()
        # It exits with 1, which is an error here, where a sample is missing or repeated.
        report: dict[str, Any] = json.loads(self.digits.in_server(*arguments, stdin=check))
        assert report["consumed"] == [report["samples"]] * self.epochs
        return report

    def weights(self) -> str:
        """The SHA-256 of the final weights, after `check`."""
        return str(self.check()["weights_sha256"])
