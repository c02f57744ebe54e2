"""Names and state dicts of a sharded module, and its whole weights.

May enter: what is read of a module's parameters and buffers, or written to them, by name.
"""
