"""From a plan to an engine: weights made on the meta device, the same model on all ranks, guards,
faults by unit.

The wrappers for Megatron and for plain PyTorch share it. May enter: what an engine gets when it is
made, in any training loop.
"""
