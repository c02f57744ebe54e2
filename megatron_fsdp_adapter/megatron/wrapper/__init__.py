"""The wrapper that stands for Megatron-Core's DDP: its construction, groups, units and checks."""
