"""`trainmount mount`: makes a mount, keeps its descriptor, and keeps a daemon on it until it is
unmounted or stopped.

Whatever can be wrong with what was asked is found before anything is mounted. Afterwards this
process never opens or looks at anything on its own mount: a request of its own that no daemon
answers could not be killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from trainmount_fuse.session.checks import (
    check_folders,
    check_metrics_port,
    check_places,
    check_ready_file,
    check_volume_aside,
    lock_folder,
)
from trainmount_fuse.session.commands import CommandSocket, give_answer
from trainmount_fuse.session.daemon import settings_of
from trainmount_fuse.session.dead_mounts import remove_dead_mount
from trainmount_fuse.session.endings import Ending
from trainmount_fuse.session.handover import Handover
from trainmount_fuse.session.mounting import (
    READ_AHEAD_KIB,
    FuseConnection,
    MountError,
    abort,
    check_device,
    check_mountpoint,
    find_mount,
    is_over,
    mount_fuse,
    read_ahead_kib,
    set_read_ahead,
    unmount,
)
from trainmount_fuse.session.process import DaemonProcess
from trainmount_fuse.session.registration import Registration
from trainmount_fuse.session.restarts import RestartBudget
from trainmount_fuse.session.self_test import takeover_fault_here
from trainmount_fuse.session.stop_signals import STOP_SIGNALS
from trainmount_fuse.session.succession import Estate
from trainmount_fuse.session.supervisor import Supervisor, SupervisorOptions
from trainmount_fuse.session.upgrade import Upgrade
from trainmount_fuse.session.users import describe_users
from trainmount_fuse.settings import MountSettings
from trainmount_fuse.writes.journal import unsent_paths

__all__ = ["HolderOptions", "hold", "resume"]

logger = logging.getLogger(__name__)

MAX_READ_BYTES: Final = 16 << 20
"""Upper bound for one read; fs.fuse.max_pages_limit and the session's max_pages lower it."""

LOOKS_A_NAME_CHECK: Final = 2
"""Every how many looks of the supervisor the mount's name is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HolderOptions:
    """One mount on this machine."""

    mountpoint: Path

    settings: MountSettings

    ready_file: Path | None = None
    """Gets `{"holder_pid", "daemon_pid", ...}` whenever a daemon answers, in one step; removed at
    the end."""

    read_ahead_kib: int = READ_AHEAD_KIB
    """Takes effect as root."""

    on_mounted: Callable[[], None] | None = None
    """Called once, when the first daemon answers."""

    self_test: Callable[[], str | None] = takeover_fault_here
    """Tells in words why a mount dies with its daemon on this machine; None where it survives."""

    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Added to the daemon's environment; may hold credentials."""

    log_arguments: tuple[str, ...] = ()
    """Options of the command line that make a later program log like this one."""

    supervisor: SupervisorOptions = field(default_factory=SupervisorOptions)


def hold(options: HolderOptions) -> int:
    """Mount and serve until the end; an exit code (exit_codes.py).

    Raises:
        MountError: nothing is mounted then.
    """
    settings = options.settings
    check_places(settings, options.mountpoint)
    if find_mount(options.mountpoint) is None:
        check_mountpoint(options.mountpoint)
    if options.ready_file is not None:
        check_ready_file(options.ready_file)
    check_device()
    check_volume_aside(settings)
    with ExitStack() as stack:
        lock_fd = lock_folder(settings.state_dir)
        stack.callback(os.close, lock_fd)
        check_folders(settings)
        check_metrics_port(settings)
        if remove_dead_mount(options.mountpoint):
            logger.info("removed a dead mount", extra={"mountpoint": str(options.mountpoint)})
        fault = options.self_test()
        # A stop that comes in between would leave a mount without a server. The supervisor lets it
        # through; one that comes after it changes nothing any more.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            connection = _mount(options)
        except BaseException:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            raise
        fields = {"by": connection.mounted_by, "death_of_a_daemon_costs": fault or "nothing"}
        logger.info("mounted", extra=fields)
        return _Holder(options, connection, lock_fd, fault).run()


