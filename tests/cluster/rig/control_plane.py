"""The machine that is no node: etcd, API server, its controllers and the forwarder."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

from rig.addresses import API_PORT, CONTROL_PLANE, SERVICES
from rig.binaries import Binaries
from rig.locations import HERE
from rig.machine import Machine, start_machine
from rig.network import PRELUDE, configure
from rig.pki import write_kubeconfig

__all__ = ["CONTROL_PLANE_NAME", "start_control_plane"]

CONTROL_PLANE_NAME = "control-plane"

_SCRIPT = """
{prelude}
{forward} >> {home}/forward.log 2>&1 &
{etcd} >> {home}/etcd.log 2>&1 &
{apiserver} >> {home}/kube-apiserver.log 2>&1 &
# The other two give up when they start before the API server.
until [ "$({ready} 2> {home}/ready.log)" = ok ]; do sleep 0.3; done
{controller_manager} >> {home}/kube-controller-manager.log 2>&1 &
{scheduler} >> {home}/kube-scheduler.log 2>&1 &
wait
"""


def start_control_plane(rig: str, root: Path, binaries: Binaries) -> Machine:
    """Start the machine and write `kubeconfig` in `root`, which reaches it through 127.0.0.1.

    The API server is not ready yet when this returns.
    """
    home, pki = root / CONTROL_PLANE_NAME, root / "pki"
    home.mkdir()
    # A socket stays in the network in which it was made: the forwarder listens on the host's
    # loopback and connects inside.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        write_kubeconfig(
            root / "kubeconfig", pki=pki, user="admin", server=f"https://127.0.0.1:{port}"
        )
        listener.set_inheritable(True)
        script = home / "start.sh"
        script.write_text(_script(home, pki, binaries, listener.fileno()))
        machine = start_machine(
            rig, CONTROL_PLANE_NAME, home, script, descriptors=(listener.fileno(),)
        )
    configure(
        machine.enter("ip", "-batch", "-"),
        "link set lo up",
        "link add br0 type bridge",
        f"addr add {CONTROL_PLANE}/24 dev br0",
        "link set br0 up",
    )
    (home / "network-ready").touch()
    return machine


def _script(home: Path, pki: Path, binaries: Binaries, listener: int) -> str:
    kube = binaries.kube

    def command(part: str, **flags: object) -> str:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        return shlex.join([kube, part, *options])

    def kubeconfigs(user: str) -> dict[str, object]:
        file = pki / f"{user}.kubeconfig"
        names = ("kubeconfig", "authentication_kubeconfig", "authorization_kubeconfig")
        return dict.fromkeys(names, file)

    return _SCRIPT.format(
        home=home,
        prelude=PRELUDE.format(home=home, hostname=CONTROL_PLANE_NAME),
        forward=shlex.join(
            [sys.executable, str(HERE / "forward.py"), str(listener), str(API_PORT)]
        ),
        etcd=command("etcd", data_dir=home / "etcd", unsafe_no_fsync="true", log_level="warn"),
        apiserver=command("apiserver", **_apiserver_flags(pki)),
        ready=f"{kube} kubectl --kubeconfig {pki}/admin.kubeconfig get --raw /readyz",
        controller_manager=command(
            "controller-manager",
            **kubeconfigs("controller-manager"),
            service_account_private_key_file=pki / "service-accounts.key",
            root_ca_file=pki / "ca.crt",
            use_service_account_credentials="true",
            leader_elect="false",
            # A dead node is seen after 16 s, not 50: four heartbeats of the kubelet.
            node_monitor_grace_period="16s",
            node_monitor_period="2s",
        ),
        scheduler=command("scheduler", **kubeconfigs("scheduler"), leader_elect="false"),
    )


def _apiserver_flags(pki: Path) -> dict[str, object]:
    issuer = "https://kubernetes.default.svc"
    return {
        "etcd_servers": "http://127.0.0.1:2379",
        "secure_port": API_PORT,
        "advertise_address": CONTROL_PLANE,
        "service_cluster_ip_range": SERVICES,
        "tls_cert_file": pki / "apiserver.crt",
        "tls_private_key_file": pki / "apiserver.key",
        "client_ca_file": pki / "ca.crt",
        "kubelet_client_certificate": pki / "admin.crt",
        "kubelet_client_key": pki / "admin.key",
        "kubelet_preferred_address_types": "InternalIP",
        "service_account_key_file": pki / "service-accounts.key",
        "service_account_signing_key_file": pki / "service-accounts.key",
        "service_account_issuer": issuer,
        "api_audiences": issuer,
        "requestheader_client_ca_file": pki / "ca.crt",
        "requestheader_allowed_names": "front-proxy",
        "requestheader_username_headers": "X-Remote-User",
        "requestheader_group_headers": "X-Remote-Group",
        "requestheader_extra_headers_prefix": "X-Remote-Extra-",
        "proxy_client_cert_file": pki / "front-proxy.crt",
        "proxy_client_key_file": pki / "front-proxy.key",
        # There is no kube-proxy beside the API server: it reaches webhooks by their pods'
        # addresses.
        "enable_aggregator_routing": "true",
        "authorization_mode": "Node,RBAC",
        "allow_privileged": "true",
    }
