"""Common code of the training script, the quick start and the benchmark.

`megatron.training` is not used: it requires CUDA, and only wheels of megatron-core 0.17 and later
have it, while 0.16.1 is the newest for Python 3.10 and 3.11.
"""
