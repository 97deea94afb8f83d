"""Drawing: position mechanisms, learned positions, attention maps, and curves over conditions.

The input is numbers, the output figures. Only `mechanism_data`, `explorer_data`, `notebook`,
`stored_positions` and `trained_examples` know mechanisms.
"""
