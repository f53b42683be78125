"""The Identity service: who the driver is and whether it is ready. Called by the kubelet and the
sidecars."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

import grpc
from google.protobuf.wrappers_pb2 import BoolValue

from trainmount_csi.wire import csi_pb2

__all__ = ["DRIVER_NAME", "IdentityService"]

DRIVER_NAME: Final = "csi.trainmount.dev"


class IdentityService:
    """Three constant answers."""

    def GetPluginInfo(
        self, _request: csi_pb2.GetPluginInfoRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.GetPluginInfoResponse:
        return csi_pb2.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version=version("trainmount"))

    def GetPluginCapabilities(
        self, _request: csi_pb2.GetPluginCapabilitiesRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.GetPluginCapabilitiesResponse:
        service = csi_pb2.PluginCapability.Service(
            type=csi_pb2.PluginCapability.Service.CONTROLLER_SERVICE
        )
        return csi_pb2.GetPluginCapabilitiesResponse(
            capabilities=[csi_pb2.PluginCapability(service=service)]
        )

    def Probe(
        self, _request: csi_pb2.ProbeRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.ProbeResponse:
        # The socket is opened after recovery, so whoever can ask finds us ready.
        return csi_pb2.ProbeResponse(ready=BoolValue(value=True))
