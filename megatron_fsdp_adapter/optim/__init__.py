"""How an optimizer steps on shards: in which parts, by which rule each parameter group is updated,
and its state as programs and checkpoints see it.

May enter: what an optimizer gets by being sharded, in any training loop.
"""
