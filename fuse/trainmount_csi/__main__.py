"""`python -m trainmount_csi`."""

from __future__ import annotations

import sys

from trainmount_csi.main import main

__all__: list[str] = []

sys.exit(main())
