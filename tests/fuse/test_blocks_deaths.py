"""The block cache of processes that are killed between any two lines of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_NUM_DEATHS = 120
_ROOT = Path(__file__).parents[2]


def test_a_death_anywhere_leaves_right_blocks_whole_bounds_and_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuse.block_deaths", str(tmp_path), str(_NUM_DEATHS)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=_ROOT, check=True
    )
    num_lines, *findings = ended.stdout.splitlines()
    assert findings == [], ended.stdout
    assert int(num_lines) > 10 * _NUM_DEATHS
