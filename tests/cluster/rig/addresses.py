"""The addresses of a rig. They exist in its own networks only, so every rig has the same."""

from __future__ import annotations

__all__ = [
    "API_PORT",
    "API_SERVICE",
    "CONTROL_PLANE",
    "DNS_SERVICE",
    "PODS",
    "SERVICES",
    "node_address",
    "node_name",
    "pods_of",
]

CONTROL_PLANE = "10.88.0.1"
API_PORT = 6443
PODS = "10.88.0.0/16"
SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
"""The first address of `SERVICES` is always the API server's."""

DNS_SERVICE = "10.96.0.10"


def node_name(number: int) -> str:
    """Nodes count from 1."""
    return f"node-{number}"


def node_address(number: int) -> str:
    """The node's address on the network that it shares with the control plane."""
    return f"10.88.0.{10 + number}"


def pods_of(number: int) -> str:
    """The network of the node's pods."""
    return f"10.88.{100 + number}.0/24"
