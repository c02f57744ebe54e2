"""Mixtures of experts, shared out over 2 ranks, under our wrapper and under stock DDP; and their
checkpoints, which move between ranks, grouped layers of Transformer Engine included.

With 4 GPUs or more each expert has 2 data-parallel ranks, else one. Every rank compares what it
holds: all dense weights and its own experts', whole over their data-parallel ranks. The reference
has no distributed optimizer, so that each rank has whole weights and nothing is put together.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_te_min_version
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)
from tests.lib.gpt.checks import relative
from tests.lib.gpt.gather_full import full_values
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Trainer,
    batches,
    plain_name,
    train_step,
)
from tests.lib.gpt.topologies import local_of
from tests.lib.gpu.experts import (
    CASE,
    DISPATCHERS,
    EXPERTS,
    KINDS,
    OVERLAPS,
    Kind,
    init_experts,
    trainer_of,
)
from tests.lib.gpu.gpu_ranks import DETERMINISTIC, NEEDS, Check, Outcomes, expecting
from tests.lib.gpu.runs import NONE, Fields

CHECKS = ("megatron/wrapper/domains.py", "checkpoint/training.py")

STEPS = 3
HAS_TE = NEEDS["te"][0]()
HAS_DEEP_EP = importlib.util.find_spec("deep_ep") is not None
HAS_OPERATIONS = "use_transformer_engine_op_fuser" in TransformerConfig.__dataclass_fields__ and (
    is_te_min_version("2.14.0")
)

Weights = dict[str, torch.Tensor]


def _main_weights(trainer: Trainer) -> Weights:
    """The float32 weights that this rank has, whole over their data-parallel ranks; collective."""
    if trainer.strategy is None:
        named = [(plain_name(name), param) for name, param in trainer.wrapper.named_parameters()]
        return {n: getattr(p, "main_param", p).detach().float().cpu().clone() for n, p in named}
    trainer.wrapper.stop_communication()
    pairs = [(plain_name(pair.managed.fqns[0]), pair) for pair in trainer.wrapper.engine.pairs]
    found = full_values(pairs, lambda pair: local_of(pair.sharded))
    return {name: value.cpu() for name, value in found.items()}


@dataclass(frozen=True)
class Outcome:
    """Loss and norm of each step, and the weights after the last."""

    scalars: tuple[tuple[float, float], ...]
    weights: Weights


def _run(
    kind: Kind,
    dispatcher: str,
    strategy: str | None,
    rank: int,
    device: torch.device,
    ddp: Fields = NONE,
) -> Outcome:
    trainer = trainer_of(kind, DISPATCHERS[dispatcher], strategy, device, ddp)
    scalars = tuple(
        train_step(trainer, batches(trainer.case, step, rank, device)) for step in range(STEPS)
    )
    return Outcome(scalars, _main_weights(trainer))


@dataclass(frozen=True)
class Errors:
    """The largest ones, in the measures of `Kind`."""

    first: float
    later: float
    moved: float

    def within(self, kind: Kind) -> bool:
        """False for not-a-number as well."""
        return self.first <= kind.first and self.later <= kind.later and self.moved <= kind.moved

    def __str__(self) -> str:
        return f"{self.first:.1e}/{self.later:.1e}/{self.moved:.1e}"


def _errors(ours: Outcome, reference: Outcome) -> Errors:
    assert ours.weights.keys() == reference.weights.keys()
    scalars = []
    for step in zip(ours.scalars, reference.scalars, strict=True):
        scalars.append(max(relative(mine, other) for mine, other in zip(*step, strict=True)))
    moved = []
    for name, expected in reference.weights.items():
        moved.append(
            (ours.weights[name].double() - expected.double()).norm().item()
            / (CASE.lr * STEPS * expected.numel() ** 0.5)
        )
    return Errors(scalars[0], max(scalars[1:]), max(moved))


def can_run(kind: Kind, fields: Fields) -> bool:
    """Whether what is installed has what is asked for."""
    if fields["moe_token_dispatcher_type"] == "flex" and not HAS_DEEP_EP:
        return False
    if fields.get(OVERLAPS) and not (kind.bf16 and HAS_TE):
        return False
    if "use_transformer_engine_op_fuser" in fields and not (kind.grouped and HAS_OPERATIONS):
        return False
    return HAS_TE or not kind.grouped


def trains_like_ddp(rank: int, world: int, name: str, dispatcher: str, ddp: Fields = NONE) -> str:
    """Three steps give the losses, norms and weights of stock DDP, under every strategy. Failures
    are raised at the end: a rank that left early would leave the others in a collective."""
    kind = KINDS[name]
    device = init_experts()
    reference = _run(kind, dispatcher, None, rank, device)
    found = {}
    for strategy in STRATEGIES:
        found[strategy] = _errors(_run(kind, dispatcher, strategy, rank, device, ddp), reference)
    told = ", ".join(f"{strategy} {errors}" for strategy, errors in found.items())
    wrong = [strategy for strategy, errors in found.items() if not errors.within(kind)]
    assert not wrong, f"{wrong} beyond {Errors(kind.first, kind.later, kind.moved)}: {told}"
    return f"off (first step/later/weights): {told}"


# Checkpoints.


def _tensors(root: str) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, whole, read by torch alone."""
    [folder] = Path(root).glob("iter_*")
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {}
    for key, entry in stored.items():
        if isinstance(entry, TensorStorageMetadata):
            found[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def split_trainer(name: str, expert_parallel: int, strategy: str) -> tuple[Trainer, torch.device]:
    """Of a model whose experts are shared out over so many ranks."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    device = init_experts(expert_parallel)
    return trainer_of(KINDS[name], DISPATCHERS["allgather"], strategy, device), device


def _moved(name: str, source: str, target: str, expert_parallel: int, strategy: str) -> None:
    """Loads `source` into a new model, and saves that as `target`."""
    trainer, _ = split_trainer(name, expert_parallel, strategy)
    with torch.no_grad():
        for param in trainer.wrapper.parameters():
            getattr(param, "_local_tensor", param).fill_(7)
    state = training_state([trainer.wrapper], trainer.optimizer, is_loading=True)
    _, state = load_checkpoint(source, state)
    load_training_state([trainer.wrapper], state, trainer.optimizer)
    save_checkpoint(target, 2, training_state([trainer.wrapper], trainer.optimizer))


def experts_move(rank: int, world: int, name: str) -> str:
    """From two expert-parallel ranks to one and back, bit for bit, under other strategies."""
    box: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    root = box[0]
    trainer, device = split_trainer(name, 2, "optim_grads_params")
    for step in range(2):
        train_step(trainer, batches(trainer.case, step, rank, device))
    save_checkpoint(f"{root}/a", 2, training_state([trainer.wrapper], trainer.optimizer))
    _moved(name, f"{root}/a", f"{root}/b", 1, "optim")
    _moved(name, f"{root}/b", f"{root}/c", 2, "optim_grads")
    first, *others = (_tensors(f"{root}/{part}") for part in "abc")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root)
    experts = [key for key in first if ".experts." in key and key.startswith("model.")]
    assert len(experts) == 3 * EXPERTS * CASE.num_layers, experts
    for other in others:
        assert set(other) == set(first)
        assert [key for key in first if not torch.equal(first[key], other[key])] == []
    return f"{len(first)} tensors"


DEVICE_CHECKS = {
    f"{name}, {dispatcher}": Check(trains_like_ddp, (name, dispatcher))
    for name, kind in KINDS.items()
    for dispatcher, fields in DISPATCHERS.items()
    if can_run(kind, fields)
}
PARTS = {"megatron_fsdp_enable_fine_grained_param_gather": True}
DEVICE_CHECKS |= {
    f"{name}, alltoall, in parts": Check(trains_like_ddp, (name, "alltoall", PARTS))
    for name, kind in KINDS.items()
    if HAS_TE or not kind.grouped
}
DEVICE_CHECKS |= {
    f"{name}, {dispatcher}, in parts": Check(trains_like_ddp, (name, dispatcher, PARTS))
    for name, kind in KINDS.items()
    for dispatcher, fields in DISPATCHERS.items()
    if fields.get("delay_wgrad_compute") and can_run(kind, fields)
}
MOVES = {
    f"{name}, resharded": Check(experts_move, (name,))
    for name, kind in KINDS.items()
    if HAS_TE or not kind.grouped
}
# Core asks for the second before it fuses SwiGLU.
ENVIRONMENT = {**DETERMINISTIC, "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
OUTCOMES = Outcomes(
    DEVICE_CHECKS,
    timeout_s=240.0,
    world=4 if torch.cuda.device_count() >= 4 else 2,
    environment=ENVIRONMENT,
)
MOVE_OUTCOMES = Outcomes(MOVES, timeout_s=120.0, environment=ENVIRONMENT)

test_experts_on_gpus = expecting(OUTCOMES)
test_experts_move_between_ranks_on_gpus = expecting(MOVE_OUTCOMES)
