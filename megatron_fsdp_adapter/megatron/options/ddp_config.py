"""The DDP config with the fields that Megatron-LM main has for this wrapper."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallelConfig as CoreConfig

from .table import OPTIONS


def _check_buckets(self: Any) -> None:
    if self.bucket_size is not None and self.num_buckets is not None:
        raise ValueError(
            f"bucket_size={self.bucket_size} and num_buckets={self.num_buckets} exclude each "
            "other; set one of them"
        )
    CoreConfig.__post_init__(self)  # of 0.18 asserts the same


_DOC = """megatron-core's config and what Megatron-LM main has beside it, with main's defaults.

The fields are the rows of `options/table.py` that 0.16.1 lacks. A plain 0.16.1 config works too: a
field that it lacks is read with its row's default. `docs/options.md` says what each does,
`docs/support.md` what is refused.

Raises:
    ValueError: both `bucket_size` and `num_buckets`, as in main.
"""

if TYPE_CHECKING:

    class DistributedDataParallelConfig(CoreConfig):
        """For a type checker, which cannot see fields that are made of rows."""

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
