"""Small builders for the objects that tests of the cluster apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rig.under_test import GPU

__all__ = ["configmap", "headless_service", "pod"]


def configmap(name: str, *files: Path) -> dict[str, Any]:
    """A ConfigMap whose keys are the files' names."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {file.name: file.read_text() for file in files},
    }


def headless_service(name: str, **selector: str) -> dict[str, Any]:
    """A Service that gives each selected pod a name, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }


def pod(
    name: str,
    image: str,
    *command: str,
    gpus: int = 0,
    container: dict[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod with one container that runs once. `container` and `spec` add fields to either."""
    limits = {"limits": {GPU: gpus}} if gpus else {}
    main = {"name": "main", "image": image, "command": list(command), "resources": limits}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [main | (container or {})],
            **spec,
        },
    }
