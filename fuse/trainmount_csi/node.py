"""The Node service: publish a volume into a pod, take it away, tell how full it is. Called by the
kubelet.

NodePublishVolume -> publication (what is wanted) -> daemons (a mount that answers) -> mounts (bind
it to the target). Every call may come any number of times, after any crash of ours.
"""

from __future__ import annotations

import errno
import logging
import stat
from pathlib import Path
from typing import Final

import grpc

from trainmount_csi.daemon_spec import daemon_id_of
from trainmount_csi.daemons import Daemons
from trainmount_csi.errors import (
    AlreadyExists,
    Busy,
    CsiError,
    InvalidArgument,
    NotFound,
)
from trainmount_csi.mounts import MountEntry, Mounter, mounts_at
from trainmount_csi.operations import PendingOperations
from trainmount_csi.publication import Publication
from trainmount_csi.source_check import check_source
from trainmount_csi.target_path import TargetPath
from trainmount_csi.volume_statistics import volume_statistics
from trainmount_csi.wire import csi_pb2

__all__ = ["NodeService"]

logger = logging.getLogger(__name__)

PUBLISH_TIMEOUT_SECONDS: Final = 100.0
"""For all of a publish; below the kubelet's two minutes, so that it gets our reason and not its own
timeout."""

_TARGET_MODE: Final = 0o750
"""Of the directory below the mount; as the kubelet makes its own."""

_Rpc = csi_pb2.NodeServiceCapability.RPC


class NodeService:
    """The volumes of one node."""

    def __init__(self, node_id: str, daemons: Daemons, mounter: Mounter) -> None:
        self._node_id = node_id
        self._daemons = daemons
        self._mounter = mounter
        self._pending = PendingOperations()

    def NodeGetInfo(
        self, _request: csi_pb2.NodeGetInfoRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.NodeGetInfoResponse:
        return csi_pb2.NodeGetInfoResponse(node_id=self._node_id)

    def NodeGetCapabilities(
        self, _request: csi_pb2.NodeGetCapabilitiesRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.NodeGetCapabilitiesResponse:
        kinds = (_Rpc.GET_VOLUME_STATS, _Rpc.VOLUME_CONDITION, _Rpc.VOLUME_MOUNT_GROUP)
        return csi_pb2.NodeGetCapabilitiesResponse(
            capabilities=[csi_pb2.NodeServiceCapability(rpc=_Rpc(type=kind)) for kind in kinds]
        )

    def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodePublishVolumeResponse:
        publication = Publication.parse(request)
        timeout = min(PUBLISH_TIMEOUT_SECONDS, context.time_remaining() or PUBLISH_TIMEOUT_SECONDS)
        with self._pending.exclusive(str(publication.target.path)):
            self._publish(publication, timeout)
        return csi_pb2.NodePublishVolumeResponse()

    def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        if not request.volume_id:
            raise InvalidArgument("volume_id must be set")
        target = TargetPath.parse("target_path", request.target_path)
        with self._pending.exclusive(str(target.path)):
            self._unpublish(target.path)
        return csi_pb2.NodeUnpublishVolumeResponse()

    def NodeGetVolumeStats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, _context: grpc.ServicerContext
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        if not request.volume_id:
            raise InvalidArgument("volume_id must be set")
        if not request.volume_path:
            raise InvalidArgument("volume_path must be set")
        # As it was given: at a path of any other form nothing can have been published.
        path = Path(request.volume_path)
        if path.is_absolute():
            path = TargetPath.parse("volume_path", request.volume_path).path
        if not mounts_at(self._mounter.entries(), path):
            raise NotFound(f"nothing is published at {path}")
        return volume_statistics(path)

    def _publish(self, publication: Publication, timeout_seconds: float) -> None:
        target = publication.target.path
        visible = mounts_at(self._mounter.entries(), target)
        if visible and self._is_done(publication, visible[-1]):
            return
        check_source(
            publication.context.source,
            publication.credentials,
            timeout_seconds / 2,
            allow_node_directory=self._daemons.serves_node_directories,
        )
        spec = publication.spec
        with self._daemons.hold(spec.daemon_id, timeout_seconds):
            folder = self._daemons.ensure(spec, publication.credentials, timeout_seconds / 2)
            # What is left of a mount whose daemon died for good; by name, for it cannot be looked
            # at.
            for _ in visible:
                self._mounter.unmount(target, lazy=True)
            _make_directory(target)
            self._mounter.bind(folder.mount_path, target, read_only=publication.read_only)
        logger.info("published", extra={"target": str(target), "daemon": spec.daemon_id})

    def _is_done(self, publication: Publication, visible: MountEntry) -> bool:
        """Whether the target shows what is wanted; new credentials are passed on to its daemon.

        Raises:
            AlreadyExists: something else is mounted there, or in the other mode.
        """
        target = publication.target.path
        daemon_id = daemon_id_of(visible.source)
        if daemon_id is None:
            raise AlreadyExists(f"{target} is a mount of {visible.source}, not of this driver")
        with self._daemons.hold(daemon_id, PUBLISH_TIMEOUT_SECONDS):
            if not self._daemons.is_served(daemon_id, visible.device):
                return False
            if visible.read_only != publication.read_only:
                wanted = "read-only" if publication.read_only else "read-write"
                raise AlreadyExists(f"{target} is published already, and not {wanted}")
            # A pod keeps its daemon when its token is renewed, although a new pod would get
            # another.
            self._daemons.refresh_credentials(daemon_id, publication.credentials)
        return True

    def _unpublish(self, target: Path) -> None:
        published = mounts_at(self._mounter.entries(), target)
        for entry in reversed(published):
            if daemon_id_of(entry.source) is None:
                raise CsiError(f"{target} is a mount of {entry.source}, not of this driver")
            self._mounter.unmount(target)
        _remove_directory(target)
        for daemon_id in {daemon_id_of(entry.source) for entry in published} - {None}:
            assert daemon_id is not None
            self._daemons.release_if_unused(daemon_id)
        logger.info("unpublished", extra={"target": str(target)})


def _make_directory(target: Path) -> None:
    try:
        target.mkdir(mode=_TARGET_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise CsiError(f"cannot make {target}: {error.strerror}") from error
    if not stat.S_ISDIR(target.lstat().st_mode):
        raise InvalidArgument(f"target_path must be a directory: {target}")


def _remove_directory(target: Path) -> None:
    """Only an empty one: what lies in it is not ours."""
    try:
        target.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise Busy(f"cannot remove {target}: it is in use") from error
        raise CsiError(f"cannot remove {target}: {error.strerror}") from error
