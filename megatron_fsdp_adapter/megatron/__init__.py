"""The interface to Megatron-Core: the wrapper that stands for its DDP, and the optimizer behind it.

`compat` has what differs between releases, `options` what configurations mean and what is refused,
`checkpoint` the names and drivers of its checkpoint code. May enter: what a wrapper in Megatron
needs once it is constructed; what puts it into a running Megatron is in `launch`.
"""
