"""Runs Megatron-LM's training scripts, unmodified, on GPUs, as one rank of several. For tests.

    python tests/lib/integration/on_gpu.py path/to/pretrain_gpt.py --use-megatron-fsdp ...

In the place of `-m megatron_fsdp_adapter`, whose runner it calls. It differs from that in what
`lm_checkout.complete` says alone, and in ranks that begin where another process has imported
everything (`warm_start.py`). A process that has used CUDA cannot be forked, so nothing here may;
if something that is imported does, each rank imports everything itself.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch

from megatron_fsdp_adapter.__main__ import main as run

sys.path.append(str(Path(__file__).parent))  # Megatron-LM has a `tests` of its own
import lm_checkout
import warm_start

SERVE_COLD = "--serve-cold"
"""In the place of `warm_start.SERVE`: ranks import everything themselves."""


def prepare_megatron_lm(checkout: Path) -> None:
    """Imports the modules of a Megatron-LM checkout, and leaves CUDA alone."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles functions while it is imported
    sys.path.insert(0, str(checkout))
    for name in (*lm_checkout.MODULES, "model_provider", "gpt_builders"):
        lm_checkout.import_if_there(name)
    lm_checkout.complete()


def run_prepared(argv: list[str]) -> int:
    """The runner, in a process that has imported nothing yet."""
    prepare_megatron_lm(Path(argv[0]).resolve().parent)
    return run(argv)


def can_fork() -> bool:
    """True if processes that are forked from this one can use the GPUs."""
    if torch.cuda.is_initialized():
        return False
    if torch.cuda.device_count() == 0:
        return True
    # What else was imported may have asked the driver behind torch's back. So one process tries.
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.ones(1, device="cuda").item()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def main(argv: list[str]) -> int:
    """The runner; with `SERVE` in front of a script, for ranks to come."""
    # Or torch asks the driver whether there are GPUs, after which none can be used in a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    given = {*os.environ}
    if argv[0] == SERVE_COLD:
        return warm_start.serve(run_prepared)
    if argv[0] != warm_start.SERVE:
        return run_prepared(argv)
    prepare_megatron_lm(Path(argv[1]).resolve().parent)
    importlib.import_module("megatron_fsdp_adapter.launch.runner")  # once, not in each rank
    if not can_fork():
        print("on_gpu.py: an import has used CUDA, so each rank imports anew", file=sys.stderr)
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-W", "ignore", __file__, SERVE_COLD])
    found = {name: value for name, value in os.environ.items() if name not in given}

    def run_forked(words: list[str]) -> int:
        """The runner, in a rank, whose environment is its own."""
        for name, value in found.items():
            # Transformer Engine looks for CUDA's headers when it is imported.
            os.environ.setdefault(name, value)
        return run(words)

    return warm_start.serve(run_forked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
