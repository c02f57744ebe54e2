"""The machine below the engine: streams, events, storage, collectives; on CUDA or the host.

Knows tensors and process groups, and no parameters. May enter: what is done in another way by a
kind of device or backend.
"""
