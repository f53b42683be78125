"""Runs one measured program: `child.py MODULE FUNCTION JSON`. `measure.start_program` starts it."""

from __future__ import annotations

import importlib
import json
import sys

from measure import Timing


def main() -> None:
    module, name, arguments = sys.argv[1:]
    timing = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    assert isinstance(timing, Timing)
    print(timing.to_json())


if __name__ == "__main__":
    main()
