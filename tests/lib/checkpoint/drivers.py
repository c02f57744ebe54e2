"""Stand-ins for the two functions of Megatron-LM's checkpoint code, and a load through them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.distributed import checkpoint as dcp

from megatron_fsdp_adapter.checkpoint import training_state
from megatron_fsdp_adapter.megatron.compat.table import DRIVERS, LM
from tests.lib.gpt.gpt import Case, Trainer
from tests.lib.megatron.stand_ins import stand_ins

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, swiglu=True)


def preprocess_fsdp_dtensor_state_dict(args: Any, raw_state_dict: Any, model: Any) -> Any:
    raise AssertionError("it renames and splits parameters of the bundled engine")


def _load_base_checkpoint(
    load_dir: str,
    args: Any,
    rank0: bool = False,
    sharded_state_dict: Any = None,
    gpt_compat_layer_maps: Any = None,
) -> Any:
    assert gpt_compat_layer_maps is None  # names of a GPT are asked for already
    state = sharded_state_dict
    if "optimizer" in state:
        optimizer = dict(state["optimizer"])
    else:
        optimizer = None
    if "model" in state:
        model = dict(state["model"])
    else:
        model = None
    chunks = state.pop("_model")
    state = sys.modules[LM].preprocess_fsdp_dtensor_state_dict(args, state, chunks[0])
    planner = dcp.DefaultLoadPlanner(allow_partial_load=not args.strict_fsdp_dtensor_load)
    dcp.load(state, checkpoint_id=load_dir, planner=planner)
    kept = {"optimizer": optimizer, "model": model}
    return {**state, **{k: v for k, v in kept.items() if v is not None}}, load_dir, False, "type"


@pytest.fixture
def driver() -> Iterator[ModuleType]:
    names = {
        "preprocess_fsdp_dtensor_state_dict": preprocess_fsdp_dtensor_state_dict,
        "_load_base_checkpoint": _load_base_checkpoint,
        "get_load_checkpoint_path_by_args": lambda args: args.load,
        "get_rng_state": lambda *args, **kwargs: {},
        "cleanup_old_non_persistent_checkpoint": lambda *args: None,
    }
    with stand_ins({LM: names}, DRIVERS) as made:
        yield made[LM]


def asked_state(trainer: Trainer, **more: Any) -> dict[str, Any]:
    state = training_state([trainer.wrapper], trainer.optimizer, is_loading=True)
    return {**state, "_model": [trainer.wrapper.module], **more}


def load_by_driver(
    driver: ModuleType, folder: Path, state: dict[str, Any], strict: bool = True, **options: Any
) -> Any:
    args = SimpleNamespace(strict_fsdp_dtensor_load=strict, **options)
    return driver._load_base_checkpoint(str(folder), args, sharded_state_dict=state)[0]
