"""The test cluster from the shell, as root: `python tests/cluster up`, `... kubectl get pods`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from rig.cluster import Rig, rigs, take_down_orphans
from rig.errors import RigError
from rig.images import ensure_project_images

_DEFAULT_NAME = "rig"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *, named: bool = True) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        if named:
            added.add_argument("--name", default=_DEFAULT_NAME, help="the rig's name (%(default)s)")
        return added

    up = command("up", "start a cluster; prints where its kubeconfig is")
    up.add_argument("--nodes", type=int, default=2, help="how many nodes (%(default)s)")
    up.add_argument("--gpus", type=int, default=4, help="GPUs a node announces (%(default)s)")
    down = command("down", "take a cluster down; nothing of it is left")
    down.add_argument("--all", action="store_true", help="every rig of this machine")
    command("status", "show the rigs of this machine", named=False)
    command("kubectl", "run kubectl on the cluster")
    shell = command("shell", "run a command (default: bash) inside a node's namespaces")
    shell.add_argument("machine", help="node-1, node-2, ... or control-plane")
    for name, text in (
        ("kill-node", "kill -9 of a node's first process"),
        ("start-node", "start a killed node on its old disk"),
    ):
        command(name, text).add_argument("node")
    command("load", "give a running cluster images of the code as it is now")
    images = command("images", "build the project's images and copy their archive", named=False)
    images.add_argument("folder", type=Path)
    images.add_argument("--with-torch", action="store_true", help="5 GB, for a cluster like kind")
    command("clean", "take down rigs whose owner has ended", named=False)
    watch = commands.add_parser("watch")  # what `up` starts for itself
    watch.add_argument("name")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    match arguments.command:
        case "up":
            rig = Rig.up(
                arguments.name,
                num_nodes=arguments.nodes,
                gpus_per_node=arguments.gpus,
                progress=_say,
            )
            print(f"export KUBECONFIG={rig.kubeconfig}")
        case "down":
            for rig in rigs() if arguments.all else [Rig(arguments.name)]:
                rig.down()
        case "status":
            print("\n".join(line for rig in rigs() for line in rig.describe()) or "no rigs")
        case "load":
            Rig(arguments.name).load_images(progress=_say)
        case "kubectl" | "shell":
            command = _command_on(Rig(arguments.name), arguments)
            os.execvp(command[0], command)
        case "kill-node":
            Rig(arguments.name).kill_node(arguments.node)
        case "start-node":
            Rig(arguments.name).start_node(arguments.node)
        case "images":
            _copy_images(arguments.folder, with_torch=arguments.with_torch)
        case "clean":
            take_down_orphans(_say)
        case "watch":
            Rig(arguments.name).watch()


def _command_on(rig: Rig, arguments: argparse.Namespace) -> list[str]:
    if arguments.command == "kubectl":
        return rig.kubectl.command(*arguments.arguments)
    return rig.machine(arguments.machine).inside(*(arguments.arguments or ["bash"]))


def _copy_images(folder: Path, *, with_torch: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    print(shutil.copy(ensure_project_images(_say, with_torch=with_torch), folder))


def _parse(argv: list[str]) -> argparse.Namespace:
    # What comes after `kubectl` or `shell MACHINE` is somebody else's, options included.
    head = len(argv)
    if argv[:1] in (["kubectl"], ["shell"]):
        head = 3 if argv[1:2] == ["--name"] else 1
        head += argv[0] == "shell"
    arguments = _parser().parse_args(argv[:head])
    arguments.arguments = argv[head:]
    return arguments


if __name__ == "__main__":
    try:
        _run(_parse(sys.argv[1:]))
    except RigError as error:
        sys.exit(f"error: {error}")
