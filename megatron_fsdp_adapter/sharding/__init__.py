"""From a module to a sharded one: plans, an engine, parameters as DTensors, state dicts.

What both wrappers share, that of Megatron and that of plain PyTorch. May enter: what a module gets
by being sharded, in any training loop.
"""
