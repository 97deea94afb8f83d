"""`python -m relpos.cli` is `relpos`."""

from relpos.cli import main

if __name__ == "__main__":
    main()
