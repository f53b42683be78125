"""What a volume of this driver can be used as. Called by node and controller with the capabilities
of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from trainmount_csi.errors import InvalidArgument
from trainmount_csi.wire import csi_pb2

__all__ = ["check_capabilities", "is_read_only", "unsupported_reason"]

_Mode = csi_pb2.VolumeCapability.AccessMode

_READ_ONLY_MODES: Final = (_Mode.SINGLE_NODE_READER_ONLY, _Mode.MULTI_NODE_READER_ONLY)


def unsupported_reason(capability: csi_pb2.VolumeCapability) -> str | None:
    """Why the driver cannot serve a volume so; None where it can."""
    if capability.WhichOneof("access_type") is None:
        return "volume_capability must have an access type"
    if capability.HasField("block"):
        return "volumeMode must be Filesystem: a volume of files is no block device"
    if capability.access_mode.mode == _Mode.UNKNOWN:
        return "volume_capability must have an access mode"
    # Every mode is fine: the store is shared, and who writes is the pods' agreement.
    return None


def check_capabilities(capabilities: Iterable[csi_pb2.VolumeCapability], field: str) -> None:
    """Raises InvalidArgument where there are none, or one that the driver cannot serve."""
    capabilities = list(capabilities)
    if not capabilities:
        raise InvalidArgument(f"{field} must be set")
    for capability in capabilities:
        reason = unsupported_reason(capability)
        if reason is not None:
            raise InvalidArgument(reason)


def is_read_only(capability: csi_pb2.VolumeCapability) -> bool:
    """The access mode itself forbids writing."""
    return capability.access_mode.mode in _READ_ONLY_MODES
