"""Runs Megatron-LM's training scripts, unmodified, on a CPU. For tests only, never for users.

    python tests/lib/integration/on_cpu.py path/to/pretrain_gpt.py --use-megatron-fsdp ...

In the place of `-m megatron_fsdp_adapter`, whose runner it calls. The package's CPU mode makes
megatron-core train on a CPU; this does the same for `megatron.training`, which asks more of CUDA:
it refuses to start without, counts devices, reads their memory. What the modules of
`megatron.training` see in place of torch says that CUDA is there and means the CPU by it. No
user should meet such a lie; so it is here and not in the package.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.__main__ import main as run
from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron.compat.patches import ModuleView

sys.path.append(str(Path(__file__).parent))  # Megatron-LM has a `tests` of its own
import lm_checkout
import warm_start


def _no_bytes(*args: Any, **kwargs: Any) -> int:
    return 0


_PROPERTIES = types.SimpleNamespace(major=9, minor=0, total_memory=1, name="cpu")

CUDA_ANSWERS: dict[str, Any] = {
    **cpu_mode.CUDA_ANSWERS,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "set_device": lambda *args: None,
    "get_device_properties": lambda *args: _PROPERTIES,
    "get_device_capability": lambda *args: (9, 0),
    "memory_allocated": _no_bytes,
    "max_memory_allocated": _no_bytes,
    "memory_reserved": _no_bytes,
    "max_memory_reserved": _no_bytes,
    "device_memory_used": _no_bytes,
    "memory_stats": lambda *args: dict.fromkeys(
        (
            "allocation.all.current",
            "allocated_bytes.all.current",
            "reserved_bytes.all.current",
            "allocated_bytes.all.peak",
            "reserved_bytes.all.peak",
            "num_alloc_retries",
        ),
        0,
    ),
    "reset_peak_memory_stats": lambda *args: None,
}


def training_view() -> ModuleView:
    """What a module of `megatron.training` sees in place of torch."""
    view = cpu_mode.make_view()
    view.__dict__["rand"] = cpu_mode._on_host(torch.rand)
    view.__dict__["cuda"] = ModuleView(torch.cuda, CUDA_ANSWERS)
    return view


def put_views(prefixes: tuple[str, ...]) -> None:
    """Gives every loaded module below `prefixes` that has torch a view of it."""
    view = training_view()
    for name, module in list(sys.modules.items()):
        if name.startswith(prefixes) and vars(module).get("torch") is torch:
            vars(module)["torch"] = view


def _for_megatron(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `.cuda()` that does nothing when Megatron or a training script calls it."""

    @functools.wraps(original)
    def cuda(subject: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller == "__main__" or caller.split(".")[0] in ("megatron", "torch"):
            return subject
        return original(subject, *args, **kwargs)

    return cuda


def prepare(modules: tuple[str, ...], prefixes: tuple[str, ...]) -> None:
    """CPU mode, and views for `modules`, which are imported, and all others below `prefixes`."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # core compiles its fused functions when warming up
    cpu_mode.enable_cpu_mode()
    for name in modules:
        lm_checkout.import_if_there(name)
    put_views(prefixes)
    torch.nn.Module.cuda = _for_megatron(torch.nn.Module.cuda)  # type: ignore[method-assign]
    torch.Tensor.cuda = _for_megatron(torch.Tensor.cuda)  # type: ignore[method-assign]


def prepare_megatron_lm(checkout: Path) -> None:
    """Makes the modules of a Megatron-LM checkout run on the CPU."""
    sys.path.insert(0, str(checkout))
    prepare(lm_checkout.MODULES, ("megatron.training", "megatron.legacy"))
    lm_checkout.complete()


def main(argv: list[str]) -> int:
    """The runner, after the lie; with `SERVE` in front of a script, for ranks to come."""
    waits = argv[0] == warm_start.SERVE
    prepare_megatron_lm(Path(argv[1 if waits else 0]).resolve().parent)
    if waits:
        importlib.import_module("megatron_fsdp_adapter.launch.runner")  # once, not in each rank
    return warm_start.serve(run) if waits else run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
