"""Which files of a directory are guessed when it is read once more."""

from __future__ import annotations

import random

from trainmount_files.volume import FileStat
from trainmount_fuse.reads.next_files import NextFiles

FILE_BYTES = 100
ENTRIES = {
    name: FileStat(name, False, FILE_BYTES, version="1")
    for name in (f"f{number:03}" for number in range(320))
}


def read(files: NextFiles, name: str, max_bytes: int = 1 << 20) -> list[str]:
    """What is guessed, and fetched at once, when the reading of a file begins."""
    folder = files.begin(1, name, ENTRIES, 0.0)
    assert folder is not None
    files.take_used(folder, name)
    guessed = files.scattered(folder, max_bytes)
    for other in guessed:
        files.note_scattered(folder, other, FILE_BYTES)
    return guessed


def in_no_order(seed: int) -> list[str]:
    return random.Random(seed).sample(list(ENTRIES), len(ENTRIES))


def test_in_the_second_round_the_rest_is_guessed_from_the_beginning_on() -> None:
    files = NextFiles()
    guessed = [name for name in in_no_order(1) for name in read(files, name)]
    assert len(guessed) > 250
    fresh = 0
    here: set[str] = set()
    for number, name in enumerate(in_no_order(2), 1):
        fresh += name not in here
        here.update(read(files, name))
        if number == 40:
            # Twice as many as were read, eight at once.
            assert 80 <= len(here) <= 88
    assert fresh < 120


def test_who_reads_a_few_files_again_has_few_others_fetched() -> None:
    files = NextFiles()
    for name in in_no_order(1):
        read(files, name)
    assert len([name for _ in range(50) for name in read(files, "f007")]) <= 8


def test_a_file_that_is_read_again_before_the_end_begins_no_round() -> None:
    files = NextFiles()
    order = in_no_order(1)
    for name in order[:200]:
        read(files, name)
    folder = files.find(1)
    assert folder is not None
    read(files, order[0])
    assert (folder.num_read, folder.was_scattered) == (200, False)
