"""FUSE_INIT, as a 6.18 kernel sends it and libfuse 3.14 answers it."""

from __future__ import annotations

import struct

import pytest

from trainmount_fuse.session.init_reply import (
    DEFAULT_MAX_PAGES,
    HANDLE_KILLPRIV_V2,
    HAS_RESEND,
    INIT_EXT,
    MAX_PAGES,
    PARALLEL_DIROPS,
    InitRequest,
    KernelLimits,
    improved_reply,
    max_pages_limit,
)

UNIQUE = 2
OFFERED = 0x73FFFFFB
"""Low half of what Linux 6.18 offers, without the extension bit's neighbours."""


def _request(flags: int = OFFERED | INIT_EXT, flags2: int = 0x5FD, minor: int = 45) -> bytes:
    body = struct.pack("<IIIII", 7, minor, 131072, flags, flags2) + bytes(44)
    return struct.pack("<IIQQIIII", 40 + len(body), 26, UNIQUE, 0, 0, 0, 0, 0) + body


def _reply(flags: int = 0x4040B039, error: int = 0, unique: int = UNIQUE) -> bytes:
    fields = (7, 38, 131072, flags, 12, 9, 1 << 20, 1, 256, 0, 0, 0)
    body = struct.pack("<IIIIHHIIHHII", *fields) + bytes(24)
    return struct.pack("<IiQ", 16 + len(body), error, unique) + body


def _fields(reply: bytes) -> tuple[int, ...]:
    return struct.unpack_from("<IIIIHHIIHHII", reply, 16)


def test_the_kernels_offer_is_read_with_both_halves_of_its_flags():
    request = InitRequest.parse(_request())
    assert (request.major, request.minor, request.unique) == (7, 45, UNIQUE)
    assert request.max_read_ahead_bytes == 131072
    assert request.flags & HAS_RESEND
    assert request.can_resend


def test_a_kernel_that_does_not_extend_its_flags_cannot_repeat_requests():
    request = InitRequest.parse(_request(flags=OFFERED & ~INIT_EXT))
    assert not request.can_resend


def test_an_old_short_init_is_read_too():
    message = _request(flags=0)[:56]
    request = InitRequest.parse(struct.pack("<I", 56) + message[4:])
    assert request.flags == 0


@pytest.mark.parametrize(
    "message",
    [b"", bytes(104), _request()[:-1], struct.pack("<IIQ", 104, 3, 1) + bytes(88)],
    ids=["empty", "zeros", "cut", "another opcode"],
)
def test_anything_else_is_not_taken_for_init(message):
    with pytest.raises(ValueError, match="FUSE_INIT"):
        InitRequest.parse(message)


def test_the_reply_asks_for_what_pyfuse3_cannot_and_changes_nothing_else():
    old = _reply()
    new = improved_reply(old, InitRequest.parse(_request()), KernelLimits(), pages_limit=4096)
    before, after = _fields(old), _fields(new)
    assert after[3] == before[3] | PARALLEL_DIROPS | HANDLE_KILLPRIV_V2
    assert after[4:6] == (1024, 768)
    assert after[8] == 4096
    assert after[2] >= before[2]
    unchanged = (0, 1, 6, 7, 9, 10, 11)
    assert [after[i] for i in unchanged] == [before[i] for i in unchanged]
    assert len(new) == len(old)
    assert new[:16] == old[:16]
    assert new[64:] == old[64:]


def test_the_machines_limit_on_pages_holds():
    new = improved_reply(_reply(), InitRequest.parse(_request()), KernelLimits(), pages_limit=256)
    assert _fields(new)[8] == 256


def test_pages_stay_as_they_are_where_they_were_not_negotiated():
    reply = _reply(flags=0x4040B039 & ~MAX_PAGES)
    new = improved_reply(reply, InitRequest.parse(_request()), KernelLimits(), pages_limit=4096)
    assert _fields(new)[8] == 256


@pytest.mark.parametrize("flag", [PARALLEL_DIROPS, HANDLE_KILLPRIV_V2])
def test_what_a_kernel_does_not_offer_is_not_asked_of_it(flag):
    request = InitRequest.parse(_request(flags=(OFFERED & ~flag) | INIT_EXT))
    new = improved_reply(_reply(), request, KernelLimits(), pages_limit=256)
    assert not _fields(new)[3] & flag


@pytest.mark.parametrize(
    ("flag", "limits"),
    [
        (PARALLEL_DIROPS, KernelLimits(parallel_directory_operations=False)),
        (HANDLE_KILLPRIV_V2, KernelLimits(drop_privileges_here=False)),
    ],
)
def test_what_is_turned_off_is_not_asked_for(flag, limits):
    new = improved_reply(_reply(), InitRequest.parse(_request()), limits, pages_limit=256)
    assert not _fields(new)[3] & flag


@pytest.mark.parametrize(
    "reply",
    [b"", _reply()[:40], _reply(error=-71), _reply(unique=4), _reply() + b"x"],
    ids=["empty", "cut", "refused", "of another request", "too long"],
)
def test_a_refusal_is_an_error(reply):
    with pytest.raises(ValueError, match="INIT"):
        improved_reply(reply, InitRequest.parse(_request()), KernelLimits(), pages_limit=256)


def test_the_machines_limit_is_at_least_one_page():
    assert max_pages_limit() >= 1
    assert DEFAULT_MAX_PAGES == 256
