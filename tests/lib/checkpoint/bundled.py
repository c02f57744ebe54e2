"""Megatron's bundled FSDP engine on a CPU, with its own checkpoint path. For tests only.

The engine asks for CUDA devices, streams and meshes by name; here its modules see views of torch
that answer for the CPU, as the package's CPU mode does for the rest of core. Nothing of ours is
installed in its place while it runs.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from torch.distributed import DeviceMesh

from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron.compat.patches import ModuleView
from tests.lib.checkpoint.megatron_states import preprocessed, raw_state
from tests.lib.gpt import gpt
from tests.lib.gpt.gpt import Case, Trainer

_PACKAGE = "megatron.core.distributed.fsdp"


def _device(*args: Any) -> torch.device:
    if str(args[0]).startswith("cuda"):
        return torch.device("cpu")
    return torch.device(*args)


def run_on_cpu() -> None:
    """Gives the engine's modules their views. Needs the package's CPU mode."""
    view = cpu_mode.make_view()
    view.__dict__["device"] = _device
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE) and vars(module).get("torch") is torch:
            vars(module)["torch"] = view
    mcore_fsdp_adapter.DeviceMesh = ModuleView(
        DeviceMesh,
        {
            "from_group": lambda groups, device_type, **options: DeviceMesh.from_group(
                groups, device_type="cpu", **options
            )
        },
    )
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]


def build_bundled(case: Case, strategy: str, device: torch.device) -> Trainer:
    """The model of `build_trainer`, under the bundled engine."""
    # Not `average_in_collective`: the engine of 0.18 and 0.19 fails with it on a dense model.
    ddp = {"gradient_reduce_div_fusion": False}
    bundled = mcore_fsdp_adapter.FullyShardedDataParallel
    with mock.patch.object(gpt, "FullyShardedDataParallel", bundled):
        return gpt.make_trainer(gpt.build_model(case, device), case, strategy, ddp, device=device)


def save(trainer: Trainer, folder: str, with_optimizer: bool = True) -> None:
    """As Megatron-LM saves."""
    dcp.save(preprocessed(trainer, raw_state(trainer, with_optimizer)), checkpoint_id=folder)


def load(trainer: Trainer, folder: str, with_optimizer: bool = True) -> None:
    """As Megatron-LM loads: in place, strictly, then both `load_state_dict`."""
    raw = raw_state(trainer, with_optimizer, is_loading=True)
    state = preprocessed(trainer, raw)
    kept = {key: dict(value) for key, value in raw.items()}
    dcp.load(state, checkpoint_id=folder)
    trainer.wrapper.load_state_dict(kept["model"], strict=True)
    if with_optimizer:
        trainer.optimizer.load_state_dict(kept["optimizer"])
