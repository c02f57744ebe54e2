"""A folder for PYTHONPATH, in which `import megatron_fsdp` finds `megatron_fsdp.py`."""
