"""The kubelet's plugin registration, answered by the driver itself. Called by the kubelet.

The kubelet watches its plugins_registry folder; a socket that appears there is asked who it is, and
then told the result.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import grpc

from trainmount_csi.identity import DRIVER_NAME
from trainmount_csi.wire import registration_pb2

__all__ = ["RegistrationService"]

logger = logging.getLogger(__name__)


class RegistrationService:
    """Answers for the driver whose CSI socket is at `endpoint`."""

    def __init__(self, endpoint: Path) -> None:
        self._endpoint = endpoint
        self.refused = threading.Event()
        """Set when the kubelet would not have the driver; it does not ask again on its own."""

    def GetInfo(
        self, _request: registration_pb2.InfoRequest, _context: grpc.ServicerContext
    ) -> registration_pb2.PluginInfo:
        return registration_pb2.PluginInfo(
            type="CSIPlugin",
            name=DRIVER_NAME,
            endpoint=str(self._endpoint),
            supported_versions=["1.0.0"],
        )

    def NotifyRegistrationStatus(
        self, request: registration_pb2.RegistrationStatus, _context: grpc.ServicerContext
    ) -> registration_pb2.RegistrationStatusResponse:
        if request.plugin_registered:
            logger.info("registered with the kubelet")
        else:
            logger.error("the kubelet refused the driver", extra={"reason": request.error})
            self.refused.set()
        return registration_pb2.RegistrationStatusResponse()
