"""Megatron's configurations: their meaning for the engine, rejected values, and derived settings.

Tables of rules over values; nothing is constructed here. Code that reads or checks an option
belongs here.
"""
