"""The helpers that Megatron's checkpoint code calls, and its own saves and loads made safe.

The format itself is in the package's `checkpoint`. May enter: replacements for names
in the checkpoint code of Megatron or Megatron-Bridge.
"""
