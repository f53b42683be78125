"""Announces GPUs that do not exist to the kubelet, so that pods ask for and get `nvidia.com/gpu`.

A node's script runs it as a program: `device_plugin.py NUMBER`. A container that gets some finds
their names in NVIDIA_VISIBLE_DEVICES. When the kubelet starts again it forgets plugins, and this
registers again.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_tools import protoc  # type: ignore[import-untyped]

RESOURCE = "nvidia.com/gpu"
FOLDER = Path("/var/lib/kubelet/device-plugins")
SOCKET = FOLDER / "trainmount-gpus.sock"
_PROTO = Path(__file__).with_suffix(".proto")

log = logging.getLogger("device_plugin")


def compile_protocol(folder: Path) -> tuple[Any, Any]:
    """Generate the messages and stubs in `folder`; returns both modules."""
    arguments = [f"-I{_PROTO.parent}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    if protoc.main(["protoc", *arguments, str(_PROTO)]):
        raise SystemExit(f"protoc does not accept {_PROTO}")
    sys.path.insert(0, str(folder))
    return importlib.import_module("device_plugin_pb2"), importlib.import_module(
        "device_plugin_pb2_grpc"
    )


class Plugin:
    """The service `DevicePlugin`: `count` healthy devices, until `stopping` is set."""

    def __init__(self, messages: Any, count: int, stopping: threading.Event) -> None:
        self._messages = messages
        self._names = [f"gpu-{index}" for index in range(count)]
        self._stopping = stopping

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
        """No options."""
        return self._messages.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:
        """All devices once; the stream stays open, for its end would mean that they are gone."""
        devices = [self._messages.Device(id=name, health="Healthy") for name in self._names]
        yield self._messages.ListAndWatchResponse(devices=devices)
        while context.is_active() and not self._stopping.wait(1):
            pass

    def Allocate(self, request: Any, context: Any) -> Any:
        """Tell each container which devices are its own."""
        responses = [
            self._messages.ContainerAllocateResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": ",".join(sorted(wanted.device_ids))}
            )
            for wanted in request.container_requests
        ]
        return self._messages.AllocateResponse(container_responses=responses)


def serve_once(messages: Any, stubs: Any, count: int) -> None:
    """Serve, register, and return when the kubelet has removed our socket or its own is new."""
    kubelet = FOLDER / "kubelet.sock"
    while not kubelet.exists():
        time.sleep(0.2)
    SOCKET.unlink(missing_ok=True)
    stopping = threading.Event()
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    stubs.add_DevicePluginServicer_to_server(Plugin(messages, count, stopping), server)
    server.add_insecure_port(f"unix://{SOCKET}")
    server.start()
    try:
        with grpc.insecure_channel(f"unix://{kubelet}") as channel:
            stubs.RegistrationStub(channel).Register(
                messages.RegisterRequest(
                    version="v1beta1", endpoint=SOCKET.name, resource_name=RESOURCE
                ),
                timeout=10,
            )
        log.info("registered devices", extra={"count": count})
        while SOCKET.exists():
            time.sleep(0.5)
    finally:
        stopping.set()
        server.stop(grace=None).wait()


def main() -> None:
    """Serve for ever."""
    logging.basicConfig(level=logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        messages, stubs = compile_protocol(Path(folder))
        while True:
            try:
                serve_once(messages, stubs, int(sys.argv[1]))
            except grpc.RpcError as error:  # the kubelet is about to start or to stop
                log.warning("could not register devices", extra={"code": str(error)})
                time.sleep(0.5)


if __name__ == "__main__":
    main()
