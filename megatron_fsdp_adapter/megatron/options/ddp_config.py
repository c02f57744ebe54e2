"""The DDP config with the fields that Megatron-LM main adds for FSDP."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallelConfig as CoreConfig

from .table import OPTIONS


def _check_buckets(self: Any) -> None:
    if self.bucket_size is not None and self.num_buckets is not None:
        raise ValueError(
            f"bucket_size={self.bucket_size} and num_buckets={self.num_buckets} are mutually "
            "exclusive. Set one of them"
        )
    CoreConfig.__post_init__(self)  # core 0.18 asserts the same


_DOC = """megatron-core's config plus the fields of Megatron-LM main, with main's defaults.

The fields are the rows of `options/table.py` that 0.16.1 lacks. A plain 0.16.1 config works too: a
missing field has its row's default. `docs/options.md` and `docs/flags.md` describe each field,
`docs/refused.md` lists rejected values.

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
        [
            (one.name, one.type, field(default=one.default, metadata={"help": one.help or one.use}))
            for one in OPTIONS
            if not one.in_core
        ],
        bases=(CoreConfig,),
        namespace={"__doc__": _DOC, "__module__": __name__, "__post_init__": _check_buckets},
    )
