"""The API server: the few requests the operator makes, on documents.

The only module that talks to it for reading and writing (kopf has its own watches). Called by
`observe`, `apply` and `reconcile`, from worker threads; one instance is safe to share. The official
client supplies hosts, certificates and tokens; requests go through urllib3 on plain documents,
which cost a tenth of its models and look the same in a test.

ClusterError                 a request was answered with an error
+-- NotFound                 404
+-- Conflict                 409: exists already, or another version than ours
+-- Refused                  400, 403, 422: asking again does not help; the message is the server's
+-- Unavailable              429, 5xx or no answer: asking again may help
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import urllib3
from kubernetes import client, config

__all__ = [
    "Cluster",
    "ClusterError",
    "Conflict",
    "NotFound",
    "Refused",
    "Unavailable",
    "connect",
]

_TIMEOUT: Final = urllib3.Timeout(connect=5, read=30)
_PAGE_SIZE: Final = 500

# The path of each kind's collection, without the namespace.
_COLLECTIONS: Final = {
    "ConfigMap": ("api/v1", "configmaps"),
    "Event": ("api/v1", "events"),
    "Job": ("apis/batch/v1", "jobs"),
    "Pod": ("api/v1", "pods"),
    "Service": ("api/v1", "services"),
    "TrainingJob": ("apis/trainmount.dev/v1alpha1", "trainingjobs"),
}

Document = dict[str, Any]


class ClusterError(Exception):
    """A request was answered with an error. `str()` is one line for a person."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(status_code, message)
        self.status_code = status_code
        self.message = message

    def __str__(self) -> str:
        return self.message


class NotFound(ClusterError):
    """Nothing of that name."""


class Conflict(ClusterError):
    """It exists already, or it is another version or uid than the caller's."""


class Refused(ClusterError):
    """The server does not accept the request; a second try gets the same answer."""


class Unavailable(ClusterError):
    """Overloaded, broken or unreachable; a second try may succeed."""


class Cluster:
    """Requests to one API server."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._configuration = configuration
        tls: dict[str, Any] = {
            "ca_certs": configuration.ssl_ca_cert,
            "cert_file": configuration.cert_file,
            "key_file": configuration.key_file,
            "cert_reqs": "CERT_REQUIRED" if configuration.verify_ssl else "CERT_NONE",
        }
        self._pool = urllib3.PoolManager(
            maxsize=16,
            timeout=_TIMEOUT,
            retries=False,
            **(tls if configuration.host.startswith("https") else {}),
        )

    def get(self, kind: str, namespace: str, name: str) -> Document:
        """One object. Raises: NotFound."""
        return self._request("GET", _path(kind, namespace, name))

    def check_kind(self, api_version: str, plural: str) -> None:
        """Make sure that the cluster answers and serves this kind.

        Raises:
            NotFound: the CRD is missing; the message says so.
        """
        try:
            resources = self._request("GET", f"/apis/{api_version}").get("resources") or ()
        except NotFound:
            resources = ()
        if not any(resource["name"] == plural for resource in resources):
            raise NotFound(
                404, f"the cluster serves no {plural} of {api_version}: install manifests/crd.yaml"
            )

    def get_node(self, name: str) -> Document:
        """One node. Raises: NotFound."""
        return self._request("GET", f"/api/v1/nodes/{quote(name)}")

    def list(
        self, kind: str, namespace: str, *, labels: str = "", fields: str = ""
    ) -> list[Document]:
        """All objects that match both selectors, read page by page."""
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(_PAGE_SIZE)}
        items: list[Document] = []
        while True:
            page = self._request("GET", _path(kind, namespace), query=query)
            items += page.get("items") or []
            token = page.get("metadata", {}).get("continue")
            if not token:
                return items
            query["continue"] = token

    def create(self, manifest: Document) -> Document:
        """The created object. Raises: Conflict if the name is taken."""
        path = _path(manifest["kind"], manifest["metadata"]["namespace"])
        return self._request("POST", path, body=manifest)

    def patch(self, kind: str, namespace: str, name: str, change: Document) -> Document:
        """Apply a merge patch. Raises: NotFound, Conflict if it names another resourceVersion."""
        return self._request("PATCH", _path(kind, namespace, name), body=change)

    def patch_status(self, kind: str, namespace: str, name: str, change: Document) -> Document:
        """Apply a merge patch to the status sub-resource. Raises: NotFound, Conflict."""
        return self._request("PATCH", f"{_path(kind, namespace, name)}/status", body=change)

    def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_period_seconds: int | None = None,
    ) -> None:
        """Delete this very object and, in the background, what it owns.

        Raises: NotFound, Conflict if it is another object by now.
        """
        options: Document = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_period_seconds is not None:
            options["gracePeriodSeconds"] = grace_period_seconds
        self._request("DELETE", _path(kind, namespace, name), body=options)

    def delete_collection(self, kind: str, namespace: str, *, labels: str) -> None:
        """Delete all objects that match the selector, which must not be empty."""
        assert labels
        self._request("DELETE", _path(kind, namespace), query={"labelSelector": labels})

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
    ) -> Document:
        headers = {"Accept": "application/json"}
        settings: Mapping[str, Any] = self._configuration.auth_settings()
        for setting in settings.values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            merge = "application/merge-patch+json"
            headers["Content-Type"] = merge if method == "PATCH" else "application/json"
        wanted = {key: value for key, value in (query or {}).items() if value}
        url = self._configuration.host.rstrip("/") + path
        if wanted:
            url += "?" + "&".join(f"{key}={quote(value)}" for key, value in wanted.items())
        try:
            response = self._pool.request(method, url, body=content, headers=headers)
        except urllib3.exceptions.HTTPError as error:
            raise Unavailable(0, f"{method} {path}: no answer ({type(error).__name__})") from error
        document = _document(response.data)
        if response.status >= 400:
            message = document.get("message") or f"{method} {path}: HTTP {response.status}"
            raise _error_type(response.status)(response.status, message)
        return document


def connect() -> Cluster:
    """The cluster this process runs in, otherwise the current context of the kubeconfig.

    Raises:
        kubernetes.config.ConfigException: neither can be used; the message names the file.
    """
    configuration = client.Configuration()
    load_in_cluster: Any = config.load_incluster_config  # untyped in the client
    load_file: Any = config.load_kube_config
    try:
        load_in_cluster(client_configuration=configuration)
    except config.ConfigException:
        file = os.environ.get("KUBECONFIG") or "~/.kube/config"
        try:
            load_file(config_file=file, client_configuration=configuration)
        except Exception as error:
            # Whatever a malformed file makes the client stumble over: it checks little itself.
            problem = " ".join(str(error).split()) or type(error).__name__
            raise config.ConfigException(
                f"not in a pod, and kubeconfig {file}: {problem}"
            ) from error
    return Cluster(configuration)


def _path(kind: str, namespace: str, name: str = "") -> str:
    group, plural = _COLLECTIONS[kind]
    path = f"/{group}/namespaces/{quote(namespace)}/{plural}"
    return f"{path}/{quote(name)}" if name else path


def _document(data: bytes) -> Document:
    try:
        document = json.loads(data)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _error_type(status_code: int) -> type[ClusterError]:
    if status_code == 404:
        return NotFound
    if status_code == 409:
        return Conflict
    return Unavailable if status_code == 429 or status_code >= 500 else Refused
