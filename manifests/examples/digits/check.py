"""Count what a digits job consumed, and say whether every sample of every epoch was consumed once.

    python check.py DATA OUTPUT EPOCHS

DATA is the folder with `train/`, OUTPUT the one with `consumed/` and `result.json`. Prints one JSON
object (the fields of `Report`); exits with 1 if a sample of an epoch is missing or repeated. Needs
only the standard library, so that it can be piped into a Python anywhere: `kubectl exec -i … --
python - DATA OUTPUT EPOCHS < check.py`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a finished job consumed and produced."""

    samples: int
    """Files in `train/`."""

    consumed: list[int]
    """Lines of each epoch."""

    missing: list[int]
    """Files that no line of an epoch names, for each epoch."""

    repeated: list[int]
    """Lines of an epoch beyond the first for their file, for each epoch."""

    ranks: list[int]
    """The ranks that consumed something."""

    accuracy: float
    weights_sha256: str

    @property
    def exactly_once(self) -> bool:
        return self.samples > 0 and not any(self.missing) and not any(self.repeated)


def report(data: Path, output: Path, epochs: int) -> Report:
    """Read every line of every segment. Raises FileNotFoundError when the job has no result."""
    files = {path.name for path in (data / "train").glob("*.png")}
    counts: list[Counter[str]] = [Counter() for _ in range(epochs)]
    ranks = set()
    for path in sorted((output / "consumed").glob("*/rank-*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            counts[line["epoch"]][line["file"]] += 1
            ranks.add(line["rank"])
    result = json.loads((output / "result.json").read_text())
    return Report(
        samples=len(files),
        consumed=[sum(count.values()) for count in counts],
        missing=[len(files - count.keys()) for count in counts],
        repeated=[sum(count.values()) - len(count) for count in counts],
        ranks=sorted(ranks),
        accuracy=result["accuracy"],
        weights_sha256=result["weights_sha256"],
    )


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: check.py DATA OUTPUT EPOCHS")
    found = report(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(asdict(found)))
    sys.exit(0 if found.exactly_once else 1)
