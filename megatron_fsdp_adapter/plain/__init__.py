"""`fully_shard_model` and `fully_shard_optimizer`: the engine for plain PyTorch modules.

Imports no Megatron. May enter: what a training loop of the user's own calls.
"""
