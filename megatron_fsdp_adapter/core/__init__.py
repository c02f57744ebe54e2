"""The engine that shards and communicates: layout of flat buffers, streams, collectives, units and
hooks.

Knows parameters, process groups and dtypes, and nothing of Megatron, optimizers or files. May
enter: what is needed between the first gather and the last reduction of a step, by either wrapper.
"""
