"""Layers of Megatron-Core: CUDA graphs, schedules that call their parts, fused weight gradients."""
