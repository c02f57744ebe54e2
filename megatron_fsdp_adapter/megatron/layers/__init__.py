"""Layers of Megatron-Core: graphs, schedules that call their parts, fused weight gradients."""
