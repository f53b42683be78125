"""`trainmount mount` with session_toy_daemon.py for its daemon and little patience. Run by the
tests of the session.

    session_toy_holder.py FAULT mount SOURCE MOUNTPOINT ...

With FAULT `no-takeover` the daemon is the real one, on a kernel that repeats no request; with
`impatient` it is session_impatient_daemon.py.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from trainmount_fuse.main import main
from trainmount_fuse.session import holder, restarts, supervisor

if __name__ == "__main__":
    fault = sys.argv.pop(1)
    program = "session_impatient_daemon.py" if fault == "impatient" else "session_toy_daemon.py"
    toy = str(Path(__file__).with_name(program))
    # A process less for each mount; the mounts of real volumes run the real test.
    answer = "so that the test sees it" if fault == "no-takeover" else None
    holder.HolderOptions = functools.partial(  # type: ignore[assignment, misc]
        holder.HolderOptions, self_test=lambda: answer
    )
    if fault != "no-takeover":
        supervisor.SupervisorOptions = functools.partial(  # type: ignore[assignment, misc]
            supervisor.SupervisorOptions, daemon_command=(sys.executable, toy, fault)
        )
    if fault in ("start", "read"):
        policy = restarts.RestartPolicy(max_failed_starts=3, max_deaths=3)
        budget = functools.partial(restarts.RestartBudget, policy)
        holder.RestartBudget = restarts.RestartBudget = budget  # type: ignore[assignment, misc]
    sys.exit(main())
