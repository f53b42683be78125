"""The faults of the matrix as data: what is done to which answers, and what it must come to."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Final

from tests.files.faulty_wire import Answer, Break, Deed, Forward, Seen

from trainmount_files import (
    AlreadyExists,
    InexactRange,
    InvalidRequest,
    NoSpace,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    Unauthenticated,
    Unavailable,
    Unsupported,
    VolumeError,
)

__all__ = [
    "BODIES",
    "FAULTS",
    "JSON",
    "PRESIGNED",
    "STORES",
    "Fault",
    "fault_named",
    "refused_port",
]

BODIES: Final = frozenset({"get_file", "presigned_get"})
JSON: Final = frozenset(
    {"list_directory", "create_download_url", "initiate_upload", "create_upload_part_urls"}
)
HEADS: Final = frozenset({"head_file"})
STORES: Final = frozenset({"put_file", "presigned_put"})
PRESIGNED: Final = frozenset({"presigned_get", "presigned_put"})


@dataclass(frozen=True)
class Fault:
    """One way in which an answer goes wrong."""

    name: str
    deed: Break
    error: type[VolumeError] = Unavailable
    """What it means when it does not pass."""
    passes: bool = True
    """Whether another try is worth while: a single occurrence must then not be seen."""
    routes: frozenset[str] | None = None
    """Where it makes sense; None is everywhere."""
    acts: bool = False
    """The server may have carried the request out."""
    mends: bool = False
    """However often it happens, the call comes through."""
    cut_upload: int | None = None


def _status(status: int, retry_after: str | None = None, body: bytes | None = None) -> Break:
    def deed(seen: Seen, _: Forward) -> Deed:
        said = json.dumps({"error_code": "INJECTED", "message": f"Injected {status}"}).encode()
        content = b"" if seen.method == "HEAD" else said if body is None else body
        answer = Answer(status).with_body(content)
        if retry_after is not None:
            answer = answer.header("Retry-After", retry_after)
        return Deed(answer.encode())

    return deed


def _changed(change: Callable[[Seen, Answer], Answer], then: str = "keep") -> Break:
    """The server's answer with something about it changed."""

    def deed(seen: Seen, forward: Forward) -> Deed:
        answer = change(seen, forward())
        data = answer.head() if seen.method == "HEAD" else answer.encode()
        return Deed(data, then)

    return deed


def _cut(keep: Callable[[int], int], *, dated: bool = True) -> Break:
    def deed(_: Seen, forward: Forward) -> Deed:
        answer = forward()
        if answer.status >= 300:
            return Deed(answer.encode())
        if not dated:
            answer = answer.header("Last-Modified", None)
        return Deed(answer.head() + answer.body[: keep(len(answer.body))], "close")

    return deed


def _raw(data: bytes, then: str = "close") -> Break:
    return lambda _seen, _forward: Deed(data, then)


def _after(data: bytes, then: str) -> Break:
    """Let the server act, then answer with `data`."""

    def deed(_: Seen, forward: Forward) -> Deed:
        forward()
        return Deed(data, then)

    return deed


def _silent(_: Seen, forward: Forward) -> Deed:
    return Deed(forward().encode(), silence_seconds=5.0)


