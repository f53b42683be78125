"""`trainmount mount` with session_toy_daemon.py for its daemon and little patience. Run by the
tests of the session.

    session_toy_holder.py FAULT mount SOURCE MOUNTPOINT ...

With FAULT `no-takeover` the daemon is the real one, on a kernel that repeats no request; with
`impatient` it is session_impatient_daemon.py; with `attentive` the real one, missed after two
seconds; with `hasty` the real one, which counts a silent store as away after half a second; with
`stuck` or `stuck-idle` one that hangs and is missed late, unless the mount ends.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from session_impatient_daemon import serve_impatiently
from session_toy_daemon import serve_toy

from trainmount_fuse.main import main
from trainmount_fuse.session import daemon, holder, restarts, supervisor, watchdog

if __name__ == "__main__":
    fault = sys.argv.pop(1)
    # A process less for each mount; the mounts of real volumes run the real test.
    answer = "so that the test sees it" if fault == "no-takeover" else None
    holder.HolderOptions = functools.partial(  # type: ignore[assignment, misc]
        holder.HolderOptions, self_test=lambda: answer
    )
    changed: dict[str, Any] = {}
    if fault in ("hang", "attentive"):
        changed["hang_timeout_seconds"] = 2.0
    if fault == "impatient":
        changed["serve"] = serve_impatiently
    elif fault == "hasty":
        daemon.STORE_PATIENCE_SECONDS = 0.5  # type: ignore[misc]
    elif fault in ("stuck", "stuck-idle"):
        watchdog.HURRIED_SECONDS = 2.0  # type: ignore[misc]
        changed["serve"] = functools.partial(serve_toy, fault.replace("stuck", "hang"))
    elif fault not in ("no-takeover", "attentive"):
        changed["serve"] = functools.partial(serve_toy, fault)
    supervisor.SupervisorOptions = functools.partial(  # type: ignore[assignment, misc]
        supervisor.SupervisorOptions, **changed
    )
    if fault in ("start", "read"):
        policy = restarts.RestartPolicy(max_failed_starts=3, max_short_lives=3)
        budget = functools.partial(restarts.RestartBudget, policy)
        holder.RestartBudget = restarts.RestartBudget = budget  # type: ignore[assignment, misc]
    sys.exit(main())
