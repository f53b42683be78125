"""The FUSE mounts of this node: one for each (source, host, identity, options), shared by its
publications. The node calls this under `hold`; a thread of ours restarts supervisors that died and
removes what nobody uses.

Who uses a mount is read from the mount table every time, so that a restarted plugin knows as much
as the one before.

Shared state: `_served` and `_locks` are guarded by `_guard`, which is never held while anything is
waited for. A daemon's folder, its ServedMount and its entries in the mount table are changed only
under its own lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from trainmount_csi import recovery, served_mount
from trainmount_csi.credentials import Credentials
from trainmount_csi.daemon_spec import DaemonFolder, DaemonSpec, daemon_folders, daemon_id_of
from trainmount_csi.errors import CsiError, Pending, Unavailable
from trainmount_csi.launchers import Launcher
from trainmount_csi.mounts import Mounter, mounts_at
from trainmount_csi.served_mount import ServedMount
from trainmount_csi.staged_files import staged_files

__all__ = ["Daemons"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_SECONDS: Final = 90.0
"""How long an unpublish waits for uploads; the kubelet gives a call two minutes and tries again."""

SWEEP_INTERVAL_SECONDS: Final = 10.0

SWEEP_PAUSE_SECONDS: Final = 0.5
"""Least time between two rounds, so that a supervisor that dies at once is not started in a tight
loop."""

IDLE_SECONDS: Final = 300.0
"""How long a mount may wait for its first bind: a slow start is tried again by the kubelet, and
shall find what was begun."""

SWEEP_STOP_SECONDS: Final = 1.0


class Daemons:
    """The mounts of one node. Any thread may call it."""

    def __init__(self, root: Path, launcher: Launcher, mounter: Mounter) -> None:
        """`root` is the driver's folder on the node; it must be there."""
        self._root = root.resolve()
        self._launcher = launcher
        self._mounter = mounter
        self._guard = threading.Lock()
        self._locks: dict[str, threading.RLock] = {}
        self._served: dict[str, ServedMount] = {}
        self._closed = threading.Event()
        self._sweeper = threading.Thread(
            target=self._sweep_until_closed, name="daemons-sweep", daemon=True
        )

    @property
    def serves_node_directories(self) -> bool:
        return self._launcher.serves_node_directories

    def start(self) -> None:
        """Take over what an earlier plugin process left, then watch over it. Call once, before any
        other method."""
        with ThreadPoolExecutor(thread_name_prefix="recover") as pool:
            for folder in daemon_folders(self._root):
                pool.submit(self._recover, folder)
        self._sweeper.start()

    def close(self) -> None:
        """Stop watching and let the descriptors go. Daemons and mounts go on without us."""
        self._closed.set()
        self._launcher.changed.set()
        self._sweeper.join()
        with self._guard:
            served = list(self._served.values())
            self._served.clear()
        for mount in served:
            mount.keeper.close()

    @contextmanager
    def hold(self, daemon_id: str, timeout_seconds: float) -> Iterator[None]:
        """Keep everybody else from changing this daemon: its mount cannot go between `ensure` and a
        bind of it.

        Raises:
            Pending: somebody else held it for longer than the timeout.
        """
        with self._guard:
            lock = self._locks.setdefault(daemon_id, threading.RLock())
        if not lock.acquire(timeout=max(0.0, timeout_seconds)):
            raise Pending("the volume's mount is being made or taken down; it will be tried again")
        try:
            yield
        finally:
            lock.release()

    def ensure(
        self, spec: DaemonSpec, credentials: Credentials, timeout_seconds: float
    ) -> DaemonFolder:
        """The folder of a mount that answers, made if needed. The caller holds the daemon.

        Raises:
            InvalidArgument: the mount does not take an option.
            FailedPrecondition: this machine cannot mount.
            Unavailable: no daemon serves it within the time; what was begun goes on.
        """
        deadline = time.monotonic() + timeout_seconds
        folder = DaemonFolder(self._root / spec.daemon_id)
        served = self._living(folder)
        if served is None:
            served = self._mount(folder, spec, credentials, timeout_seconds)
        else:
            served.refresh(credentials)
        served.last_used = time.monotonic()
        self._launcher.ensure(folder)
        if not served.keeper.wait_ready(deadline - time.monotonic()):
            reason = served.keeper.failure or self._launcher.describe(folder)
            raise Unavailable(f"the daemon of {spec.source} does not answer yet: {reason}")
        return folder

    def is_served(self, daemon_id: str, device: str) -> bool:
        """Whether `device` of the mount table is the daemon's living mount."""
        served = self._living(DaemonFolder(self._root / daemon_id))
        return served is not None and served.device == device

    def refresh_credentials(self, daemon_id: str, credentials: Credentials) -> None:
        """Give a served daemon new credentials; nothing else about it changes."""
        with self._guard:
            served = self._served.get(daemon_id)
        if served is not None:
            served.refresh(credentials)

    def release_if_unused(
        self, daemon_id: str, stop_timeout_seconds: float = STOP_TIMEOUT_SECONDS
    ) -> bool:
        """Take the mount down unless something is published from it; tells whether all of it is
        gone.

        Files that were written and not yet uploaded are waited for; the folder of a daemon that
        could not upload them stays, and its next start goes on with them. What is not over within
        the timeout is finished by our thread.
        """
        folder = DaemonFolder(self._root / daemon_id)
        with self.hold(daemon_id, stop_timeout_seconds):
            if self._is_used(folder):
                return False
            return self._release(folder, stop_timeout_seconds)

    def _mount(
        self,
        folder: DaemonFolder,
        spec: DaemonSpec,
        credentials: Credentials,
        timeout_seconds: float,
    ) -> ServedMount:
        # A supervisor of an earlier mount may still upload; two must not use one state folder.
        if not self._launcher.stop(folder, timeout_seconds):
            raise Unavailable(
                f"the last daemon of {spec.source} still uploads files; it will be tried again"
            )
        served_mount.clear_mount_path(folder)
        folder.create(self._launcher.owner_uid)
        served = served_mount.mount(folder, spec, credentials, self._launcher.owner_uid)
        with self._guard:
            self._served[folder.daemon_id] = served
        return served

    def _living(self, folder: DaemonFolder) -> ServedMount | None:
        """The daemon's mount if it can be used; one that cannot is forgotten here."""
        with self._guard:
            served = self._served.get(folder.daemon_id)
        if served is None:
            return None
        mounted = mounts_at(self._mounter.entries(), folder.mount_path)
        if mounted and mounted[-1].device == served.device and served.is_connected():
            return served
        logger.warning("a mount was lost", extra={"daemon": folder.daemon_id})
        self._forget(folder)
        return None

    def _forget(self, folder: DaemonFolder) -> None:
        with self._guard:
            served = self._served.pop(folder.daemon_id, None)
        if served is not None:
            served.keeper.close()

    def _is_used(self, folder: DaemonFolder) -> bool:
        return any(
            daemon_id_of(entry.source) == folder.daemon_id
            and entry.mount_point != folder.mount_path
            for entry in self._mounter.entries()
        )

    def _release(self, folder: DaemonFolder, stop_timeout_seconds: float) -> bool:
        for _ in mounts_at(self._mounter.entries(), folder.mount_path):
            try:
                self._mounter.unmount(folder.mount_path)
            except CsiError as error:
                logger.warning(
                    "an unused mount stays",
                    extra={"daemon": folder.daemon_id, "reason": str(error)},
                )
                return False
        if not self._launcher.stop(folder, stop_timeout_seconds):
            logger.info(
                "waiting for uploads of an unused daemon", extra={"daemon": folder.daemon_id}
            )
            return False
        self._forget(folder)
        if not folder.path.exists():
            return True
        staged = staged_files(folder.state_path)
        if staged:
            logger.warning(
                "files that were not uploaded are kept until the volume is used again",
                extra={
                    "daemon": folder.daemon_id,
                    "files": len(staged),
                    "folder": str(folder.path),
                },
            )
            return True
        folder.remove()
        logger.info("daemon removed", extra={"daemon": folder.daemon_id})
        return True

    def _recover(self, folder: DaemonFolder) -> None:
        try:
            with self.hold(folder.daemon_id, 0):
                served = recovery.recover(folder, self._launcher, self._mounter)
        except Exception:
            # One broken folder must not keep the others from being served.
            logger.exception("a daemon was not recovered", extra={"daemon": folder.daemon_id})
            return
        if served is not None:
            with self._guard:
                self._served[folder.daemon_id] = served

    def _sweep_until_closed(self) -> None:
        while not self._closed.wait(SWEEP_PAUSE_SECONDS):
            self._launcher.changed.wait(SWEEP_INTERVAL_SECONDS)
            self._launcher.changed.clear()
            if self._closed.is_set():
                return
            for folder in daemon_folders(self._root):
                try:
                    with self.hold(folder.daemon_id, 0):
                        self._sweep(folder)
                except Pending:
                    continue  # a call works on it; it is looked at in the next round
                except Exception:
                    logger.exception("sweep of a daemon failed", extra={"daemon": folder.daemon_id})

    def _sweep(self, folder: DaemonFolder) -> None:
        """Restart what died, finish what was begun."""
        served = self._living(folder)
        idle = served is None or time.monotonic() - served.last_used > IDLE_SECONDS
        if idle and not self._is_used(folder):
            if served is not None or not self._is_kept(folder):
                self._release(folder, SWEEP_STOP_SECONDS)
        elif served is not None:
            self._launcher.ensure(folder)

    def _is_kept(self, folder: DaemonFolder) -> bool:
        """Nothing is left of the daemon but files that were not uploaded."""
        is_mounted = bool(mounts_at(self._mounter.entries(), folder.mount_path))
        return (
            not is_mounted
            and not self._launcher.is_running(folder)
            and bool(staged_files(folder.state_path))
        )
