"""The API server, as the command line needs it. The only module here that talks to it.

The official client reads the kubeconfig and keeps credentials fresh; requests are plain documents
over urllib3, so that logs can be streamed and answers look the same in tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import urllib3

from trainmount_cli.errors import EXIT_FAILED, EXIT_USAGE, CliError

if TYPE_CHECKING:
    from kubernetes import client

__all__ = ["FIELD_MANAGER", "ClusterApi", "connect"]

Document = dict[str, Any]

FIELD_MANAGER: Final = "trainmount-cli"

_TIMEOUT: Final = urllib3.Timeout(connect=10, read=60)
_PAGE_SIZE: Final = "500"
_STREAM_BYTES: Final = 64 * 1024

_COLLECTIONS: Final = {
    "ConfigMap": "api/v1/namespaces/{}/configmaps",
    "Secret": "api/v1/namespaces/{}/secrets",
    "Pod": "api/v1/namespaces/{}/pods",
    "PersistentVolumeClaim": "api/v1/namespaces/{}/persistentvolumeclaims",
    "TrainingJob": "apis/trainmount.dev/v1alpha1/namespaces/{}/trainingjobs",
}

_CODES: Final = {401: "UNAUTHENTICATED", 403: "UNAUTHENTICATED", 404: "NOT_FOUND", 409: "CONFLICT"}


class ClusterApi:
    """Requests to one API server, in one namespace. Any thread."""

    def __init__(self, configuration: client.Configuration, namespace: str) -> None:
        self.namespace = namespace
        self._configuration = configuration
        tls: dict[str, Any] = {
            "ca_certs": configuration.ssl_ca_cert,
            "cert_file": configuration.cert_file,
            "key_file": configuration.key_file,
            "cert_reqs": "CERT_REQUIRED" if configuration.verify_ssl else "CERT_NONE",
        }
        is_tls = configuration.host.startswith("https")
        self._pool = urllib3.PoolManager(
            maxsize=16, timeout=_TIMEOUT, retries=False, **(tls if is_tls else {})
        )

    @staticmethod
    def knows(kind: str) -> bool:
        return kind in _COLLECTIONS

    def find(self, kind: str, name: str) -> Document | None:
        """One object, or None."""
        try:
            return self._json("GET", self._path(kind, name))
        except CliError as error:
            if error.code == "NOT_FOUND":
                return None
            raise

    def list(self, kind: str, *, labels: str = "") -> list[Document]:
        """All objects with these labels, read page by page."""
        query = {"limit": _PAGE_SIZE} | ({"labelSelector": labels} if labels else {})
        items: list[Document] = []
        while True:
            page = self._json("GET", self._path(kind), query=query)
            items += page.get("items") or []
            token = page.get("metadata", {}).get("continue")
            if not token:
                return items
            query["continue"] = token

    def create(self, document: Document) -> Document:
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return self._json("POST", self._path(document["kind"]), query=query, body=document)

    def apply(self, document: Document) -> Document:
        """Server-side apply: make the object be as the document says."""
        path = self._path(document["kind"], document["metadata"]["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        content_type = "application/apply-patch+yaml"
        return self._json("PATCH", path, query=query, body=document, content_type=content_type)

    def patch(self, kind: str, name: str, change: Document) -> Document:
        """A merge patch."""
        content_type = "application/merge-patch+json"
        return self._json("PATCH", self._path(kind, name), body=change, content_type=content_type)

    def delete(self, kind: str, name: str) -> None:
        """Delete it and what it owns. Nothing there is fine."""
        try:
            self._json("DELETE", self._path(kind, name), body={"propagationPolicy": "Foreground"})
        except CliError as error:
            if error.code != "NOT_FOUND":
                raise

    def stream_log(
        self, pod: str, container: str, *, follow: bool, since: str | None = None
    ) -> Iterator[bytes]:
        """The container's lines, each with its time in front; from `since` (RFC 3339) on.

        Raises:
            CliError: there is no log, or the stream broke.
        """
        query = {"container": container, "timestamps": "true", "follow": str(follow).lower()}
        if since is not None:
            query["sinceTime"] = since
        path = f"{self._path('Pod', pod)}/log?{urlencode(query)}"
        # A program may be silent for hours; a connection that is dead is told by its keep-alive.
        timeout = urllib3.Timeout(connect=10, read=None if follow else 60)
        response = self._send("GET", path, preload_content=False, timeout=timeout)
        try:
            rest = b""
            while data := response.read1(_STREAM_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
            if rest:
                yield rest
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error) from None
        finally:
            response.close()

    def _path(self, kind: str, name: str = "") -> str:
        path = _COLLECTIONS[kind].format(quote(self.namespace))
        return f"/{path}/{quote(name)}" if name else f"/{path}"

    def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
        content_type: str = "application/json",
    ) -> Document:
        url = f"{path}?{urlencode(query)}" if query else path
        response = self._send(method, url, body=body, content_type=content_type)
        try:
            document = json.loads(response.data)
        except ValueError:
            message = f"{self._configuration.host} is no Kubernetes API server: {method} {path}"
            raise CliError(message, exit_status=EXIT_FAILED) from None
        assert isinstance(document, dict)
        return document

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: Document | None = None,
        content_type: str = "application/json",
        **options: Any,
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json, */*"}
        settings: dict[str, Any] = dict(self._configuration.auth_settings())
        for setting in settings.values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = content_type
        url = self._configuration.host.rstrip("/") + path
        try:
            response = self._pool.request(method, url, body=content, headers=headers, **options)
            if response.status >= 400:
                raise _refusal(response.status, response.data, f"{method} {path.split('?')[0]}")
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error) from None
        return response

    def _unreachable(self, error: Exception) -> CliError:
        reason = str(getattr(error, "reason", None) or error).rpartition(": ")[2]
        message = f"the cluster at {self._configuration.host} does not answer: {reason}"
        return CliError(message, code="INTERNAL_ERROR", exit_status=EXIT_FAILED)


def connect(*, namespace: str | None, context: str | None) -> ClusterApi:
    """The cluster of the kubeconfig, in its context's namespace unless another is given.

    Raises:
        CliError: the kubeconfig cannot be used; the line names the file.
    """
    from kubernetes import client, config

    files: Any = config  # its functions are not annotated
    configuration = client.Configuration()
    if context is None and "KUBECONFIG" not in os.environ and _is_in_cluster():
        files.load_incluster_config(client_configuration=configuration)
        own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        return ClusterApi(configuration, namespace or own.read_text(encoding="utf-8").strip())
    shown = os.environ.get("KUBECONFIG") or "~/.kube/config"
    _require_readable(shown)
    try:
        contexts, current = files.list_kube_config_contexts(config_file=shown)
        files.load_kube_config(
            config_file=shown, context=context, client_configuration=configuration
        )
        chosen = next((c for c in contexts if c["name"] == context), current)
        default = chosen["context"].get("namespace") or "default"
    except config.ConfigException as error:
        raise CliError(f"kubeconfig {shown}: {error}") from None
    except Exception as error:
        # Whatever a malformed file makes the client stumble over: it checks little itself.
        problem = " ".join(str(error).split()) or type(error).__name__
        raise CliError(f"kubeconfig {shown}: cannot be understood ({problem})") from None
    return ClusterApi(configuration, namespace or default)


def _is_in_cluster() -> bool:
    return (
        "KUBERNETES_SERVICE_HOST" in os.environ and not Path("~/.kube/config").expanduser().exists()
    )


def _require_readable(shown: str) -> None:
    for name in shown.split(os.pathsep):
        path = Path(name).expanduser()
        if path.exists():
            try:
                path.read_bytes()
            except OSError as error:
                raise CliError(f"kubeconfig {path}: {error.strerror}") from None
            return
    raise CliError(
        f"kubeconfig {shown}: there is no such file; set KUBECONFIG, or add --local to use this "
        "machine"
    )


def _refusal(status: int, data: bytes, what: str) -> CliError:
    try:
        message = json.loads(data)["message"]
    except (ValueError, KeyError, TypeError):
        message = f"{what}: HTTP {status}"
    if status == 404 and "trainingjobs" in what and "could not find" in str(message):
        message = "the cluster has no TrainingJobs; install the chart first"
    code = _CODES.get(
        status, "INTERNAL_ERROR" if status >= 500 or status == 429 else "INVALID_ARGS"
    )
    is_usage = code == "INVALID_ARGS"
    return CliError(str(message), code=code, exit_status=EXIT_USAGE if is_usage else EXIT_FAILED)
