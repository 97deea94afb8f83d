"""Checks, when a plan is made, whether kernels that are compiled for each GPU agree with the reference on this one.

verdicts    checks each kind of call once, and caches the result
variant     the properties of a call that decide which compiled kernels run, and small calls to check them with
agreement   how far an engine is from the reference, and how much of it rounding explains
"""
