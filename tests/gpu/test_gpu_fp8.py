"""Transformer Engine's layers in FP8: kinds of models whose weights are quantized from the start,
under our wrapper and under stock DDP (others beside it: test_gpu_matrix.py); runs that are saved
and resumed.

    python -m pytest -q -rA tests/gpu/test_gpu_fp8.py      (two GPUs of the Hopper kind or newer)
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)
from megatron_fsdp_adapter.state.names import FP8_SCALING
from tests.lib.gpt.checks import check_run_bits
from tests.lib.gpt.gpt import Case, Trainer, batches, forward_backward, init_megatron, train_step
from tests.lib.gpu.fp8 import CASE as QUANTIZED_CASE
from tests.lib.gpu.fp8 import RECIPES, quantized_of, same_weights
from tests.lib.gpu.gpu_ranks import DETERMINISTIC, Check, Outcomes, expecting
from tests.lib.gpu.runs import NONE, ZERO_1, ZERO_3, Change, fp8, te_run, te_trainer, with_te_layers
from tests.lib.quantized.te_checks import same

CHECKS = ("quantized/weights.py", "quantized/scaling.py", "megatron/layers/te_weight_cache.py")

CASE = Case(
    num_layers=2, hidden=128, heads=4, ffn=256, vocab=256, seq=64, batch=2, bf16=True, swiglu=True
)
WIDE = CASE.but(num_layers=4, hidden=1024, heads=8, ffn=4096, seq=128)
STEPS = 4


# FP8 compute of bf16 parameters.


def same_run_twice(rank: int, world: int) -> None:
    runs = [te_run(ZERO_3, CASE, rank, STEPS, fp8("tensorwise")) for _ in range(2)]
    check_run_bits(runs[0], runs[1], "FP8, optim_grads_params")


def computes_in_fp8(rank: int, world: int) -> str:
    """The same step in bf16 has another loss: what is compared is FP8."""
    device = init_megatron()
    bf16, quantized = (
        with_te_layers(CASE, ZERO_3, device, fields) for fields in (NONE, fp8("tensorwise"))
    )
    losses = [train_step(one, batches(CASE, 0, rank, device))[0] for one in (bf16, quantized)]
    assert losses[0] != losses[1], losses
    assert abs(losses[0] - losses[1]) < 0.05 * losses[0], losses
    return str(losses)


def keeps_no_fp8_model(rank: int, world: int) -> str:
    """Between steps a sharded model in FP8 holds what it holds in bf16 and TE's amax histories,
    not the bytes of its weights in FP8; no layer has a workspace of quantized weights."""
    device = init_megatron()
    held = []
    for fields in (NONE, fp8("delayed")):
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        trainer = with_te_layers(WIDE, ZERO_3, device, fields)
        for step in range(2):
            train_step(trainer, batches(WIDE, step, rank, device))
        trainer.wrapper.zero_grad_buffer()
        trainer.wrapper.engine.gather.reshard_all()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_stats()["requested_bytes.all.current"] - before)
        for layer in trainer.wrapper.modules():
            assert not getattr(layer, "_fp8_workspaces", None), type(layer)
        weights = sum(group.layout.item_numel for group in trainer.wrapper.engine.groups)
        del trainer
    more = held[1] - held[0]
    assert more < weights // 4, f"{more} bytes more than bf16, of {weights} weights"
    return f"{more} bytes more than in bf16, {weights} weights"


# Kinds of models with quantized weights, bit for bit beside stock DDP with `fp8_param_gather`.


def _nothing(model: torch.nn.Module) -> None:
    pass


def freezes_matrices(model: torch.nn.Module) -> None:
    """Norms, embedding and output layer are trained over a frozen base."""
    for name, param in model.named_parameters():
        if "decoder" in name and param.ndim == 2:
            param.requires_grad_(False)


@dataclass(frozen=True)
class Kind:
    """count: quantized weights; case: changes of the case; options: of the model config; ddp: of
    the DDP config."""

    count: int
    case: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    change: Change = _nothing
    recipes: tuple[str, ...] = ("tensorwise", "blockwise")
    strategies: tuple[str, ...] = (ZERO_3,)


KINDS = {
    "full recompute": Kind(8, {"recompute": "full-1"}, recipes=RECIPES),
    "recomputed mlp": Kind(8, {"recompute": "selective-mlp"}),
    "tied": Kind(8, {"tied": True}),
    "first and last layer in bf16": Kind(
        8, {"num_layers": 4},
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1,
         "num_layers_at_end_in_bf16": 1},
    ),
    "frozen matrices": Kind(8, change=freezes_matrices),
    "transposes kept": Kind(
        8, {"microbatches": 3}, ddp={"keep_fp8_transpose_cache": True},
        strategies=("no_shard", "optim"),
    ),
    "grouped experts": Kind(
        # Of each layer qkv, projection, and two matrices of each of four experts.
        2 * (2 + 2 * 4),
        options={
            "num_moe_experts": 4, "moe_grouped_gemm": True, "moe_ffn_hidden_size": 256,
            "moe_router_topk": 2, "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall", "moe_router_padding_for_quantization": True,
        },
        strategies=(ZERO_1, ZERO_3),
    ),
}  # fmt: skip


def forget_scaling() -> None:
    """As in a new process."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


