"""The commands of `python -m megatron_fsdp_adapter <command>`.

Only arguments, tables and exit status of a command belong here; the computation is in other
packages.
"""
