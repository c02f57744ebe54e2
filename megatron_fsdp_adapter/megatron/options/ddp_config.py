"""The DDP config with the fields that Megatron-LM main adds for FSDP."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallelConfig as CoreConfig

from .table import OPTIONS


def _check_buckets(self: Any) -> None:
    """The config's `__post_init__`: ValueError for two options that exclude each other."""
    if self.bucket_size is not None and self.num_buckets is not None:
        raise ValueError(
            f"bucket_size={self.bucket_size} and num_buckets={self.num_buckets} are mutually "
            "exclusive. Set one of them"
        )
    CoreConfig.__post_init__(self)  # core 0.18 asserts the same


def _fields() -> list[tuple[str, Any, Any]]:
    """Name, type and dataclass field of each option that 0.16.1 lacks."""
    found = []
    for option in OPTIONS:
        if not option.in_core:
            shown = {"help": option.help or option.use}
            found.append((option.name, option.type, field(default=option.default, metadata=shown)))
    return found


_DOC = """megatron-core's config of data parallelism, with the fields that older releases lack.

The added fields have the names and defaults of Megatron-LM main. A config of megatron-core works
too: fields that it lacks have these defaults. `docs/options.md` describes each field, and
`docs/support.md` lists refused values.

Examples:
    >>> config = DistributedDataParallelConfig(
    ...     use_megatron_fsdp=True,
    ...     use_distributed_optimizer=True,
    ...     data_parallel_sharding_strategy="optim_grads_params",
    ...     fsdp_unsharded_budget_gib="auto",
    ... )
    >>> config.outer_dp_sharding_strategy
    'no_shard'

Raises:
    ValueError: both `bucket_size` and `num_buckets`, as in main.
"""

if TYPE_CHECKING:

    class DistributedDataParallelConfig(CoreConfig):
        """The config for type checkers, which cannot see generated fields."""

        def __init__(self, *args: Any, **options: Any) -> None: ...

else:
    DistributedDataParallelConfig = make_dataclass(
        "DistributedDataParallelConfig",
        _fields(),
        bases=(CoreConfig,),
        namespace={"__doc__": _DOC, "__module__": __name__, "__post_init__": _check_buckets},
    )
