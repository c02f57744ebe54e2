"""CUDA graphs over the engine: of a whole iteration, and of single modules inside of units.

Knows the engine, and not Megatron. May enter: what a capture or a replay asks of the engine.
"""
