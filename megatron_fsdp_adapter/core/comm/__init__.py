"""Collectives of one group of ranks: the communicator, ways to reduce, memory registered with NCCL.

Knows tensors and process groups, and neither parameters nor units. May enter: another collective,
or another way to launch one.
"""
