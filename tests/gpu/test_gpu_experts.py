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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_te_min_version
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)
from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.lib.gpt.checks import relative
from tests.lib.gpt.gather_full import full_values
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    make_trainer,
    plain_name,
    train_step,
)
from tests.lib.gpt.topologies import local_of
from tests.lib.gpu.gpu_ranks import DETERMINISTIC, NEEDS, Check, Outcomes, expecting
from tests.lib.gpu.runs import NONE, Fields

EXPERTS = 4
EP = 2
STEPS = 3
HAS_TE = NEEDS["te"][0]()
HAS_DEEP_EP = importlib.util.find_spec("deep_ep") is not None
DISPATCHERS: Mapping[str, Fields] = {
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "alltoall beside shared experts": {
        "moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": True,
        "moe_shared_expert_intermediate_size": 96,
    },
    "alltoall, fused operations": {
        "moe_token_dispatcher_type": "alltoall", "use_transformer_engine_op_fuser": True,
        "gradient_accumulation_fusion": True,
    },
    "alltoall, overlapped": {
        "moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": True,
        "moe_shared_expert_intermediate_size": 96,
    },
    "alltoall, overlapped, weight gradients later": {
        "moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": True, "gradient_accumulation_fusion": True,
    },
    "alltoall, overlapped, latent": {
        "moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": True, "moe_latent_size": 64,
        "moe_shared_expert_intermediate_size": 96,
    },
    "DeepEP": {
        "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep",
        "moe_router_dtype": "fp32",
    },
    "HybridEP": {
        "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep",
        "moe_router_dtype": "fp32",
    },
}  # fmt: skip
"""Fields of the model's config; the last two need the package deep_ep, fused operations a core and
a Transformer Engine that have them."""
OVERLAPS = "overlap_moe_expert_parallel_comm"
ORDER_ONLY = (
    OVERLAPS,
    "delay_wgrad_compute",
    "gradient_accumulation_fusion",
)
"""Fields that change when things are computed, and not what: the reference goes without."""
HAS_OPERATIONS = "use_transformer_engine_op_fuser" in TransformerConfig.__dataclass_fields__ and (
    is_te_min_version("2.14.0")
)
CASE = Case(
    num_layers=2, hidden=128, heads=4, ffn=192, vocab=256, seq=64, batch=2, swiglu=True, bias=False
)

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """How experts are computed, and how far a run may be from the reference's.

    first: relative, of loss and norm of the first step, which starts from equal weights: only the
    order of sums differs. later: of the others. moved: of a weight tensor, as a part of how far
    Adam can have moved it (lr an element and step). These are wide, since one flipped rounding can
    send a token to another expert.
    """

    grouped: bool
    bf16: bool
    first: float
    later: float
    moved: float


KINDS: Mapping[str, Kind] = {
    "SequentialMLP, fp32": Kind(grouped=False, bf16=False, first=2e-6, later=1e-4, moved=5e-3),
    "TEGroupedMLP, bf16": Kind(grouped=True, bf16=True, first=2e-5, later=2e-3, moved=0.1),
}


def init_experts(expert_parallel: int = EP) -> torch.device:
    """Groups with experts over so many ranks, once in a process; CPU mode without a GPU."""
    on_gpu = torch.cuda.is_available()
    patches.install(FUSED_WGRAD)
    if not on_gpu:
        cpu_mode.enable_cpu_mode()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_parallel)
    if on_gpu:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _config(case: Case, kind: Kind, chosen: Fields) -> TransformerConfig:
    return TransformerConfig(
        num_layers=case.num_layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        ffn_hidden_size=case.ffn,
        gated_linear_unit=case.swiglu,
        add_bias_linear=case.bias,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=case.bf16,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=case.ffn,
        moe_aux_loss_coeff=0.01,
        moe_grouped_gemm=kind.grouped,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        **chosen,
    )


REFERENCE = {
    "use_distributed_optimizer": False, "overlap_grad_reduce": False, "overlap_param_gather": False,
    "bucket_size": None,
}  # fmt: skip
"""Fields of stock DDP's config."""


def trainer_of(
    kind: Kind,
    fields: Fields,
    strategy: str | None,
    device: torch.device,
    ddp: Fields = NONE,
    case: Case | None = None,
) -> Trainer:
    """Of the same weights each time, from the seed of the case, by default of `CASE`, and the place
    among the expert ranks. `fields`: of the model's config."""
    case = (CASE if case is None else case).but(bf16=kind.bf16)
    torch.manual_seed(case.seed)
    model_parallel_cuda_manual_seed(case.seed)
    if kind.grouped:
        spec_of = get_gpt_layer_with_transformer_engine_spec
    else:
        spec_of = get_gpt_layer_local_spec
    if strategy is None and OVERLAPS in fields:
        fields = {name: value for name, value in fields.items() if name not in ORDER_ONLY}
    config = _config(case, kind, fields)
    model: Any = GPTModel(
        config,
        spec_of(num_experts=EXPERTS, moe_grouped_gemm=kind.grouped),
        vocab_size=case.vocab,
        max_sequence_length=case.seq,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.positions,
    ).to(device)
    model = Float16Module(config, model) if case.bf16 else model
    if strategy is not None:
        return make_trainer(model, case, strategy, ddp)
    whole = {"use_distributed_optimizer": False, "overlap_param_gather": False}
    return make_trainer(model, case, None, REFERENCE, whole)


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
    scalars = [
        max(relative(mine, other) for mine, other in zip(*step, strict=True))
        for step in zip(ours.scalars, reference.scalars, strict=True)
    ]
    moved = [
        (ours.weights[name].double() - expected.double()).norm().item()
        / (CASE.lr * STEPS * expected.numel() ** 0.5)
        for name, expected in reference.weights.items()
    ]
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
    found = {
        strategy: _errors(_run(kind, dispatcher, strategy, rank, device, ddp), reference)
        for strategy in STRATEGIES
    }
    told = ", ".join(f"{strategy} {errors}" for strategy, errors in found.items())
    wrong = [strategy for strategy, errors in found.items() if not errors.within(kind)]
    assert not wrong, f"{wrong} beyond {Errors(kind.first, kind.later, kind.moved)}: {told}"
    return f"off (first step/later/weights): {told}"


# Checkpoints.


def _tensors(root: str) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, whole, read by torch alone."""
    [folder] = Path(root).glob("iter_*")
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
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


CHECKS = {
    f"{name}, {dispatcher}": Check(trains_like_ddp, (name, dispatcher))
    for name, kind in KINDS.items()
    for dispatcher, fields in DISPATCHERS.items()
    if can_run(kind, fields)
}
PARTS = {"megatron_fsdp_enable_fine_grained_param_gather": True}
CHECKS |= {
    f"{name}, alltoall, in parts": Check(trains_like_ddp, (name, "alltoall", PARTS))
    for name, kind in KINDS.items()
    if HAS_TE or not kind.grouped
}
CHECKS |= {
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
    CHECKS,
    timeout_s=240.0,
    world=4 if torch.cuda.device_count() >= 4 else 2,
    environment=ENVIRONMENT,
)
MOVE_OUTCOMES = Outcomes(MOVES, timeout_s=120.0, environment=ENVIRONMENT)

test_experts_on_gpus = expecting(OUTCOMES)
test_experts_move_between_ranks_on_gpus = expecting(MOVE_OUTCOMES)
