"""kubectl for the rig, for tests and for a person at the shell."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rig.errors import KubectlError

__all__ = ["Kubectl"]


class Kubectl:
    """Calls kubectl on one cluster.

    `kubectl("get", "pods")` returns what it prints. Safe to use from several threads.
    """

    def __init__(self, program: Sequence[str], kubeconfig: Path) -> None:
        self.program = tuple(program)
        self.kubeconfig = kubeconfig

    def command(self, *arguments: str) -> list[str]:
        """The command line of one call."""
        return [*self.program, f"--kubeconfig={self.kubeconfig}", *arguments]

    def run(
        self, *arguments: str, stdin: str | None = None, timeout_seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end and return status and both outputs, whatever the status is."""
        return subprocess.run(
            self.command(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )

    def __call__(
        self, *arguments: str, stdin: str | None = None, timeout_seconds: float = 120
    ) -> str:
        """Return the standard output.

        Raises:
            KubectlError: the status is not 0; the text is kubectl's own.
        """
        done = self.run(*arguments, stdin=stdin, timeout_seconds=timeout_seconds)
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """Like a call with `-o json`, parsed."""
        return json.loads(self(*arguments, "-o", "json"))

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        """The items of a list, as of `get pods`."""
        items: list[dict[str, Any]] = self.json(*arguments)["items"]
        return items

    def apply(
        self,
        manifest: str | Path | dict[str, Any] | list[dict[str, Any]],
        *,
        namespace: str = "default",
    ) -> str:
        """Apply a file, YAML text, an object or several; `namespace` is for those that name
        none."""
        if isinstance(manifest, Path):
            return self("apply", "-n", namespace, "-f", str(manifest))
        if isinstance(manifest, list):
            manifest = {"apiVersion": "v1", "kind": "List", "items": manifest}
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        return self("apply", "-n", namespace, "-f", "-", stdin=text)
