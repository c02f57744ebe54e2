"""A trainer's state as Megatron makes it for fsdp_dtensor, under our engine and the bundled one."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
from megatron.core.transformer import fsdp_dtensor_checkpoint as core


def raw_state(
    trainer: Any, with_optimizer: bool = True, is_loading: bool = False
) -> dict[str, Any]:
    """Model and optimizer, as Megatron's `generate_state_dict` makes them."""
    raw: dict[str, Any] = {"model": trainer.wrapper.module.state_dict_for_save_checkpoint()}
    if with_optimizer:
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        raw["optimizer"] = trainer.optimizer.sharded_state_dict(
            dict(raw), is_loading=is_loading, metadata=metadata
        )
    return raw


def preprocessed(trainer: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """What goes to DCP: Megatron's `preprocess_fsdp_dtensor_state_dict`, by core's functions."""
    core.handle_fp8_extra_state_case(raw["model"])
    state = dict(raw)
    if trainer.case.swiglu:
        state["model"], optimizer = core.handle_swiglu_in_state_dict(
            trainer.wrapper.module, raw["model"], raw.get("optimizer")
        )
        if "optimizer" in raw:
            state["optimizer"] = optimizer
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
    return state
