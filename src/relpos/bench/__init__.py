"""Benchmarks of attention: named cases, and peers that compute them in the same run. Only correct peers are timed.

cases      the computations: sizes, dtype, position; named, shared with the tests
inputs     the tensors of a case
peers      the implementations: relpos's engines, PyTorch's own attention, a roofline
modules    the same for whole attention layers: transformers, timm
check      an engine against the reference in float64
measure    time, peers interleaved round by round; memory, in a separate process
targets    the goals
run        all of that, in a folder
table, picture   the presentation
"""
