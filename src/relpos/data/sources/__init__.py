"""Where samples come from that are no folder: datasets of Hugging Face, WebDataset's shards.

A `Source` gives encoded samples, shard by shard, in a fixed order. `relpos.data.from_sources` makes tasks of them.
"""
