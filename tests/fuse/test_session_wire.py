"""Messages and descriptors over a Unix socket."""

from __future__ import annotations

import os
import socket

import pytest

from trainmount_fuse.session import wire
from trainmount_fuse.session.handover import Handover


@pytest.fixture
def pair():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


def test_a_message_arrives_whole_with_a_descriptor_that_no_child_inherits(pair):
    reader, writer = os.pipe()
    wire.send(pair[0], {"role": "first", "text": "x" * 100_000}, writer)
    message, fd = wire.receive(pair[1])
    assert message == {"role": "first", "text": "x" * 100_000}
    assert not os.get_inheritable(fd)
    os.write(fd, b"through")
    assert os.read(reader, 16) == b"through"
    for one in (reader, writer, fd):
        os.close(one)


def test_the_end_of_the_connection_is_none(pair):
    pair[0].close()
    assert wire.receive(pair[1]) == (None, None)


def test_a_message_above_the_limit_is_refused_before_it_is_sent(pair):
    with pytest.raises(ValueError, match="is above"):
        wire.send(pair[0], {"text": "x" * wire.MAX_MESSAGE_BYTES})


@pytest.mark.parametrize("data", [b"not json", b"[1]", b"[" * 100_000])
def test_what_is_no_message_is_an_error(pair, data):
    pair[0].send(data)
    with pytest.raises(ValueError, match=r"JSON|Expecting|nested"):
        wire.receive(pair[1])


def test_a_socket_in_a_folder_deeper_than_the_kernel_takes_is_reached(tmp_path):
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)
    with (
        wire.listen(folder / "socket") as server,
        wire.connect(folder / "socket", 10) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            wire.send(client, {"hello": 1})
            assert wire.receive(accepted)[0] == {"hello": 1}
            assert wire.peer_uid(accepted) == os.getuid()


def test_a_socket_that_was_left_over_is_replaced(tmp_path):
    wire.listen(tmp_path / "socket").close()
    with wire.listen(tmp_path / "socket"), wire.connect(tmp_path / "socket", 10):
        assert [path.name for path in tmp_path.iterdir()] == ["socket"]


def test_init_travels_unchanged():
    data = bytes(range(256))
    assert wire.decoded_init(wire.encoded_init(data)) == data


def test_a_handover_shows_no_credentials():
    handover = Handover(
        fd=3,
        init_request=b"",
        role="first",
        configuration={"environment": {"DATABRICKS_TOKEN": "sesame"}},
    )
    assert "sesame" not in repr(handover)
