"""Which reads count as forward reading or as equal steps, and how far read-ahead runs."""

from __future__ import annotations

from trainmount_fuse.reads.read_patterns import Streams

MIB = 1 << 20


def test_the_window_grows_with_each_read_that_goes_on_and_stops_at_its_bound() -> None:
    streams = Streams()
    small = [streams.follow(n << 16, 1 << 16, 64 * MIB).window_bytes // MIB for n in range(6)]
    assert small == [2, 8, 32, 64, 64, 64]


def test_who_reads_much_at_once_from_the_start_has_more_fetched_ahead_at_once() -> None:
    windows = {
        size: Streams().follow(0, size << 10, 64 * MIB).window_bytes // MIB
        for size in (4, 64, 128, 256, 1024, 4096)
    }
    assert windows == {4: 2, 64: 2, 128: 4, 256: 8, 1024: 32, 4096: 64}


def test_what_was_asked_for_is_not_asked_for_again() -> None:
    streams = Streams()
    stream = streams.follow(0, MIB, 64 * MIB)
    assert streams.window_ahead(stream) == (MIB, 33 * MIB)
    stream.scheduled_until = 33 * MIB
    stream = streams.follow(MIB, MIB, 64 * MIB)
    assert streams.window_ahead(stream) == (33 * MIB, 66 * MIB)


def test_random_reads_earn_no_window() -> None:
    streams = Streams()
    offsets = [500, 90, 7000, 333, 4100, 12, 2900, 8000, 600, 5100]
    assert {streams.follow(offset * MIB, 4096, 64 * MIB).window_bytes for offset in offsets} == {0}


def test_random_reads_of_several_requests_each_soon_earn_no_window_either() -> None:
    streams = Streams()
    windows = []
    for offset in (500, 90, 7000, 333, 4100, 12, 2900, 8000, 600, 5100):
        for request in range(3):
            stream = streams.follow((offset + request) * MIB, MIB, 64 * MIB)
        windows.append(stream.window_bytes)
    assert windows[3:] == [0] * 7


def test_who_reads_forward_after_random_reads_earns_a_window_again() -> None:
    streams = Streams()
    for offset in (500, 90, 7000, 333, 4100, 12):
        streams.follow(offset * MIB, MIB, 64 * MIB)
    windows = [streams.follow((3000 + n) * MIB, MIB, 64 * MIB).window_bytes for n in range(8)]
    assert windows[0] == 0
    assert windows[-1] == 64 * MIB


def test_readers_that_share_a_handle_are_told_apart() -> None:
    """Four processes read a quarter each, interleaved, through one descriptor."""
    streams = Streams()
    last = {}
    for step in range(8):
        for reader in range(4):
            offset = reader * 256 * MIB + step * MIB
            last[reader] = streams.follow(offset, MIB, 64 * MIB).window_bytes
    assert set(last.values()) == {64 * MIB}
    assert len(streams.streams) == 4


def test_reads_slightly_out_of_order_are_one_reader() -> None:
    streams = Streams()
    for offset in (0, 2, 1, 3, 5, 4, 6):
        stream = streams.follow(offset * MIB, MIB, 64 * MIB)
    assert len(streams.streams) == 1
    assert stream.window_bytes == 64 * MIB


def test_a_read_of_what_was_fetched_for_a_reader_is_that_readers() -> None:
    """The kernel asks for nothing that it was given: the next request is for one page far on."""
    streams = Streams()
    stream = streams.follow(0, MIB, 64 * MIB)
    stream.scheduled_until = 32 * MIB
    assert streams.follow(24 * MIB, 4096, 64 * MIB) is stream
    assert stream.next_offset == 24 * MIB + 4096


def test_equal_steps_are_seen_and_fetched_ahead_of() -> None:
    streams = Streams()
    ahead = []
    for number in range(6):
        stream = streams.follow((100 + 20 * number) * MIB, MIB, 64 * MIB)
        ahead += streams.steps_ahead(stream, 64 * MIB)
        assert streams.window_ahead(stream)[0] == streams.window_ahead(stream)[1]
    starts = [start // MIB for start, _stop in ahead]
    assert starts[:5] == [180, 200, 220, 240, 260]
    assert starts == sorted(set(starts))
    assert {stop - start for start, stop in ahead} == {MIB}


def test_steps_that_change_end_the_guesses() -> None:
    streams = Streams()
    for number in range(5):
        stream = streams.follow((100 + 20 * number) * MIB, MIB, 64 * MIB)
    stream = streams.follow(5000 * MIB, MIB, 64 * MIB)
    assert streams.steps_ahead(stream, 64 * MIB) == []


def test_steps_backward_are_not_guessed() -> None:
    streams = Streams()
    for number in range(8):
        stream = streams.follow((1000 - 20 * number) * MIB, MIB, 64 * MIB)
        assert streams.steps_ahead(stream, 64 * MIB) == []
