"""Makes a sharded module: plans, an engine, parameters as DTensors, state dicts.

The wrappers for Megatron and for plain PyTorch share it. What belongs here is what a sharded module
has in any training loop.
"""
