"""A whole Kubernetes on this machine: `Rig.up` makes one, `down` leaves nothing of it.

A rig is a folder below `RIGS` with a file that records its machines, so that any process can look
at it or take it down. One that was made for a process is taken down when that process ends, however
it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rig.addresses import node_name
from rig.binaries import Binaries, ensure_binaries
from rig.control_plane import CONTROL_PLANE_NAME, start_control_plane
from rig.errors import LeftoverError, RigError, SetupError
from rig.images import ensure_project_images, ensure_system_images
from rig.kubectl import Kubectl
from rig.locations import HERE, RIGS, Progress, cache_folder
from rig.machine import Machine, kill_machine
from rig.node import (
    NodeSettings,
    boot_id,
    images_are_imported,
    import_command,
    start_node,
    write_container_spec,
)
from rig.packages import ensure_packages
from rig.pki import write_pki
from rig.processes import ProcessId, identify
from rig.waiting import wait_for

__all__ = ["Rig", "rigs", "take_down_orphans"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_KEPT_LOGS = 10


@dataclass(frozen=True, kw_only=True)
class _State:
    """What the rig's file holds."""

    name: str
    owner: ProcessId | None
    """The process whose end is the rig's end, or None: it stays until `down`."""

    binaries: str
    images: tuple[str, ...]
    num_nodes: int
    gpus_per_node: int
    machines: tuple[Machine, ...]

    def to_json(self) -> str:
        plain = asdict(replace(self, machines=()))
        return json.dumps(plain | {"machines": [machine.to_json() for machine in self.machines]})

    @classmethod
    def from_json(cls, text: str) -> _State:
        plain: dict[str, Any] = json.loads(text)
        plain["owner"] = ProcessId(**plain["owner"]) if plain["owner"] else None
        plain["images"] = tuple(plain["images"])
        plain["machines"] = tuple(Machine.from_json(machine) for machine in plain["machines"])
        return cls(**plain)


def rigs() -> list[Rig]:
    """All rigs of this machine, also ones whose start was cut off."""
    return [Rig(folder.name) for folder in sorted(RIGS.glob("*")) if (folder / "rig.json").exists()]


def take_down_orphans(progress: Progress) -> None:
    """Take down each rig whose owner has ended without doing it."""
    for rig in rigs():
        with contextlib.suppress(FileNotFoundError):  # its watcher was faster
            if rig.is_orphan():
                progress(f"taking down the rig {rig.name}, whose owner has ended")
                rig.down()