def _stalled(_: Seen, forward: Forward) -> Deed:
    answer = forward()
    return Deed(answer.encode(), stall_after=len(answer.head()) + len(answer.body) // 2)


def _slow(_: Seen, forward: Forward) -> Deed:
    data = forward().encode()
    return Deed(data, piece_bytes=max(len(data) // 5, 1), pause_seconds=0.01)


def _prefixed(prefix: bytes) -> Break:
    """An interim answer, then the real one."""
    return lambda seen, forward: Deed(
        prefix + (forward().head() if seen.method == "HEAD" else forward().encode())
    )


def _chunked(_: Seen, forward: Forward) -> Deed:
    answer = forward().header("Content-Length", None).header("Transfer-Encoding", "chunked")
    half = len(answer.body) // 2
    chunks = [piece for piece in (answer.body[:half], answer.body[half:]) if piece]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in chunks)
    return Deed(answer.head() + framed + b"0\r\n\r\n")


def _shifted(seen: Seen, forward: Forward) -> Deed:
    answer = forward()
    if answer.status != 206:
        return Deed(answer.encode())
    said = answer.headers["Content-Range"]
    first, last = said.removeprefix("bytes ").partition("/")[0].split("-")
    total = said.partition("/")[2]
    moved = f"bytes {int(first) + 16}-{int(last) + 16}/{total}"
    return Deed(answer.header("Content-Range", moved).encode())


def _whole(_: Seen, answer: Answer) -> Answer:
    # The rest of the file is nonsense: not one byte of it may be taken for the range.
    if answer.status != 206:
        return answer
    plain = Answer(200, "OK", answer.headers).header("Content-Range", None)
    return plain.with_body(b"\xaa" * (len(answer.body) + 1000))


def _longer(_: Seen, forward: Forward) -> Deed:
    answer = forward().header("Content-Length", None).header("Connection", "close")
    return Deed(answer.encode() + b"more", "close")


def _gzipped(seen: Seen, answer: Answer) -> Answer:
    if seen.method == "HEAD":
        return answer.header("Content-Encoding", "gzip").header("Content-Length", "29")
    return answer.header("Content-Encoding", "gzip").with_body(gzip.compress(answer.body))


def _another_total(_: Seen, answer: Answer) -> Answer:
    said = answer.headers.get("Content-Range")
    if said is None:
        return answer
    part, _, total = said.partition("/")
    return answer.header("Content-Range", f"{part}/{int(total) + 7}")


def _off_by(count: int) -> Break:
    def deed(_: Seen, forward: Forward) -> Deed:
        answer = forward()
        stated = str(max(len(answer.body) + count, 0))
        return Deed(answer.header("Content-Length", stated).encode(), "close")

    return deed


def _json(value: object) -> Break:
    return _changed(lambda _, answer: answer.with_body(json.dumps(value).encode()))


def _expired(status: int, code: str, message: str, detail: str = "") -> Break:
    said = f"<Code>{code}</Code><Message>{message}</Message>{detail}"
    document = f'<?xml version="1.0"?><Error>{said}</Error>'
    return _status(status, body=document.encode())


HTML: Final = b"<html><head><title>Sign in</title></head><body>Hotel Wi-Fi</body></html>"

STATUSES: Final[dict[int, tuple[type[VolumeError], bool]]] = {
    400: (InvalidRequest, False),
    401: (Unauthenticated, False),
    403: (PermissionDenied, False),
    404: (NotFound, False),
    408: (Unavailable, True),
    409: (AlreadyExists, False),
    412: (PreconditionFailed, False),
    416: (InexactRange, False),
    429: (Unavailable, True),
    500: (Unavailable, True),
    501: (Unsupported, False),
    502: (Unavailable, True),
    503: (Unavailable, True),
    504: (Unavailable, True),
    507: (NoSpace, False),
}
"""What a status means, and whether another try is worth while."""

NEAR: Final = {
    "past": "Wed, 21 Oct 2015 07:28:00 GMT",
    "garbage": "soon",
    "negative": "-1",
    "empty": "",
}
"""A `Retry-After` that asks for no wait that can be had: our own delays count."""

FAR: Final = {
    "day": "86400",
    "digits": "9" * 40,
    "date": formatdate(time.time() + 86400, usegmt=True),
}
"""Beyond every deadline here: the error comes at once."""


def _faults() -> list[Fault]:
    faults = []
    for status, (error, passes) in STATUSES.items():
        faults.append(Fault(f"{status}", _status(status), error, passes))
        if not passes:
            # Never looked at: one value suffices.
            faults.append(Fault(f"{status}-after-day", _status(status, "86400"), error, False))
            continue
        for label, value in (NEAR if status in (429, 503) else {}).items():
            faults.append(Fault(f"{status}-after-{label}", _status(status, value), error, passes))
        for label, value in (FAR if status in (429, 503) else {"day": FAR["day"]}).items():
            faults.append(Fault(f"{status}-after-{label}", _status(status, value), error, False))
    faults += [
        Fault("500-done", _after(Answer(500).with_body(b"").encode(), "keep"), acts=True),
        Fault("403-html", _status(403, body=HTML), PermissionDenied, False),
        Fault("403-empty", _status(403, body=b""), PermissionDenied, False),
        Fault(
            "403-huge",
            _status(403, body=HTML * 20_000),
            PermissionDenied,
            False,
            routes=BODIES | JSON | STORES,
        ),
        Fault(
            "403-cut",
            _raw(b"HTTP/1.1 403 No\r\nContent-Length: 90\r\n\r\n{"),
            PermissionDenied,
            False,
        ),
        Fault(
            "redirect",
            _raw(
                b"HTTP/1.1 307 R\r\nLocation: http://127.0.0.1:9/x\r\nContent-Length: 0\r\n\r\n",
                "keep",
            ),
            Unsupported,
            False,
        ),
        Fault("reset", _raw(b"", "reset")),
        Fault("hang-up", _raw(b"")),
        Fault("reset-in-head", _raw(b"HTTP/1.1 200 OK\r\nConte", "reset")),
        Fault("hang-up-in-head", _raw(b"HTTP/1.1 2")),
        Fault("lost-reply", _after(b"", "close"), acts=True),
        Fault("lost-reply-reset", _after(b"", "reset"), acts=True),
        Fault("garbage", _raw(b"\x16\x03\x01\x00garbage\xff\xfe\n\n" * 20)),
        Fault("garbage-when-done", _after(b"SSH-2.0-OpenSSH_9.2\r\n", "close"), acts=True),
        Fault("endless-line", _raw(b"HTTP/1.1 200 " + b"x" * 70_000)),
        Fault("many-headers", _raw(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 300 + b"\r\n")),
        Fault("silence", _silent, acts=True),
        Fault("stall", _stalled, routes=BODIES | JSON),
        Fault("slow", _slow, mends=True),
        Fault("continue-first", _prefixed(b"HTTP/1.1 100 Continue\r\n\r\n"), mends=True),
        Fault(
            "early-hints", _prefixed(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"), acts=True
        ),
        Fault(
            "switching",
            _prefixed(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"),
            acts=True,
        ),
        Fault("chunked", _chunked, mends=True, routes=BODIES | JSON),
        Fault(
            "no-length",
            _changed(lambda _, a: a.header("Content-Length", None), "close"),
            mends=True,
            routes=BODIES | JSON,
        ),
        Fault("cut-0", _cut(lambda _: 0), routes=BODIES | JSON),
        Fault("cut-1", _cut(lambda _: 1), routes=JSON),
        Fault("cut-third", _cut(lambda size: size // 3 + 1), routes=BODIES, mends=True),
        Fault("cut-middle", _cut(lambda size: size // 2), routes=JSON),
        Fault("cut-last", _cut(lambda size: max(size - 1, 0)), routes=JSON),
        Fault("cut-last-byte", _cut(lambda size: max(size - 1, 1)), routes=BODIES, mends=True),
        Fault("cut-undated", _cut(lambda size: size // 2, dated=False), routes=BODIES),
        Fault("ignored-range", _changed(_whole), InexactRange, routes=BODIES),
        Fault("shifted", _shifted, InexactRange, routes=BODIES),
        Fault("another-total", _changed(_another_total), PreconditionFailed, False, routes=BODIES),
        Fault(
            "no-content-range",
            _changed(lambda _, a: a.header("Content-Range", None)),
            InexactRange,
            routes=BODIES,
        ),
        Fault(
            "bad-content-range",
            _changed(lambda _, a: a.header("Content-Range", "bytes a-b/c")),
            InexactRange,
            routes=BODIES,
        ),
        Fault("longer", _longer, InexactRange, routes=BODIES),
        Fault("length-less", _off_by(-3), InexactRange, routes=BODIES),
        Fault("length-more", _off_by(3), InexactRange, routes=BODIES),
        Fault("length-less", _off_by(-3), routes=JSON),
        Fault("length-more", _off_by(3), routes=JSON),
        Fault(
            "length-words",
            _changed(lambda _, a: a.header("Content-Length", "many"), "close"),
            InexactRange,
            routes=BODIES,
        ),
        Fault("gzip", _changed(_gzipped), InexactRange, routes=BODIES),
        Fault("gzip", _changed(_gzipped), routes=JSON),
        Fault("gzip", _changed(_gzipped), passes=False, routes=HEADS),
        Fault(
            "html-instead",
            _changed(lambda _, a: Answer(200, "OK").with_body(HTML)),
            InexactRange,
            routes=BODIES,
        ),
        Fault(
            "html-instead", _changed(lambda _, a: Answer(200, "OK").with_body(HTML)), routes=JSON
        ),
        Fault("empty-instead", _changed(lambda _, a: a.with_body(b"")), routes=JSON),
        Fault("no-json", _changed(lambda _, a: a.with_body(b'{"contents": [')), routes=JSON),
        Fault("json-list", _json([1, 2]), routes=JSON),
        Fault("json-null", _json(None), routes=JSON),
        Fault("json-deep", _changed(lambda _, a: a.with_body(b"[" * 200_000)), routes=JSON),
        Fault("json-bytes", _changed(lambda _, a: a.with_body(b'{"a": "\xff\xfe"}')), routes=JSON),
        Fault("huge", _changed(lambda _, a: a.with_body(b" " * (33 << 20))), routes=JSON),
        Fault(
            "no-size",
            _changed(lambda _, a: a.header("Content-Length", None)),
            passes=False,
            routes=HEADS,
        ),
        Fault(
            "odd-size",
            _changed(lambda _, a: a.header("Content-Length", "9" * 5000)),
            passes=False,
            routes=HEADS,
        ),
        Fault(
            "no-last-modified",
            _changed(lambda _, a: a.header("Last-Modified", None)),
            mends=True,
            routes=BODIES | HEADS,
        ),
        Fault(
            "bad-last-modified",
            _changed(lambda _, a: a.header("Last-Modified", "yesterday")),
            mends=True,
            routes=BODIES | HEADS,
        ),
        Fault(
            "expired-aws",
            _expired(403, "AccessDenied", "Request has expired"),
            PermissionDenied,
            routes=PRESIGNED,
        ),
        Fault(
            "expired-token",
            _expired(400, "ExpiredToken", "The provided token has expired."),
            InvalidRequest,
            routes=PRESIGNED,
        ),
        Fault(
            "expired-azure",
            _expired(
                403,
                "AuthenticationFailed",
                "Server failed to authenticate.",
                "<AuthenticationErrorDetail>Signature not valid in the specified time frame: now"
                "</AuthenticationErrorDetail>",
            ),
            PermissionDenied,
            routes=PRESIGNED,
        ),
        Fault("upload-cut-0", _raw(b""), cut_upload=0, routes=STORES),
        Fault("upload-cut-middle", _raw(b""), cut_upload=7000, routes=STORES),
    ]
    return faults


FAULTS: Final = _faults()


def fault_named(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def refused_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return int(closed.getsockname()[1])
