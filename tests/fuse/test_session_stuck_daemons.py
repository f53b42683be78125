"""A daemon that is dead but for a thread which the kernel does not let go."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from trainmount_fuse.session.process import DaemonProcess, has_died

LEADER_EXITS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("started", flush=True)
ctypes.CDLL(None).syscall(60, 7)  # exit: of this thread alone
"""


def test_a_process_whose_threads_outlive_it_is_dead_and_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    with (
        theirs,
        subprocess.Popen([sys.executable, "-c", LEADER_EXITS], stdout=subprocess.PIPE) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        daemon = DaemonProcess.adopted(child.pid, ours)
        while not daemon.is_dead:
            time.sleep(0.001)
        assert os.waitpid(child.pid, os.WNOHANG) == (0, 0)
        assert daemon.wait() == 7
        os.kill(child.pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{child.pid}"):  # noqa: PTH110
            # Swept up as soon as the thread is gone.
            assert not has_died(None)
            time.sleep(0.001)
        child.returncode = 7
        daemon.close()


def test_a_process_that_runs_is_not_dead_and_one_that_ended_says_how() -> None:
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:
        daemon = DaemonProcess.adopted(child.pid, ours)
        assert not has_died(daemon)
        daemon.tell(signal.SIGTERM)
        assert daemon.wait() == -signal.SIGTERM
        child.returncode = -signal.SIGTERM
        daemon.close()
