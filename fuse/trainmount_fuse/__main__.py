"""`python -m trainmount_fuse`."""

from __future__ import annotations

import sys

from trainmount_fuse.main import main

if __name__ == "__main__":
    sys.exit(main())
