"""The script that starts a job's command in a pod.

Called by `children`, which puts it into the attempt's ConfigMap. It needs bash and `sleep` of the
image, nothing else.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MESSAGE_PREFIX", "RENDEZVOUS_EXIT_CODE", "START_SCRIPT"]

RENDEZVOUS_EXIT_CODE: Final = 78
"""The script's own exit code when MASTER_ADDR never resolved; together with `MESSAGE_PREFIX` it is
unmistakable.
"""

MESSAGE_PREFIX: Final = "trainmount:"
"""What a termination message of the script itself starts with."""

# The command has a process group of its own, so that SIGTERM reaches all of it: the first process
# of a container ignores signals it has no handler for, and a shell does not pass them on. After
# SIGTERM the whole group is awaited, because the shell that ran the command is gone at once while
# the launcher still saves a checkpoint.
START_SCRIPT: Final = f"""\
# Starts the job's command on this node: waits until the name of node 0 resolves, hands signals on.
set -uo pipefail
trap 'exit 143' TERM INT

resolves() {{
  if command -v getent > /dev/null 2>&1; then
    getent hosts "$MASTER_ADDR" > /dev/null 2>&1
  elif command -v python3 > /dev/null 2>&1; then
    python3 -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], None)' \\
      "$MASTER_ADDR" 2> /dev/null
  else
    return 0  # nothing here can tell
  fi
}}

until resolves; do
  if (( SECONDS >= ${{TRAINMOUNT_RENDEZVOUS_SECONDS:-300}} )); then
    message="{MESSAGE_PREFIX} the name $MASTER_ADDR of node 0 did not resolve within $SECONDS s"
    printf '%s\\n' "$message" >&2
    printf '%s' "$message" > /dev/termination-log
    exit {RENDEZVOUS_EXIT_CODE}
  fi
  sleep 0.5
done

set -m
bash -euo pipefail -c "$(cat /trainmount/job/command.sh)" &
group=$!
stopping=0 signalled=0
trap 'stopping=1 signalled=1; kill -TERM -- "-$group" 2> /dev/null' TERM INT
while :; do
  signalled=0
  wait "$group"
  code=$?
  # A trapped signal ends `wait` before the command does.
  (( signalled )) || break
done
while (( stopping )) && kill -0 -- "-$group" 2> /dev/null; do
  sleep 0.2
done
exit "$code"
"""
