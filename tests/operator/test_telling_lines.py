"""Which line of a failed program's last output a person is shown."""

from __future__ import annotations

import pytest

from trainmount_operator.telling import telling_line

TORCHRUN = """\
[rank1]: RuntimeError: Connection closed by peer
[rank2]: Traceback (most recent call last):
[rank2]: ValueError: bad sample 17
[rank3]: RuntimeError: Connection closed by peer
E1130 api.py:1010] failed (exitcode: 1) local_rank: 0 (pid: 18) of binary: /usr/bin/python3
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 3 (local_rank: 1)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_09:00:00
  host      : digits-0-1
  rank      : 2 (local_rank: 0)
  exitcode  : 1 (pid: 18)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def test_of_several_ranks_the_one_that_failed_first_is_told() -> None:
    assert telling_line(TORCHRUN) == "[rank2]: ValueError: bad sample 17"


def test_without_its_error_torchruns_report_still_says_what_failed() -> None:
    report = TORCHRUN[TORCHRUN.index("=====") :]
    assert telling_line(report) == "exitcode  : 1 (pid: 18)"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback\n  File x\nValueError: bad\n", "ValueError: bad"),
        ("ValueError: bad\nduring handling\nKeyError: 'x'\ncleaning up", "KeyError: 'x'"),
        (
            "torch.OutOfMemoryError: CUDA out of memory",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        ("AssertionError", "AssertionError"),
        ("bash: line 1: trian: command not found\n", "bash: line 1: trian: command not found"),
        ("no space left\n=====\n\n--\n", "no space left"),
        ("=====\n", ""),
        ("", ""),
    ],
)
def test_the_last_error_is_told_and_otherwise_the_last_words(text: str, line: str) -> None:
    assert telling_line(text) == line
