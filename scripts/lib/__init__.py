"""What the training script, the quick start and the benchmark are made of.

Not `megatron.training`, which the wheel of megatron-core has from 0.17 on: it refuses to start
without CUDA, and 0.16.1, the newest release for Python 3.10 and 3.11, does not have it.
"""
