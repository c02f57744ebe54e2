"""What the tests for GPUs train: one run of a case, and GPTs of Transformer Engine's layers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.lib.gpt import gpt
from tests.lib.gpt.checks import Step, free_run
from tests.lib.gpt.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    init_megatron,
    make_trainer,
    model_config,
    train_step,
)

Fields = Mapping[str, Any]
"""Fields of a config and their values."""
Change = Callable[[torch.nn.Module], None]
NONE: Fields = MappingProxyType({})
ZERO_1 = "optim"
ZERO_3 = "optim_grads_params"
COPY_ENGINES = {"fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True}
SLOTS = {"fsdp_double_buffer": True}


@dataclass(frozen=True)
class _Part:
    """Stands for core's enumeration, whose class has another name in each release."""

    name: str


def layers_captured(parts: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fields of the model's config that ask for graphs of layers, or of these parts of them."""
    known = TransformerConfig.__dataclass_fields__
    if "cuda_graph_modules" in known:
        named = "cuda_graph_modules"
    else:
        named = "cuda_graph_scope"
    return {
        "cuda_graph_impl": "local",
        "cuda_graph_warmup_steps": 2,
        named: [_Part(part) for part in parts],
    }


def local_run(trainer: Trainer, rank: int, steps: int, device: torch.device) -> list[Step]:
    """As `free_run`, with this rank's part of weights alone: whole ones of a wide model take
    minutes to put together."""
    found = []
    for number in range(steps):
        loss, norm = train_step(trainer, batches(trainer.case, number, rank, device))
        trainer.wrapper.stop_communication()  # parameters are shards then
        named = trainer.wrapper.named_parameters()
        own = {name: param._local_tensor.detach().cpu().clone() for name, param in named}
        found.append(Step(loss, norm, {}, own))
    return found


def run_of(
    case: Case,
    strategy: str | None,
    rank: int,
    steps: int,
    ddp: Fields = NONE,
    run: Callable[..., list[Step]] = free_run,
    look: Callable[[Trainer], Any] = id,
) -> tuple[list[Step], Any]:
    """The steps of a new trainer, which is gone then, and what `look` saw of it behind them."""
    device = init_megatron()
    trainer = build_trainer(case, strategy, device, ddp=ddp)
    found = run(trainer, rank, steps, device), look(trainer)
    del trainer
    gc.collect()
    return found


@contextmanager
def te_layers(fields: Fields = NONE) -> Iterator[None]:
    """Inside, models of `gpt` are made of Transformer Engine's layers, with these fields of their
    config."""

    def config(case: Case) -> Any:
        made = model_config(case)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    spec = get_gpt_layer_with_transformer_engine_spec
    with (
        mock.patch.object(gpt, "get_gpt_layer_local_spec", spec),
        mock.patch.object(gpt, "model_config", config),
    ):
        yield


def with_te_layers(
    case: Case, strategy: str | None, device: torch.device, fields: Fields = NONE
) -> Trainer:
    with te_layers(fields):
        return build_trainer(case, strategy, device)


def te_run(
    strategy: str | None, case: Case, rank: int, steps: int, fields: Fields = NONE
) -> list[Step]:
    device = init_megatron()
    return free_run(with_te_layers(case, strategy, device, fields), rank, steps, device)


def fp8(recipe: str, **fields: Any) -> dict[str, Any]:
    """Fields of the model's config for FP8 compute."""
    return {
        "fp8": "hybrid",
        "fp8_recipe": recipe,
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "max",
        **fields,
    }


def te_trainer(
    case: Case,
    strategy: str | None,
    device: torch.device,
    fields: Fields,
    change: Change = lambda model: None,
    ddp: Fields = NONE,
    **seeding: Any,
) -> Trainer:
    """A GPT of Transformer Engine's layers as they initialize themselves, whose weights are
    quantized from the start where `fp8_param` of `fields`, the model's config, says so. `seeding`:
    of Megatron's tracker of random numbers."""
    torch.manual_seed(case.seed)
    model_parallel_cuda_manual_seed(case.seed, **seeding)
    config: Any = model_config(case)
    for name, value in fields.items():
        setattr(config, name, value)
    experts = fields.get("num_moe_experts")
    spec = get_gpt_layer_with_transformer_engine_spec(experts, moe_grouped_gemm=bool(experts))
    model = GPTModel(
        config,
        spec,
        vocab_size=case.vocab,
        max_sequence_length=case.seq,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.positions,
    ).to(device)
    change(model)
    if fields.get("fp8_param"):
        quantized = {"fp8_param_gather": True}
    else:
        quantized = {}
    return make_trainer(Float16Module(config, model), case, strategy, {**quantized, **ddp})