class Rig:
    """One cluster. Calls that change it must not run at the same time."""

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise RigError(f"a rig's name has lower case letters, digits and '-'; got {name!r}")
        self.name = name
        self.root = RIGS / name
        self._state_path = self.root / "rig.json"

    # --- up and down ---------------------------------------------------------------------------

    @classmethod
    def up(
        cls,
        name: str,
        *,
        num_nodes: int = 2,
        gpus_per_node: int = 4,
        owner_pid: int | None = None,
        progress: Progress,
    ) -> Rig:
        """Start a cluster and wait until its nodes and its name server are ready.

        With `owner_pid` it is taken down when that process ends.

        Raises:
            SetupError: something is missing on this machine. RigError: the name is taken, or a part
            did not start; its logs are kept, the text says where.
        """
        rig = cls(name)
        if os.geteuid() != 0:
            raise SetupError("the test cluster needs root for its namespaces: run this with sudo")
        ensure_packages(progress)
        binaries = ensure_binaries(progress)
        images = (ensure_system_images(binaries, progress), ensure_project_images(progress))
        take_down_orphans(progress)
        started = time.monotonic()
        rig._create(
            _State(
                name=name,
                owner=identify(owner_pid) if owner_pid else None,
                binaries=str(binaries.folder),
                images=tuple(str(image) for image in images),
                num_nodes=num_nodes,
                gpus_per_node=gpus_per_node,
                machines=(),
            )
        )
        try:
            rig._start(progress)
        except BaseException as error:
            logs = rig.keep_logs("failed-start")
            rig.down()
            if isinstance(error, RigError):
                raise type(error)(f"{error}; logs are in {logs}") from error
            raise
        progress(f"the cluster is ready after {time.monotonic() - started:.1f} s")
        return rig

    def _create(self, state: _State) -> None:
        RIGS.mkdir(parents=True, exist_ok=True)
        try:
            self.root.mkdir(mode=0o755)
        except FileExistsError:
            raise RigError(f"there is a rig {self.name!r} already: take it `down` first") from None
        self._write(state)
        # The images stay although the cache may forget them meanwhile.
        for image in map(Path, state.images):
            target = self.root / image.name
            try:
                target.hardlink_to(image)
            except OSError:  # another file system
                target.symlink_to(image)
        linked = tuple(str(self.root / Path(image).name) for image in state.images)
        self._write(replace(state, images=linked))
        if state.owner is not None:
            self._watch()

    def _start(self, progress: Progress) -> None:
        state = self._state()
        binaries = self._binaries()
        progress(f"starting a control plane and {state.num_nodes} nodes")
        write_pki(self.root / "pki", num_nodes=state.num_nodes)
        write_container_spec(self.root / "container-spec.json", binaries)
        self._record(start_control_plane(self.name, self.root, binaries))
        for name in self.nodes():
            self.start_node(name)
        wait_for(
            lambda: f"the API server: {self.kubectl.run('get', '--raw', '/readyz').stderr.strip()}",
            lambda: self.kubectl.run("get", "--raw", "/readyz").returncode == 0,
        )
        self.kubectl.apply(HERE / "coredns.yaml", namespace="kube-system")
        self.wait_ready(progress=progress)

    def down(self) -> None:
        """Kill everything of the rig and remove its folder.

        Raises:
            LeftoverError: something is left; the text says what.
            NotReadyError: a process hangs in the kernel.
        """
        self._stop_watcher()
        state = self._state()
        for machine in reversed(state.machines):
            kill_machine(machine)
        for path in self.root.iterdir():
            # The record goes last: what is cut off here can be taken down again.
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != self._state_path:
                path.unlink()
        left = _leftovers(self.root, state.machines)
        if left:
            raise LeftoverError(f"the rig {self.name} is down but left {', '.join(left)}")
        shutil.rmtree(self.root)
        with contextlib.suppress(OSError):  # there are other rigs
            RIGS.rmdir()

    # --- nodes ---------------------------------------------------------------------------------

    def nodes(self) -> list[str]:
        """Names of the nodes, running or not."""
        return [node_name(number) for number in range(1, self._state().num_nodes + 1)]

    def kill_node(self, name: str) -> None:
        """`kill -9` of the node's first process: it is gone at once, with its network. Its disk
        stays."""
        kill_machine(self.machine(name))

    def start_node(self, name: str) -> None:
        """Start a node for the first time or after `kill_node`, on its old disk. It is not ready
        yet."""
        if name not in self.nodes():
            raise RigError(f"there is no node {name!r}; nodes are {', '.join(self.nodes())}")
        if any(machine.name == name and machine.is_alive() for machine in self._state().machines):
            raise RigError(f"{name} runs already")
        number = self.nodes().index(name) + 1
        control_plane = self.machine(CONTROL_PLANE_NAME)
        self._record(start_node(self._settings(), control_plane, number))

    def wait_ready(self, *, progress: Progress | None = None, timeout_seconds: float = 300) -> None:
        """Wait until every running node is Ready with its GPUs and images, and names are
        resolved."""
        say = progress or (lambda line: None)
        settings, state = self._settings(), self._state()
        running = [name for name in self.nodes() if self.machine(name).is_alive()]
        for number, name in enumerate(self.nodes(), start=1):
            if name in running:
                boot = boot_id(settings, number)
                wait_for(
                    f"{name} to be Ready with {state.gpus_per_node} GPUs, see {self.root / name}",
                    partial(self._is_ready, name, boot, state.gpus_per_node),
                    timeout_seconds=timeout_seconds,
                )
        say("nodes are ready")
        for number, name in enumerate(self.nodes(), start=1):
            if name in running:
                wait_for(
                    f"the images on {name}, see {self.root / name}/images.log",
                    partial(images_are_imported, settings, number),
                    timeout_seconds=timeout_seconds,
                )
        say("images are imported")
        wait_for(
            "the name server on each node",
            lambda: self._num_name_servers() == len(running),
            timeout_seconds=timeout_seconds,
        )

    def _is_ready(self, name: str, boot: str, gpus: int) -> bool:
        done = self.kubectl.run("get", "node", name, "-o", "json")
        if done.returncode:
            return False
        status = json.loads(done.stdout)["status"]
        conditions = {item["type"]: item["status"] for item in status.get("conditions", [])}
        allocatable = int(status.get("allocatable", {}).get("nvidia.com/gpu", 0))
        reported = status.get("nodeInfo", {}).get("bootID") == boot
        return reported and conditions.get("Ready") == "True" and allocatable == gpus

    def _num_name_servers(self) -> int:
        status = self.kubectl.json("get", "-n", "kube-system", "daemonset", "coredns")["status"]
        return int(status.get("numberReady", 0))

    def load_images(self, *, progress: Progress) -> None:
        """Give the running nodes images of the code as it is now; pods that start later have
        them."""
        binaries = self._binaries()
        archive = ensure_project_images(progress)
        client, *arguments = import_command(archive)
        for name in self.nodes():
            if self.machine(name).is_alive():
                progress(f"importing {archive.name} on {name}")
                command = self.machine(name).inside(str(binaries.folder / client), *arguments)
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise RigError(f"{name} refused {archive}: {done.stderr.strip()}")

    # --- looking at it -------------------------------------------------------------------------

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; it reaches the API server through 127.0.0.1."""
        return self.root / "kubeconfig"

    @property
    def kubectl(self) -> Kubectl:
        """kubectl of the cluster's own version."""
        return Kubectl([self._binaries().kube, "kubectl"], self.kubeconfig)

    def machine(self, name: str) -> Machine:
        """The control plane or a node, as it was last started.

        Raises:
            RigError: no machine has this name.
        """
        for machine in self._state().machines:
            if machine.name == name:
                return machine
        raise RigError(f"the rig {self.name} has no machine {name!r}")

    def describe(self) -> list[str]:
        """Lines for a person: each machine and whether it runs."""
        state = self._state()
        owner = f"for process {state.owner.pid}" if state.owner else "until it is taken down"
        lines = [f"rig {self.name} in {self.root}, {owner}"]
        for machine in state.machines:
            runs = "runs" if machine.is_alive() else "is dead"
            lines.append(f"  {machine.name} {runs} (first process {machine.first.pid})")
        return lines

    def is_orphan(self) -> bool:
        """Whether it was made for a process that has ended."""
        owner = self._state().owner
        return owner is not None and not owner.is_alive()

    def keep_logs(self, reason: str) -> Path:
        """Copy every machine's and pod's logs into the cache and return the folder."""
        kept = cache_folder() / "logs"
        target = kept / f"{time.strftime('%Y%m%d-%H%M%S')}-{self.name}-{reason}"
        for log in [
            *self.root.glob("*/*.log"),
            *self.root.glob("*/disk/var-log/upper/pods/*/*/*.log"),
        ]:
            copy = target / log.relative_to(self.root)
            with contextlib.suppress(FileNotFoundError):  # a link to a pod that is gone
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(log, copy)
        for old in sorted(kept.glob("*"))[:-_KEPT_LOGS]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    # --- the record ----------------------------------------------------------------------------

    def _state(self) -> _State:
        try:
            return _State.from_json(self._state_path.read_text())
        except FileNotFoundError:
            raise RigError(f"there is no rig {self.name!r}") from None

    def _write(self, state: _State) -> None:
        partial = self._state_path.with_suffix(".partial")
        partial.write_text(state.to_json())
        partial.rename(self._state_path)

    def _record(self, machine: Machine) -> None:
        state = self._state()
        others = tuple(other for other in state.machines if other.name != machine.name)
        self._write(replace(state, machines=(*others, machine)))

    def _binaries(self) -> Binaries:
        return Binaries(folder=Path(self._state().binaries))

    def _settings(self) -> NodeSettings:
        state = self._state()
        return NodeSettings(
            rig=self.name,
            root=self.root,
            binaries=self._binaries(),
            images=tuple(Path(image) for image in state.images),
            num_nodes=state.num_nodes,
            gpus_per_node=state.gpus_per_node,
        )

    # --- the watcher ---------------------------------------------------------------------------

    def _watch(self) -> None:
        program = [sys.executable, str(HERE.parent), "watch", self.name]
        with (self.root / "watcher.log").open("ab") as log:
            subprocess.run(
                ["setsid", "--fork", *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
            )
        wait_for("the rig's watcher", lambda: self._watcher() is not None, period_seconds=0.05)

    def watch(self) -> None:
        """Wait for the end of the owner or of the rig, and take down what the owner left.

        This is the watcher's own program; it runs in a process beside the owner.
        """
        process = identify(os.getpid())
        assert process is not None
        (self.root / "watcher.json").write_text(json.dumps(asdict(process)))
        while self._state_path.exists():
            if self.is_orphan():
                self.down()
                return
            time.sleep(1)

    def _watcher(self) -> ProcessId | None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return ProcessId(**json.loads((self.root / "watcher.json").read_text()))
        return None

    def _stop_watcher(self) -> None:
        watcher = self._watcher()
        if watcher is not None and watcher.pid != os.getpid():
            watcher.kill()


def _leftovers(root: Path, machines: tuple[Machine, ...]) -> list[str]:
    """What `down` should have removed, in words."""
    left = [f"process {machine.first.pid}" for machine in machines if machine.is_alive()]
    left += [f"group {group}" for machine in machines for group in machine.groups if group.exists()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if f"{root}/" in line:
            left.append(f"mount {line.split(' ')[4]}")
    return left
