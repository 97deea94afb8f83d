"""A fuzzer of `relpos.attention`: random calls, an oracle of their own, a shrinker. `python -m tests.fuzz --help`."""
