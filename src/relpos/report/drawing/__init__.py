"""Drawing: position mechanisms, learned positions, attention maps, and curves over conditions.

The input is numbers, the output figures. Only `portrait` knows mechanisms and reads their numbers.
"""
