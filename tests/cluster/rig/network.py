"""The network between the machines of a rig, and what every machine's script begins with."""

from __future__ import annotations

import subprocess

from rig.addresses import CONTROL_PLANE, node_address, pods_of
from rig.errors import RigError
from rig.machine import Machine

__all__ = ["PRELUDE", "configure", "connect_node"]

PRELUDE = """\
set -eu
export PATH="$PATH:/usr/sbin:/sbin"
hostname {hostname}
until [ -e {home}/network-ready ]; do sleep 0.05; done
rm {home}/network-ready
echo 1 > /proc/sys/net/ipv4/ip_forward
"""
"""Waits until the rig has configured the network. /proc/sys/net is the machine's own."""


def configure(ip_batch: list[str], *lines: str) -> None:
    """Run `lines` as commands of ip(8) with the command line `ip_batch`.

    Raises:
        RigError: one failed; the text is ip's.
    """
    done = subprocess.run(ip_batch, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise RigError(f"could not configure the rig's network: {done.stderr.strip()}")


def connect_node(control_plane: Machine, node: Machine, number: int, *, num_nodes: int) -> None:
    """Plug the node's cable in: a pair of devices, one on the control plane's bridge.

    The pair goes with the node's network when the node dies.
    """
    configure(
        control_plane.enter("ip", "-batch", "-"),
        f"link add n{number} type veth peer name eth0 netns {node.first.pid}",
        f"link set n{number} master br0 up",
    )
    others = (other for other in range(1, num_nodes + 1) if other != number)
    configure(
        node.enter("ip", "-batch", "-"),
        "link set lo up",
        f"addr add {node_address(number)}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {CONTROL_PLANE}",
        *(f"route add {pods_of(other)} via {node_address(other)}" for other in others),
    )
    configure(
        control_plane.enter("ip", "-batch", "-"),
        f"route replace {pods_of(number)} via {node_address(number)}",
    )
