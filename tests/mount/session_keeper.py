"""The privileged half of a mount that a pod serves: mounts, or gets the mount back, and keeps it
until SIGTERM.

    session_keeper.py MOUNTPOINT FOLDER ALLOWED_UID

FOLDER has the sockets `keeper` and `reclaim`; `ready` in it gets this process's id when a daemon
answers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from trainmount_fuse.session.handover import HandoverError, Keeper, reclaim
from trainmount_fuse.session.mounting import connection_of, find_mount, mount_fuse


def main() -> int:
    mountpoint, folder, uid = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    configuration = {"settings": {}, "environment": {"STAMP": "one"}}
    role = "first"
    if find_mount(mountpoint) is None:
        connection = mount_fuse(mountpoint, name="toy", allow_other=True, read_only=False)
    else:
        try:
            got = reclaim(folder / "reclaim", 30)
        except HandoverError as error:
            print(error, file=sys.stderr)
            return 1
        connection = connection_of(mountpoint, got.fd, got.init_request)
        configuration, role = got.configuration, "successor"
    keeper = Keeper(
        folder / "keeper", connection, configuration, allowed_uids=frozenset({uid}), role=role
    )
    keeper.start()
    if not keeper.wait_ready(60):
        return 1
    temporary = folder / "ready.new"
    temporary.write_text(json.dumps({"pid": os.getpid(), "role": role}))
    temporary.replace(folder / "ready")
    signal.sigwait({signal.SIGTERM})
    keeper.close()
    return 0


if __name__ == "__main__":
    # Before any thread is there, so that all of them leave the signal to sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sys.exit(main())
