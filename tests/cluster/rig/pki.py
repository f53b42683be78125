"""Certificates and kubeconfig files of a rig, from an authority that lives as long as it."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import trustme
from rig.addresses import API_PORT, API_SERVICE, CONTROL_PLANE, node_address, node_name

__all__ = ["write_kubeconfig", "write_pki"]

_USERS = {
    # File name: (user, group). The names are what Kubernetes' own role bindings expect.
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", None),
    "scheduler": ("system:kube-scheduler", None),
    "proxy": ("system:kube-proxy", None),
    "front-proxy": ("front-proxy", None),
}


def write_pki(folder: Path, *, num_nodes: int) -> None:
    """Write `<name>.crt`, `<name>.key` and `<name>.kubeconfig` for every part of the cluster."""
    folder.mkdir(mode=0o700)
    authority = trustme.CA(organization_name="trainmount test cluster")
    authority.cert_pem.write_to_path(folder / "ca.crt")

    def issue(name: str, *hosts: str, user: str, group: str | None) -> None:
        certificate = authority.issue_cert(*hosts, common_name=user, organization_name=group)
        certificate.cert_chain_pems[0].write_to_path(folder / f"{name}.crt")
        certificate.private_key_pem.write_to_path(folder / f"{name}.key")

    hosts = ("127.0.0.1", "localhost", CONTROL_PLANE, API_SERVICE, "kubernetes.default.svc")
    issue("apiserver", *hosts, user="kube-apiserver", group=None)
    for name, (user, group) in _USERS.items():
        issue(name, name, user=user, group=group)
    for number in range(1, num_nodes + 1):
        name = node_name(number)
        issue(name, node_address(number), name, user=f"system:node:{name}", group="system:nodes")
    # Tokens of service accounts are signed with a key of another form than trustme's.
    key = ["openssl", "genrsa", "-out", str(folder / "service-accounts.key"), "2048"]
    subprocess.run(key, check=True, capture_output=True)
    for name in [*_USERS, *(node_name(number) for number in range(1, num_nodes + 1))]:
        server = f"https://{CONTROL_PLANE}:{API_PORT}"
        write_kubeconfig(folder / f"{name}.kubeconfig", pki=folder, user=name, server=server)


def write_kubeconfig(path: Path, *, pki: Path, user: str, server: str) -> None:
    """Write a kubeconfig that holds the certificates themselves, readable by its owner."""

    def content(name: str) -> str:
        return base64.b64encode((pki / name).read_bytes()).decode()

    key = {
        "client-certificate-data": content(f"{user}.crt"),
        "client-key-data": content(f"{user}.key"),
    }
    cluster = {"server": server, "certificate-authority-data": content("ca.crt")}
    context = {"cluster": "rig", "user": user}
    path.touch(mode=0o600)
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "rig", "cluster": cluster}],
                "users": [{"name": user, "user": key}],
                "contexts": [{"name": "rig", "context": context}],
                "current-context": "rig",
            }
        )
    )
