"""What a person runs: `python -m megatron_fsdp_adapter <command>`.

May enter: the arguments, tables and exit status of a command; what it computes is below.
"""
