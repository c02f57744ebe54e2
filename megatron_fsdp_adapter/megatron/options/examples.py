"""Flags that Megatron-LM's examples of Megatron-FSDP have, and what this package does without them.

The examples are those of Megatron-LM main, `examples/megatron_fsdp`, of 22 August 2026. A run that
only adds `--use-megatron-fsdp` does not have their flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .table import GRAD_COMM, MAIN_GRADS


@dataclass(frozen=True)
class Example:
    """Flags of the examples.

    Attributes:
        flags: as on a command line.
        options: the parsed arguments that they set.
        values: what any of these is with the flags.
        here: what is done without them.
    """

    flags: str
    options: tuple[str, ...]
    values: tuple[Any, ...]
    here: str

    def is_known(self, args: Any) -> bool:
        """True if this Megatron-LM has one of the options."""
        return any(hasattr(args, option) for option in self.options)

    def is_followed(self, args: Any) -> bool:
        """True if one of the options is as with the flags."""
        found = [getattr(args, option) for option in self.options if hasattr(args, option)]
        return any(value in self.values for value in found)


BF16 = (torch.bfloat16, "bf16")

EXAMPLES = (
    Example(
        "--calculate-per-token-loss", ("calculate_per_token_loss",), (True,),
        "not needed for speed: gradients are scaled beside the backward",
    ),
    Example(
        "--init-model-with-meta-device", ("init_model_with_meta_device",), (True,),
        "set it if the whole model does not fit on a GPU before it is sharded",
    ),
    Example(
        "--use-nccl-ub --fsdp-double-buffer --fsdp-manual-registration",
        ("nccl_ub", "fsdp_double_buffer"), (True,),
        "no fixed buffers: a unit's memory goes when it is resharded. Copy engines use them "
        "(--fsdp-copy-engine-all-gather, --fsdp-copy-engine-reduce-scatter)",
    ),
    Example(
        "--no-gradient-accumulation-fusion", ("gradient_accumulation_fusion",), (False, None),
        "not needed: weight gradients are written where they are communicated",
    ),
    Example(
        "--megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-grad-comm-dtype bf16",
        (MAIN_GRADS, GRAD_COMM), BF16,
        "gradients are summed and sent in float32; the second flag alone halves what is sent",
    ),
)  # fmt: skip
"""Optional ones. What a run needs is set (`settings.py`)."""


def not_followed(args: Any) -> str:
    """A title and a line for each of `EXAMPLES`; "" if parsed arguments follow any of them: a
    run that has some of these flags has chosen."""
    known = [one for one in EXAMPLES if one.is_known(args)]
    if not known or any(one.is_followed(args) for one in known):
        return ""
    width = max(len(one.flags) for one in known)
    lines = ["Megatron-LM's examples of --use-megatron-fsdp also have; without them"]
    for one in known:
        lines.append(f"  {one.flags:<{width}}  {one.here}")
    return "\n".join(lines)
