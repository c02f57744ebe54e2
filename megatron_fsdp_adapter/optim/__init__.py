"""The step of an optimizer on shards: its parts, the rule by which each parameter group is updated,
and its state as programs and checkpoints see it.

May enter: what an optimizer gets by being sharded, in any training loop.
"""
