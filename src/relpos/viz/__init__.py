"""Drawing: what a position mechanism says, what a trained one learned, where it looks, and curves over conditions.

Numbers come in, figures go out; `portrait` alone knows mechanisms and asks them for their numbers.
"""
