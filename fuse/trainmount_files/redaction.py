"""What must not be said: tokens and the signed part of URLs. Every message and log line of the
Files API passes here.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["one_line", "quiet_urls"]

_MAX_CHARACTERS: Final = 300

_MAX_EXAMINED: Final = 2000

_SECRETS: Final = (
    # The path of a signed URL may be the secret, not only its query.
    (re.compile(r"(?i)\b(https?)://[^\s\"'<>]+"), r"\1://<redacted>"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',;<>]+"), r"\1 <redacted>"),
    (re.compile(r"\bdapi[0-9A-Za-z-]{8,}"), "<redacted>"),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+(\.[\w-]*)?"), "<redacted>"),
    (
        re.compile(
            r"(?i)([\w-]{0,64}(?:signature|token|secret|credential|password|\bsig)[\w-]{0,64})"
            r"(\"?\s*[=:]\s*\"?)[^\s\"'&,;<>}]+"
        ),
        r"\1\2<redacted>",
    ),
)


def one_line(text: str, *secrets: str) -> str:
    """`text` for a person: one line, bounded, without `secrets` or anything that looks like one."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "<redacted>")
    # Cut before the patterns, which take their time on a long line; each begins before its secret.
    text = text[:_MAX_EXAMINED]
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…"


class _Request(threading.local):
    is_ours = False


_REQUEST: Final = _Request()


class _HideUrls(logging.Filter):
    """urllib3 logs each request's target at DEBUG; of ours the target may be a signature."""

    def filter(self, record: logging.LogRecord) -> bool:
        if _REQUEST.is_ours and isinstance(record.args, tuple):
            record.args = tuple("/<redacted>" if _is_url(value) else value for value in record.args)
        return True


def _is_url(value: object) -> bool:
    # Through a proxy the target is a whole URL.
    return isinstance(value, str) and value.startswith(("/", "http://", "https://"))


@contextmanager
def quiet_urls() -> Iterator[None]:
    """Within it, this thread's requests through urllib3 are logged without their targets."""
    logger = logging.getLogger("urllib3.connectionpool")
    if not any(isinstance(known, _HideUrls) for known in logger.filters):
        logger.addFilter(_HideUrls())
    before = _REQUEST.is_ours
    _REQUEST.is_ours = True
    try:
        yield
    finally:
        _REQUEST.is_ours = before
