"""`python -m relpos` is `relpos`; so `torchrun -m relpos train` starts it in several processes."""

from relpos_command import main

if __name__ == "__main__":
    main()
