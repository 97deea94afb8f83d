"""Whether kernels that are compiled for each GPU agree with the reference on this one: asked when a plan is made.

verdicts    checks once a kind of call, and remembers
variant     what of a call decides which compiled kernels run, and small calls of the same kind to check them by
agreement   how far an engine is from the reference, and how far rounding explains
"""
