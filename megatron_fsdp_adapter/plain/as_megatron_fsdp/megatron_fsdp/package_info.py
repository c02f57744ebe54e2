"""The version whose names these are."""

__package_name__ = "megatron_fsdp"
__version__ = __shortversion__ = "0.6.1"
