"""What `relpos.replace_position` needs of others' models: a family a file, and what families have in common.

stacks    layers of attention that are told of position alike, and what they know of it themselves
placed    such a layer, once its own position is off and a mechanism has taken its place
finding   the stacks of a model
"""
