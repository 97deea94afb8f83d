"""`python -m relpos.cli` is `relpos`."""

from relpos.cli import main

main()
