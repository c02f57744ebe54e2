"""The plugin that torch loads at the end of each `import torch` (entry points of `torch.backends`),
so that the environment can switch a program that `accelerate launch` or `torchrun` starts.

Importing this imports nothing of torch. A `.pth` file was rejected: Python would run it in
programs without torch, too.
"""

from __future__ import annotations

import os
import sys

from ..core.runtime.launcher import is_first_rank

VARIABLE = "MEGATRON_FSDP_ADAPTER_USE_AS"
PRINTED = "MEGATRON_FSDP_ADAPTER_USE_AS_PRINTED"
"""Set for the processes that this one starts: a launcher imports torch too, and has printed."""


def select() -> None:
    """Calls `use_as_fsdp2()` where the environment asks for it. Prints that once, in the
    launcher or on rank 0.

    Raises:
        ValueError: the variable has another value. torch reports it as a RuntimeError.
    """
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return
    if wanted != "fsdp2":
        raise ValueError(f"{VARIABLE}={wanted}: not known. Set it to fsdp2, or leave it out")
    from .torch_fsdp import use_as_fsdp2

    use_as_fsdp2()
    if is_first_rank() and PRINTED not in os.environ:
        os.environ[PRINTED] = "1"
        print(
            f"megatron_fsdp_adapter: {VARIABLE}=fsdp2, fully_shard is in the place of torch's",
            file=sys.stderr,
        )
