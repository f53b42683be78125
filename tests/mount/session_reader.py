"""Reads at random in several threads and checks each word, until standard input ends. Run by the
tests of the session.

    session_reader.py FILE COUNTER

Each 8-byte word of FILE is its own offset. The number of right reads stands in COUNTER, 8 bytes,
little-endian.
"""

from __future__ import annotations

import os
import random
import struct
import sys
import threading
import time

NUM_THREADS = 4
READ_BYTES = 4096


def main() -> int:
    file, counter = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_WRONLY)
    num_pages = os.fstat(file).st_size // READ_BYTES
    lock, counts, done = threading.Lock(), [0], threading.Event()

    def read() -> None:
        worst = 0.0
        try:
            while not done.is_set():
                offset, began = READ_BYTES * random.randrange(num_pages), time.monotonic()
                data = os.pread(file, READ_BYTES, offset)
                worst = max(worst, time.monotonic() - began)
                if data != struct.pack("<512Q", *range(offset, offset + READ_BYTES, 8)):
                    raise AssertionError(f"wrong bytes at {offset}")
                with lock:
                    counts[0] += 1
                    os.pwrite(counter, struct.pack("<Q", counts[0]), 0)
        except (OSError, AssertionError) as error:
            print(repr(error), flush=True)
            os._exit(1)
        print(f"worst pause {worst:.2f} s")

    threads = [threading.Thread(target=read) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    done.set()
    for thread in threads:
        thread.join()
    print(f"{counts[0]} reads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
