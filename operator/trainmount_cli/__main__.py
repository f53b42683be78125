"""`python -m trainmount_cli` is `trainmount`."""

from __future__ import annotations

from trainmount_cli.app import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
