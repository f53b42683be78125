"""The Controller service: a volume is a directory inside a volume. Called by the
external-provisioner and by nobody else.

A StorageClass says `source: /Volumes/<catalog>/<schema>/<volume>[/...]`; a claim gets the directory
`<source>/<name>`, and its volume id is that directory's URL. Beside the directories lies
`.trainmount/<name>.json`, the record that we made one. Only a directory with a record is ever
deleted, and of one that was there before us (adopted) only the record.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import grpc

from trainmount_csi import provisioning
from trainmount_csi.capabilities import check_capabilities, unsupported_reason
from trainmount_csi.credentials import Credentials
from trainmount_csi.errors import InvalidArgument, NotFound
from trainmount_csi.operations import PendingOperations
from trainmount_csi.source_check import check_source, within
from trainmount_csi.volume_context import VolumeContext
from trainmount_csi.wire import csi_pb2

__all__ = ["ControllerService"]

logger = logging.getLogger(__name__)

CALL_TIMEOUT_SECONDS: Final = 60.0

DELETE_TIMEOUT_SECONDS: Final = 600.0
"""A directory is deleted file by file; what is left after this is deleted by the next try."""

_Rpc = csi_pb2.ControllerServiceCapability.RPC


class ControllerService:
    """Directories as volumes."""

    def __init__(self, *, allow_node_directory: bool) -> None:
        """`allow_node_directory`: `file://` sources are the same to this process and to the
        daemons."""
        self._allow_node_directory = allow_node_directory
        self._pending = PendingOperations()

    def ControllerGetCapabilities(
        self, _request: csi_pb2.ControllerGetCapabilitiesRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.ControllerGetCapabilitiesResponse:
        capability = csi_pb2.ControllerServiceCapability(rpc=_Rpc(type=_Rpc.CREATE_DELETE_VOLUME))
        return csi_pb2.ControllerGetCapabilitiesResponse(capabilities=[capability])

    def CreateVolume(
        self, request: csi_pb2.CreateVolumeRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.CreateVolumeResponse:
        if not request.name:
            raise InvalidArgument("name must be set")
        check_capabilities(request.volume_capabilities, "volume_capabilities")
        if request.HasField("volume_content_source"):
            raise InvalidArgument("a volume cannot be made from a snapshot or another volume")
        parent = VolumeContext.parse(request.parameters, field="parameters")
        credentials = _credentials(request.secrets, parent)
        self._check(parent.source, credentials)
        name = provisioning.directory_name(request.name)
        capacity = provisioning.parse_capacity(request.capacity_range)
        with self._pending.exclusive(f"{parent.source}/{name}"):
            within(
                parent.source,
                credentials,
                CALL_TIMEOUT_SECONDS,
                lambda volume: provisioning.create(volume, name, capacity),
            )
        created = provisioning.child(parent, name)
        logger.info("volume created", extra={"volume": created.source})
        volume = csi_pb2.Volume(
            volume_id=created.source,
            capacity_bytes=capacity.required_bytes,
            volume_context=created.to_attributes(),
        )
        return csi_pb2.CreateVolumeResponse(volume=volume)

    def DeleteVolume(
        self, request: csi_pb2.DeleteVolumeRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.DeleteVolumeResponse:
        if not request.volume_id:
            raise InvalidArgument("volume_id must be set")
        parent, name = provisioning.split_id(request.volume_id)
        if parent is None:
            # Not an id of ours, so there is nothing of ours to delete.
            return csi_pb2.DeleteVolumeResponse()
        credentials = _credentials(request.secrets, parent)
        with self._pending.exclusive(request.volume_id):
            try:
                self._check(parent.source, credentials)
                within(
                    parent.source,
                    credentials,
                    DELETE_TIMEOUT_SECONDS,
                    lambda volume: provisioning.delete(volume, name),
                )
            except NotFound:
                return csi_pb2.DeleteVolumeResponse()
        logger.info("volume deleted", extra={"volume": request.volume_id})
        return csi_pb2.DeleteVolumeResponse()

    def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        if not request.volume_id:
            raise InvalidArgument("volume_id must be set")
        if not request.volume_capabilities:
            raise InvalidArgument("volume_capabilities must be set")
        volume = self._volume_context(request)
        self._check(volume.source, _credentials(request.secrets, volume))
        for capability in request.volume_capabilities:
            reason = unsupported_reason(capability)
            if reason is not None:
                return csi_pb2.ValidateVolumeCapabilitiesResponse(message=reason)
        confirmed = csi_pb2.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=request.volume_context,
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
        )
        return csi_pb2.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    def _volume_context(self, request: csi_pb2.ValidateVolumeCapabilitiesRequest) -> VolumeContext:
        if request.volume_context:
            return VolumeContext.parse(request.volume_context, field="volume_context")
        parent, name = provisioning.split_id(request.volume_id)
        if parent is None:
            raise NotFound(f"no volume {request.volume_id}")
        return provisioning.child(parent, name)

    def _check(self, source: str, credentials: Credentials) -> None:
        check_source(
            source,
            credentials,
            CALL_TIMEOUT_SECONDS,
            allow_node_directory=self._allow_node_directory,
        )


def _credentials(secrets: Mapping[str, str], context: VolumeContext) -> Credentials:
    return Credentials.parse(
        secrets,
        required=context.needs_credentials,
        secret_field="csi.storage.k8s.io/provisioner-secret-name",  # noqa: S106 - a key's name
    )