def resume(estate: Estate, supervisor: SupervisorOptions, log_arguments: Sequence[str]) -> int:
    """Go on with the mount that the program before this one held; an exit code.

    `supervisor` tells only how to serve; the rest of it was decided at the mount's beginning.
    """
    options = HolderOptions(
        mountpoint=estate.mountpoint,
        settings=settings_of(estate.configuration),
        ready_file=estate.ready_file,
        read_ahead_kib=estate.read_ahead_kib,
        environment=estate.configuration.get("environment", {}),
        log_arguments=tuple(log_arguments),
        supervisor=replace(
            supervisor,
            stop_timeout_seconds=estate.stop_timeout_seconds,
            hang_timeout_seconds=estate.hang_timeout_seconds,
        ),
    )
    connection = FuseConnection(
        fd=estate.fuse_fd,
        init_request=estate.init_request,
        device_minor=estate.device_minor,
        mountpoint=estate.mountpoint,
        mounted_by=estate.mounted_by,
    )
    holder = _Holder(options, connection, estate.lock_fd, estate.takeover_fault)
    return holder.run_on(estate)


class _Holder:
    """A mount that was made. Its name, its descriptor and its supervisor live as long as this."""

    def __init__(
        self,
        options: HolderOptions,
        connection: FuseConnection,
        lock_fd: int,
        fault: str | None,
    ) -> None:
        self._options = options
        self._connection = connection
        self._lock_fd = lock_fd
        self._fault = fault
        self._budget = RestartBudget()
        self._on_mounted = options.on_mounted
        self._registration = Registration(connection)
        self._kernel: dict[str, Any] = {}
        self._upgrade: Upgrade | None = None
        # Who asked for the end and waits for it; appended to by threads.
        self._waiting: list[socket.socket] = []
        self._num_looks = 0
        self._is_name_gone = False

    def run(self) -> int:
        """Serve a mount that nobody has served yet."""
        # Handles of another mount must not be taken for this one's.
        settings = replace(self._options.settings, mount_id=uuid.uuid4().hex)
        configuration = {
            "settings": json.loads(settings.to_json()),
            "environment": self._options.environment,
        }
        return self._run(lambda: self._serve(configuration))

    def run_on(self, estate: Estate) -> int:
        """Serve on where the program before this one stopped."""
        running = DaemonProcess.adopted(estate.daemon_pid, socket.socket(fileno=estate.control_fd))
        self._budget.note_ready()
        self._kernel = dict(estate.kernel)
        self._registration.inherit(estate.listener_fd)
        if estate.client_fd >= 0:
            give_answer(socket.socket(fileno=estate.client_fd), {"result": {"is_whole": True}})
        return self._run(lambda: self._serve(estate.configuration, running))

    def _run(self, serve: Callable[[], Ending]) -> int:
        try:
            ending = serve()
            while ending in (Ending.LOST, Ending.HANDED_ON):
                ending = self._mount_again() if ending is Ending.LOST else self._become_new()
        except BaseException:
            # Nothing of ours answers any more, so nobody shall wait.
            abort(self._connection)
            raise
        finally:
            if self._options.ready_file is not None:
                with suppress(OSError):
                    self._options.ready_file.unlink(missing_ok=True)
            self._registration.remove()
        if ending in (Ending.ENDED, Ending.UNSENT):
            self._clear()
        else:
            self._give_up()
        unsent = unsent_paths(self._options.settings.state_dir) if ending is Ending.UNSENT else []
        for client in self._waiting:
            give_answer(client, {"result": {"exit_code": ending.exit_code, "unsent": unsent[:20]}})
        return ending.exit_code

    def _serve(self, configuration: dict[str, Any], running: DaemonProcess | None = None) -> Ending:
        handover = Handover(
            fd=self._connection.fd,
            init_request=self._connection.init_request,
            role="first" if running is None else "successor",
            configuration=configuration,
        )
        self._supervisor = Supervisor(
            handover,
            replace(self._options.supervisor, can_take_over=self._fault is None),
            self._budget,
            on_ready=self._note_ready,
            release_mount=self._release,
            on_look=self._look,
            running=running,
        )
        listener = self._registration.make(self._options.settings)
        commands = None
        if listener is not None:
            commands = CommandSocket(listener, self._supervisor, self._heed_command)
        try:
            return self._supervisor.run()
        finally:
            if self._upgrade is not None:
                self._upgrade.cancel()
            if commands is not None:
                commands.close()

    def _mount_again(self) -> Ending:
        """Where no successor can take over: a new mount at the same place. Open files are lost,
        new ones work."""
        delay_seconds = self._budget.delay_after_death()
        if delay_seconds is None:
            return Ending.GAVE_UP
        logger.warning("mounting again; programs that had files open get an error")
        self._clear()
        self._registration.remove()
        self._connection = _mount(self._options)
        self._registration = Registration(self._connection)
        configuration = self._supervisor.handover.configuration
        settings = replace(settings_of(configuration), mount_id=uuid.uuid4().hex)
        return self._serve({**configuration, "settings": json.loads(settings.to_json())})

    def _note_ready(self, daemon_pid: int, message: dict[str, Any]) -> None:
        set_read_ahead(self._connection, self._options.read_ahead_kib)
        self._kernel = {
            **message.get("kernel", {}),
            "read_ahead_kib": read_ahead_kib(self._connection),
        }
        if self._options.ready_file is not None:
            document = {
                "holder_pid": os.getpid(),
                "daemon_pid": daemon_pid,
                "mountpoint": str(self._connection.mountpoint),
                "survives_daemon": self._fault is None,
                "takeover_fault": self._fault,
            }
            try:
                _write_whole(self._options.ready_file, document)
            except OSError as error:
                # A mount that serves is worth more than the news of it.
                reason = {"file": str(self._options.ready_file), "reason": error.strerror}
                logger.warning("the ready file cannot be written", extra=reason)
        if self._on_mounted is not None:
            self._on_mounted()
            self._on_mounted = None

    def _look(self) -> None:
        if self._upgrade is not None:
            self._upgrade.look()
        self._num_looks += 1
        if self._num_looks % LOOKS_A_NAME_CHECK == 0 and not self._is_name_gone:
            self._is_name_gone = not self._is_mounted()
            if self._is_name_gone:
                logger.warning(
                    "unmounted here, but open files or another mount namespace still use it: "
                    "served until they end",
                    extra={"end_it_with": f"kill {os.getpid()}"},
                )
        if self._is_name_gone and is_over(self._connection):
            self._supervisor.watchdog.hurry()

    # Commands.

    def _heed_command(self, request: dict[str, Any], client: socket.socket) -> None:
        wanted = request.get("want")
        if wanted == "status":
            give_answer(client, {"result": self._status()})
        elif wanted == "unmount" and request.get("is_forced"):
            self._waiting.append(client)
            self._supervisor.stop()
        elif wanted == "unmount":
            if self._supervisor.daemon is not None:
                self._supervisor.daemon.wake()
            self._supervisor.watchdog.hurry()
            # In a thread, because it waits for the daemon to take what the kernel still has.
            threading.Thread(
                target=self._try_unmount, args=(client,), name="unmount", daemon=True
            ).start()
        elif wanted == "remount":
            self._begin_upgrade(request, client)
        else:
            give_answer(client, {"error": f"the holder knows no {wanted!r}"})

    def _status(self) -> dict[str, Any]:
        daemon = self._supervisor.daemon
        return {
            "holder_pid": os.getpid(),
            "daemon_pid": None if daemon is None else daemon.pid,
            "is_ready": self._supervisor.is_ready,
            "num_deaths": self._budget.num_deaths,
            "survives_daemon": self._fault is None,
            "takeover_fault": self._fault,
            "mounted_by": self._connection.mounted_by,
            "is_name_gone": self._is_name_gone,
            "kernel": self._kernel,
            "log_arguments": self._options.log_arguments,
            "settings": self._supervisor.handover.configuration["settings"],
        }

    def _try_unmount(self, client: socket.socket) -> None:
        # Noted before: once the name is gone, the daemon and this process may end at any moment.
        self._waiting.append(client)
        try:
            unmount(self._connection.mountpoint)
        except MountError as error:
            self._waiting.remove(client)
            if not self._waiting:
                self._supervisor.watchdog.calm()
            users = describe_users(self._connection.mountpoint)
            give_answer(client, {"error": f"{error}{users}"})
            return
        self._supervisor.stop_released()

    def _begin_upgrade(self, request: dict[str, Any], client: socket.socket) -> None:
        if self._upgrade is not None and not self._upgrade.is_over:
            give_answer(client, {"error": "another remount of this mount is under way"})
            return
        self._upgrade = Upgrade(self._supervisor, request, client)
        self._upgrade.begin(self._estate(client))

    def _estate(self, client: socket.socket) -> Estate:
        """All that a program needs to be this one."""
        daemon = self._supervisor.daemon
        options = self._options
        return Estate(
            mountpoint=self._connection.mountpoint,
            device_minor=self._connection.device_minor,
            mounted_by=self._connection.mounted_by,
            init_request=self._connection.init_request,
            fuse_fd=self._connection.fd,
            daemon_pid=-1 if daemon is None else daemon.pid,
            control_fd=-1 if daemon is None else daemon.control.fileno(),
            lock_fd=self._lock_fd,
            listener_fd=self._registration.listener_fd,
            client_fd=client.fileno(),
            configuration=self._supervisor.handover.configuration,
            takeover_fault=self._fault,
            kernel=self._kernel,
            ready_file=options.ready_file,
            read_ahead_kib=options.read_ahead_kib,
            stop_timeout_seconds=options.supervisor.stop_timeout_seconds,
            hang_timeout_seconds=options.supervisor.hang_timeout_seconds,
        )

    def _become_new(self) -> Ending:
        """Become the program whose daemon serves already; only returns where that fails."""
        assert self._upgrade is not None
        upgrade, daemon = self._upgrade, self._supervisor.daemon
        try:
            self._estate(upgrade.client).become(upgrade.command, upgrade.environment)
        except OSError as error:
            logger.warning("the holder stays what it was", extra={"reason": error.strerror})
        give_answer(upgrade.client, {"result": {"is_whole": False}})
        return self._serve(self._supervisor.handover.configuration, daemon)

    # The end.

    def _release(self) -> None:
        try:
            unmount(self._connection.mountpoint)
        except MountError as error:
            logger.info("the mount is still used", extra={"reason": str(error)})

    def _clear(self) -> None:
        """Free the name; whoever still has files open there gets an error, because nobody serves
        them."""
        if self._is_mounted():
            # Closing our descriptor is not enough where the kernel still holds a thread of a killed
            # daemon, and the thread another one.
            abort(self._connection)
            unmount(self._connection.mountpoint, lazy=True)
        os.close(self._connection.fd)

    def _give_up(self) -> None:
        # The dead mount stays at its name. Without it programs would write into the directory
        # below, and nobody would notice.
        # Closing the last descriptor aborts the connection.
        os.close(self._connection.fd)
        logger.error(
            "the mount is dead and has to be unmounted by hand",
            extra={"command": f"umount {self._connection.mountpoint}"},
        )

    def _is_mounted(self) -> bool:
        mount = find_mount(self._connection.mountpoint)
        return mount is not None and mount.device_minor == self._connection.device_minor


def _mount(options: HolderOptions) -> FuseConnection:
    settings = options.settings
    return mount_fuse(
        options.mountpoint,
        name=settings.source,
        allow_other=settings.allow_other,
        read_only=settings.read_only,
        max_read_bytes=MAX_READ_BYTES,
    )


def _write_whole(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document) + "\n", encoding="utf-8")
    temporary.replace(path)
