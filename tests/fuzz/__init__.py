"""A fuzzer of `relpos.attention`: random calls, an oracle of their own, and a shrinker. `python -m tests.fuzz --help`."""
