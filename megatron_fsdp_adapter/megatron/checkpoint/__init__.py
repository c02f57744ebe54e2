"""The helpers that Megatron's checkpoint code calls, and its own saves and loads made safe.

The format itself is in the package's `checkpoint`. May enter: what stands in for a name of
Megatron's or Bridge's checkpoint code.
"""
