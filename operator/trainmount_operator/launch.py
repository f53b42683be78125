"""The script that starts a job's command in a pod.

Called by `children`, which puts it into the attempt's ConfigMap. It needs bash of the image, and
`sleep`, `tee` and `tail`, which are where bash is.
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
#
# A launcher's own report is longer than the 2 KiB of log that a kubelet keeps of a failed program,
# so the error of the program itself would never be among them. Standard error therefore goes
# through `tee`, which hands it on as it comes, and its end is searched for the lines that
# `telling` chooses from. Without such lines the kubelet keeps the end of the log.
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

# The cluster's name servers learn of node 0 one after the other, and each question may reach
# another one: a name counts as known after several answers. Node 0 knows its own.
wanted=5 known=0
[[ ${{NODE_RANK:-}} == 0 ]] && wanted=1
until (( known >= wanted )); do
  if resolves; then
    (( known += 1 ))
    sleep 0.1
    continue
  fi
  known=0
  if (( SECONDS >= ${{TRAINMOUNT_RENDEZVOUS_SECONDS:-300}} )); then
    message="{MESSAGE_PREFIX} the name $MASTER_ADDR of node 0 did not resolve within $SECONDS s"
    printf '%s\\n' "$message" >&2
    printf '%s' "$message" > /dev/termination-log
    exit {RENDEZVOUS_EXIT_CODE}
  fi
  sleep 0.5
done

last_errors=/dev/shm/trainmount-last-errors
exec 3>&2
if command -v tee > /dev/null && command -v tail > /dev/null && : 2> /dev/null > "$last_errors"
then
  exec 2> >(
    trap '' TERM INT
    {{ tee /dev/fd/9 >&3; }} 9>&1 | tail -c 65536 > "$last_errors" 2> /dev/null
  )
  copier=$!
fi

# Writes the lines that say why the command failed, the last of them, as far as a kubelet reads.
explain() {{
  local line text=''
  local error='^(\\[[a-z0-9]+\\]: *)?[A-Za-z_.0-9]*[A-Z][A-Za-z0-9]*'
  error+='(Error|Exception|Interrupt|Exit|Failure|Timeout)(:|$)'
  local report='(Root Cause|^ *rank +: [0-9]+ \\(local_rank)'
  while IFS= read -r line || [[ -n $line ]]; do
    [[ $line =~ $error || $line =~ $report ]] && text+="${{line:0:400}}"$'\\n'
  done < "$last_errors"
  (( ${{#text}} > 3500 )) && text=${{text: -3500}}
  [[ $text =~ (Error|Exception|Interrupt|Exit|Failure|Timeout)(:|$'\\n') ]] || return 0
  printf '%s' "$text" > /dev/termination-log
}}

set -m
bash -euo pipefail -c "$(< /trainmount/job/command.sh)" 3>&- &
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
if [[ -n ${{copier:-}} ]]; then
  exec 2>&3
  # What it left behind may hold the pipe open for ever.
  for (( tries = 0; tries < 20; tries++ )); do
    kill -0 "$copier" 2> /dev/null || break
    sleep 0.1
  done
  (( code == 0 || stopping )) || explain 2> /dev/null
fi
exit "$code"
"""
