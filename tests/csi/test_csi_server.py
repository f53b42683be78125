"""The server's boundary: codes and lines for errors, sockets, registration with the kubelet."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from trainmount_csi.errors import Unauthenticated
from trainmount_csi.identity import IdentityService
from trainmount_csi.registration import RegistrationService
from trainmount_csi.server import EndpointError, Server, socket_path
from trainmount_csi.wire import (
    csi_pb2,
    csi_pb2_grpc,
    registration_pb2,
    registration_pb2_grpc,
)


class BrokenNode:
    """A Node service whose calls fail, one as planned and one not."""

    def NodePublishVolume(self, request: Any, context: Any) -> Any:
        raise Unauthenticated("/Volumes/a/b/c: the token is not taken")

    def NodeUnpublishVolume(self, request: Any, context: Any) -> Any:
        raise RuntimeError("dapi-secret is in this text")

    def __getattr__(self, name: str) -> Any:
        return lambda _request, _context: None


@pytest.fixture
def socket_file() -> Iterator[Path]:
    # Short, because the path of a Unix socket may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="csi-", dir="/tmp"))
    yield folder / "sockets" / "csi.sock"
    shutil.rmtree(folder)


def test_a_planned_failure_is_its_code_and_its_line(socket_file: Path) -> None:
    server = Server(socket_file, {"csi.v1.Node": BrokenNode()})
    server.start()
    with grpc.insecure_channel(f"unix:{socket_file}") as channel:
        node = csi_pb2_grpc.NodeStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            node.NodePublishVolume(csi_pb2.NodePublishVolumeRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert caught.value.details() == "/Volumes/a/b/c: the token is not taken"
    server.stop(1)
    assert not socket_file.exists()


def test_an_unplanned_failure_tells_the_caller_nothing_but_where_to_look(
    socket_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(socket_file, {"csi.v1.Node": BrokenNode()})
    server.start()
    with grpc.insecure_channel(f"unix:{socket_file}") as channel:
        node = csi_pb2_grpc.NodeStub(channel)
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.RpcError) as caught:
            node.NodeUnpublishVolume(csi_pb2.NodeUnpublishVolumeRequest())
    server.stop(1)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "dapi-secret" not in (caught.value.details() or "")
    assert "Traceback" in caplog.text


def test_a_call_that_the_driver_does_not_serve_is_unimplemented(socket_file: Path) -> None:
    server = Server(socket_file, {"csi.v1.Identity": IdentityService()})
    server.start()
    with grpc.insecure_channel(f"unix:{socket_file}") as channel:
        call = channel.unary_unary("/csi.v1.Controller/ListVolumes")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"")
    server.stop(1)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_socket_that_was_left_is_replaced_and_a_living_one_is_not(socket_file: Path) -> None:
    first = Server(socket_file, {"csi.v1.Identity": IdentityService()})
    first.start()
    second = Server(socket_file, {"csi.v1.Identity": IdentityService()})
    with pytest.raises(EndpointError, match="another process does"):
        second.start()
    first.stop(1)
    socket_file.touch()
    third = Server(socket_file, {"csi.v1.Identity": IdentityService()})
    third.start()
    assert socket_file.is_socket()
    assert socket_file.stat().st_mode & 0o777 == 0o600
    third.stop(1)


def test_the_kubelet_learns_who_the_driver_is_and_the_driver_whether_it_is_taken(
    socket_file: Path,
) -> None:
    registration = RegistrationService(Path("/var/lib/kubelet/plugins/x/csi.sock"))
    server = Server(socket_file, {"pluginregistration.Registration": registration})
    server.start()
    with grpc.insecure_channel(f"unix:{socket_file}") as channel:
        kubelet = registration_pb2_grpc.RegistrationStub(channel)
        info = kubelet.GetInfo(registration_pb2.InfoRequest())
        assert (info.type, info.name) == ("CSIPlugin", "csi.trainmount.dev")
        assert info.endpoint == "/var/lib/kubelet/plugins/x/csi.sock"
        assert list(info.supported_versions) == ["1.0.0"]
        kubelet.NotifyRegistrationStatus(
            registration_pb2.RegistrationStatus(plugin_registered=True)
        )
        assert not registration.refused.is_set()
        kubelet.NotifyRegistrationStatus(registration_pb2.RegistrationStatus(error="too old"))
        assert registration.refused.is_set()
    server.stop(1)


def test_an_endpoint_is_a_path() -> None:
    assert socket_path("--endpoint", "unix:///a/csi.sock") == Path("/a/csi.sock")
    assert socket_path("--endpoint", "/a/csi.sock") == Path("/a/csi.sock")
    for text in ("tcp://127.0.0.1:1", "unix://csi.sock", ""):
        with pytest.raises(EndpointError, match=r"^--endpoint must be unix:///path"):
            socket_path("--endpoint", text)