@dataclass(frozen=True)
class Noted:
    """Of one wrapper after a step, copied: bytes and scales of quantized weights, main weights, the
    step's loss, and that of an evaluation behind it."""

    quantized: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    mains: Mapping[str, torch.Tensor]
    losses: tuple[Any, ...] = ()


def _noted(trainer: Trainer, losses: tuple[Any, ...] = ()) -> Noted:
    mains = {name: value.clone() for name, value in trainer.params().items()}
    return Noted(quantized_of(trainer), mains, losses)


def trained(
    case: Case, recipe: str, strategy: str | None, device: torch.device, kind: Kind, rank: int
) -> list[Noted]:
    """What was noted before the first step, and after each. TE keeps the largest values of all
    modules of a process in one state, which every forward of any of them moves on: one wrapper
    trains after the other, from a new state each."""
    forget_scaling()
    fields = fp8(recipe, fp8_param=True, **kind.options)
    trainer = te_trainer(case, strategy, device, fields, kind.change, kind.ddp)
    notes = [_noted(trainer)]
    for step in range(STEPS):
        data = batches(case, step, rank, device)
        loss = train_step(trainer, data)[0]
        after = _noted(trainer)
        with torch.no_grad():
            seen = forward_backward(trainer, data, forward_only=True)
        notes.append(replace(after, losses=(loss, seen)))
    return notes


def trains_as_ddp(rank: int, world: int, name: str, recipe: str, strategy: str) -> str:
    """With an evaluation behind each step, which computes with the step's weights."""
    device = init_megatron()
    kind = KINDS[name]
    case = QUANTIZED_CASE.but(**kind.case)
    theirs, ours = (trained(case, recipe, one, device, kind, rank) for one in (None, strategy))
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        label = f"{name}, {recipe}, {strategy}, after {step} steps"
        assert mine.losses == other.losses, (label, mine.losses, other.losses)
        # DDP has no main weights of frozen matrices, but what their bytes stand for.
        left = mine.quantized if kind.change is freezes_matrices else ()
        found, expected = (
            (one.quantized, {key: main for key, main in one.mains.items() if key not in left})
            for one in (mine, other)
        )
        same_weights(found, expected, label, kind.count)
    return f"{kind.count} weights, losses {[note.losses for note in ours[1:]]}"


# Runs that are saved and resumed: losses and bits are those of a run that was not stopped.


def bits_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Main weights, bytes and scales of quantized ones, and what delayed scaling knows."""
    found = trainer.params()
    for name, (data, scales) in quantized_of(trainer).items():
        found |= {f"{name}, bytes": data, f"{name}, scales": scales}
    state = trainer.wrapper.state_dict_for_save_checkpoint()
    return found | {key: value for key, value in state.items() if key.endswith(FP8_SCALING)}


def compare(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor], label: str) -> None:
    assert mine.keys() == other.keys(), (label, mine.keys() ^ other.keys())
    for name, value in other.items():
        same(mine[name], value, f"{label}, {name}")


def resumes(rank: int, world: int, recipe: str, quantized: bool) -> str:
    device = init_megatron()
    case = QUANTIZED_CASE
    forget_scaling()
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)

    def made(strategy: str, seed: int) -> Trainer:
        return te_trainer(case.but(seed=seed), strategy, device, fp8(recipe, fp8_param=quantized))

    def steps(trainer: Trainer, first: int) -> list[Any]:
        found = []
        for step in (first, first + 1):
            found.append(train_step(trainer, batches(case, step, rank, device)))
        return found

    first = made(ZERO_3, case.seed)
    steps(first, 0)
    save_checkpoint(folder[0], 2, training_state([first.wrapper], first.optimizer))
    saved = bits_of(first)
    records = [name for name in saved if name.endswith(FP8_SCALING)]
    assert len(records) == (4 * case.num_layers if recipe == "delayed" else 0), records
    losses = steps(first, 2)
    end = bits_of(first)
    for strategy in (ZERO_3, ZERO_1):
        second = made(strategy, 77)
        label = f"{recipe}, {strategy}"
        state = training_state([second.wrapper], second.optimizer, is_loading=True)
        _, state = load_checkpoint(folder[0], state)
        load_training_state([second.wrapper], state, second.optimizer)
        compare(bits_of(second), saved, f"{label}, loaded")
        found = steps(second, 2)
        if strategy == ZERO_3:
            assert found == losses, (label, found, losses)
            compare(bits_of(second), end, f"{label}, two steps on")
    return f"{len(records)} records, losses {losses}"


DEVICE_CHECKS: dict[str, Check] = {
    "computes in FP8": Check(computes_in_fp8),
    "twice": Check(same_run_twice),
    "memory": Check(keeps_no_fp8_model),
}
DEVICE_CHECKS |= {
    f"{name}, {recipe}, {strategy}": Check(trains_as_ddp, (name, recipe, strategy))
    for name, kind in KINDS.items()
    for recipe in kind.recipes
    for strategy in kind.strategies
}
DEVICE_CHECKS |= {
    f"resumed, {recipe}, {'quantized' if quantized else 'bf16'} weights": Check(
        resumes, (recipe, quantized)
    )
    for recipe in RECIPES
    for quantized in (True, False)
    if quantized or recipe != "blockwise"
}
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=500.0, needs=("te", "fp8"), environment=DETERMINISTIC)

test_fp8 = expecting(OUTCOMES)
