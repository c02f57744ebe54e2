"""Megatron's bundled FSDP engine on a CPU, with its own checkpoint path. For tests only.

The engine asks for CUDA devices, streams and meshes by name; here its modules see views of torch
that answer for the CPU, as the package's CPU mode does for the rest of core. Nothing of ours is
installed in its place while it runs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer import fsdp_dtensor_checkpoint as core
from torch.distributed import DeviceMesh

from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron.compat.patches import ModuleView
from tests.distributed.gpt import Case, Trainer, build_model, ddp_config, optimizer_config

_PACKAGE = "megatron.core.distributed.fsdp"


def _device(*args: Any) -> torch.device:
    return torch.device("cpu") if str(args[0]).startswith("cuda") else torch.device(*args)


def _mesh_of_groups(groups: Any, device_type: str, **options: Any) -> DeviceMesh:
    return DeviceMesh.from_group(groups, device_type="cpu", **options)


def run_on_cpu() -> None:
    """Gives the engine's modules their views. Needs the package's CPU mode."""
    view = cpu_mode.make_view()
    view.__dict__["device"] = _device
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE) and vars(module).get("torch") is torch:
            vars(module)["torch"] = view
    meshes = ModuleView(DeviceMesh, {"from_group": _mesh_of_groups})
    mcore_fsdp_adapter.DeviceMesh = meshes
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]


def build_bundled(case: Case, strategy: str, device: torch.device) -> Trainer:
    """The model of `build_trainer`, under the bundled engine."""
    model = build_model(case, device)
    # Not `average_in_collective`: the engine of 0.18 and 0.19 fails with it on a dense model.
    config = ddp_config(case, strategy, {"gradient_reduce_div_fusion": False})
    wrapper = mcore_fsdp_adapter.FullyShardedDataParallel(
        config=model.config, ddp_config=config, module=model, device=device
    )
    optimizer = get_megatron_optimizer(
        optimizer_config(case), [wrapper], use_gloo_process_groups=False
    )
    for group in optimizer.param_groups:
        group["lr"] = case.lr * group["lr_mult"]
        group["weight_decay"] = case.weight_decay * group["wd_mult"]
    wrapper.config.no_sync_func = wrapper.no_sync
    wrapper.config.finalize_model_grads_func = finalize_model_grads
    wrapper.config.grad_scale_func = optimizer.scale_loss
    return Trainer(case, wrapper, optimizer, strategy)


def state_of(
    trainer: Trainer, with_optimizer: bool = True, is_loading: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Megatron-LM makes of a trainer, and what of that goes to torch's DCP."""
    inner = trainer.wrapper.module
    raw: dict[str, Any] = {"model": inner.state_dict_for_save_checkpoint()}
    if with_optimizer:
        raw["optimizer"] = trainer.optimizer.sharded_state_dict(
            dict(raw), is_loading=is_loading,
            metadata={"distrib_optim_sharding_type": "fsdp_dtensor"},
        )  # fmt: skip
    core.handle_fp8_extra_state_case(raw["model"])
    state = dict(raw)
    if trainer.case.swiglu:
        state["model"], optimizer = core.handle_swiglu_in_state_dict(
            inner, raw["model"], raw.get("optimizer")
        )
        if with_optimizer:
            state["optimizer"] = optimizer
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
    return raw, state


def save(trainer: Trainer, folder: str, with_optimizer: bool = True) -> None:
    """As Megatron-LM saves."""
    dcp.save(state_of(trainer, with_optimizer)[1], checkpoint_id=folder)


def load(trainer: Trainer, folder: str, with_optimizer: bool = True) -> None:
    """As Megatron-LM loads: in place, strictly, then both `load_state_dict`."""
    raw, state = state_of(trainer, with_optimizer, is_loading=True)
    kept = {key: dict(value) for key, value in raw.items()}
    dcp.load(state, checkpoint_id=folder)
    trainer.wrapper.load_state_dict(kept["model"], strict=True)
    if with_optimizer:
        trainer.optimizer.load_state_dict(kept["optimizer"])
