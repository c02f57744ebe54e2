"""Helper modules of the scripts. Not part of the package `megatron_fsdp_adapter`."""
