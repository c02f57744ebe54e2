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


_DOC = """megatron-core's config plus the fields of Megatron-LM main, with main's defaults.

The fields are the rows of `options/table.py` that 0.16.1 lacks. A plain 0.16.1 config works too: a
missing field has its row's default. `docs/options.md` describes each field,
`docs/support.md` lists rejected values.

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
