"""What a person runs: `python -m megatron_fsdp_adapter <command>`."""
