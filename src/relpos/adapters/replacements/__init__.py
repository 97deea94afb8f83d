"""What `relpos.replace_position` needs to know of other libraries' models: one file per family, and shared code.

stacks          attention layers that get position in the same way, and their own position
repositioned    such a layer after a mechanism has replaced its own position
finding         the stacks of a model
"""
