"""What a NodePublishVolume request wants, checked and in our own words. Called by the node."""

from __future__ import annotations

from dataclasses import dataclass

from trainmount_csi.capabilities import check_capabilities, is_read_only
from trainmount_csi.credentials import Credentials
from trainmount_csi.daemon_spec import DaemonSpec
from trainmount_csi.errors import InvalidArgument
from trainmount_csi.target_path import TargetPath
from trainmount_csi.volume_context import MountFlags, VolumeContext
from trainmount_csi.wire import csi_pb2

__all__ = ["Publication"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """One volume in one pod."""

    target: TargetPath

    context: VolumeContext

    credentials: Credentials

    spec: DaemonSpec

    read_only: bool
    """Of this pod's view; others may write."""

    @classmethod
    def parse(cls, request: csi_pb2.NodePublishVolumeRequest) -> Publication:
        """Raises InvalidArgument, naming the field or key that is missing or wrong."""
        if not request.volume_id:
            raise InvalidArgument("volume_id must be set")
        target = TargetPath.parse("target_path", request.target_path)
        if not request.HasField("volume_capability"):
            raise InvalidArgument("volume_capability must be set")
        capability = request.volume_capability
        check_capabilities([capability], "volume_capability")
        context = VolumeContext.parse(request.volume_context)
        flags = MountFlags.parse(capability.mount.mount_flags)
        credentials = Credentials.parse(
            request.secrets,
            required=context.needs_credentials,
            secret_field="nodePublishSecretRef",  # noqa: S106 - a field's name
        )
        mount_group = capability.mount.volume_mount_group
        return cls(
            target=target,
            context=context,
            credentials=credentials,
            spec=DaemonSpec.of(context, flags, credentials, mount_group),
            read_only=(
                request.readonly or context.read_only or flags.read_only or is_read_only(capability)
            ),
        )
