"""How a mount's status and the end of a command read to a person. Pure; called by both command
lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainmount_files.wording import files_text, printable, size_text
from trainmount_fuse.control.client import Answer

__all__ = [
    "evict_line",
    "failure_line",
    "flush_line",
    "progress_line",
    "status_lines",
    "warm_lines",
]


def status_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """A mount in some lines, the first of which says what is where. Files that need somebody come
    last, each with the place of its bytes.
    """
    yield f"{status['source']} on {status['mountpoint']}"
    session = status.get("session")
    if session is not None:
        yield _row("session", _session_text(session))
    if "error" in status:
        yield _row("daemon", status["error"])
        return
    uptime = _duration(status["daemon_uptime_seconds"])
    kind = ", read-only" if status["read_only"] else ""
    yield _row("daemon", f"process {status['daemon_pid']}, for {uptime}{kind}")
    cache, memory = status["cache"], status["memory"]
    used = _of(cache["cached_bytes"], cache["limit_bytes"])
    yield _row("cache", f"{used} in {cache['directory']}")
    resident = size_text(memory["resident_bytes"])
    yield _row(
        "memory", f"{_of(memory['used_bytes'], memory['limit_bytes'])} in use, {resident} resident"
    )
    if status["num_hidden_names"]:
        yield _row("hidden", f"{status['num_hidden_names']:,} names that no file system can show")
    yield _row("files", _files_text(status))
    for one in status["files"]:
        size = "" if one["size_bytes"] is None else f" ({size_text(one['size_bytes'])})"
        yield f"  {one['state']:<10}{printable(one['path'])}{size}"
        if one["reason"]:
            yield f"            {one['reason']}; its bytes are in {one['local_path']}"


def warm_lines(answer: Answer) -> Iterator[str]:
    """What `warm` did, and what it left out."""
    result = answer.result
    num_failed = len(answer.failed) - min(result["num_unfit"], len(answer.failed))
    failed = f"; {num_failed:,} failed" if num_failed else ""
    yield f"{files_text(result['num_done'])} in the cache, {size_text(result['num_bytes'])}{failed}"
    if result["num_unfit"]:
        left_out = f"{files_text(result['num_unfit'])}, {size_text(result['unfit_bytes'])}"
        yield f"{left_out}, left out: {result['full_reason']}"


def evict_line(answer: Answer) -> str:
    result = answer.result
    failed = f"; {len(answer.failed):,} failed" if answer.failed else ""
    looked = files_text(result["num_done"])
    return f"{looked} looked at, {size_text(result['freed_bytes'])} freed{failed}"


def flush_line(answer: Answer) -> str:
    result = answer.result
    if not result["num_dirty"]:
        return "everything is uploaded"
    num_sent = max(0, result["num_dirty"] - result["num_left"])
    left = f"; {files_text(result['num_left'])} not" if result["num_left"] else ""
    return f"{files_text(num_sent)} uploaded{left}"


def progress_line(verb: str, counts: Mapping[str, int]) -> str:
    done, found = counts["num_done"], counts["num_found"]
    return f"{verb} {done:,} of {found:,} files so far, {size_text(counts['num_bytes'])}"


def failure_line(failure: Mapping[str, str]) -> str:
    where = f"; its bytes are in {failure['bytes']}" if "bytes" in failure else ""
    return f"{printable(failure['path'])}: {failure['reason']}{where}"


def _row(title: str, text: str) -> str:
    return f"  {title:<10}{text}"


def _of(used: int, limit: int) -> str:
    return f"{size_text(used)} of {size_text(limit)}"


def _files_text(status: Mapping[str, Any]) -> str:
    parts = [f"{status['num_open_inodes']:,} open", f"{status['num_dirty_files']:,} to upload"]
    if status["num_failed_files"]:
        parts.append(f"{status['num_failed_files']:,} failed and kept")
    return ", ".join(parts)


def _session_text(session: Mapping[str, Any]) -> str:
    num_deaths = session["num_deaths"]
    restarts = "no restart" if not num_deaths else f"{num_deaths:,} restarts"
    if num_deaths == 1:
        restarts = "1 restart"
    survives = "survives its daemon"
    if not session["survives_daemon"]:
        survives = f"ends with its daemon: {session['takeover_fault']}"
    return f"kept by process {session['holder_pid']}, {restarts}, {survives}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
