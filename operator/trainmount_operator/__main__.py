"""`python -m trainmount_operator`; see `main`."""

from trainmount_operator.main import main

raise SystemExit(main())
