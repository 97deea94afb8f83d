"""Benchmarks of attention: named cases, peers that run them in the same run, and no speed without a green check.

cases      what is computed: sizes, dtype, position; named, shared with the tests
inputs     the tensors of a case
peers      who computes it: the engines of relpos, PyTorch's own attention, a roofline
modules    the same for whole attention layers: transformers, timm
check      an engine against the reference in float64
measure    time, peers interleaved round by round; memory, in a process of its own
targets    what must be reached
run        all of that, in a folder
table, picture   how it is shown
"""
