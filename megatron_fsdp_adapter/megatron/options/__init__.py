"""What Megatron's configurations mean to the engine, what is refused, what is set for the user.

Tables of rules over values; nothing is constructed here. May enter: a reader or judge of an option.
"""
