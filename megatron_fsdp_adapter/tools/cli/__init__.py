"""The commands of `megatron-fsdp-adapter COMMAND`.

Only arguments, tables and exit status of a command belong here; the computation is in other
packages.
"""
