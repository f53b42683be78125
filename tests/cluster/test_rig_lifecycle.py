"""The cluster itself: nothing is left of a rig, whether it is taken down or its owner dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rig.cluster import Rig, rigs
from rig.errors import RigError
from rig.locations import RIGS, Progress
from rig.processes import held_namespaces, namespaces_in_use
from rig.waiting import wait_for

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or "KUBECONFIG" in os.environ, reason="starts a rig, which needs root"
)

_KERNEL_SETTINGS = ("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory")


def host_state() -> dict[str, object]:
    """What a rig must not change on this machine."""
    links = json.loads(subprocess.check_output(["ip", "-json", "link"], text=True))
    return {
        "links": sorted(link["ifname"] for link in links),
        "routes": subprocess.check_output(["ip", "route"], text=True),
        "rules": subprocess.check_output(["nft", "list", "ruleset"], text=True),
        "settings": [Path("/proc/sys", name).read_text() for name in _KERNEL_SETTINGS],
        "forwarding": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "namespaces by name": sorted(Path("/run/netns").glob("*")),
    }


def traces(name: str) -> list[str]:
    """Whatever still bears the rig's name."""
    found = [str(RIGS / name)] if (RIGS / name).exists() else []
    found += [str(group) for group in Path("/sys/fs/cgroup").rglob(f"trainmount-rig-{name}")]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [line for line in mounts if f"/{name}/" in line]
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = command_line.read_text().replace("\0", " ")
        except OSError:  # it ended
            continue
        if f"{RIGS}/{name}/" in text or f"watch {name}" in text:
            found.append(text)
    return found


def first_processes(rig: Rig) -> list[int]:
    state = json.loads((rig.root / "rig.json").read_text())
    return [machine["first"]["pid"] for machine in state["machines"]]


def test_down_leaves_no_process_namespace_mount_rule_or_file(progress: Progress) -> None:
    before = host_state()
    name = f"down-{os.getpid()}"
    rig = Rig.up(name, num_nodes=1, owner_pid=os.getpid(), progress=progress)
    with held_namespaces(*first_processes(rig)) as used:
        assert len(used) == 6  # three kinds for each of two machines
        assert any(namespaces_in_use(used))
        assert traces(name)
        rig.down()
        assert traces(name) == []
        assert list(namespaces_in_use(used)) == []
    assert host_state() == before


def test_a_rig_whose_owner_is_killed_is_taken_down() -> None:
    before = host_state()
    name = f"orphan-{os.getpid()}"
    program = f"""
import os
from rig.cluster import Rig
Rig.up({name!r}, num_nodes=1, owner_pid=os.getpid(), progress=print)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    rig = Rig(name)
    try:
        wait_for(
            "the start to be under way",
            lambda: any(r.name == name for r in rigs()) and len(first_processes(rig)) == 2,
            timeout_seconds=240,
        )
        with held_namespaces(*first_processes(rig)) as used:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            wait_for(lambda: f"the end of {traces(name)}", lambda: not traces(name))
            assert list(namespaces_in_use(used)) == []
    finally:
        owner.kill()
        owner.wait()
    assert host_state() == before


def test_a_name_that_cannot_be_a_rigs_is_refused_with_the_rule() -> None:
    with pytest.raises(RigError, match="lower case letters, digits and '-'"):
        Rig("No/Good")


def test_taking_down_a_rig_that_is_not_there_says_so() -> None:
    with pytest.raises(RigError, match="there is no rig 'nowhere'"):
        Rig("nowhere").down()
