"""Models of every kind that core has, and cells of (model, recompute, strategy, what is trained).

Each cell trains to the same weights as the same model under stock DDP without overlap and without
recompute. `pairwise` chooses the cells: every allowed pair of values occurs in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from torch import nn

from .checks import check_loss, check_norm, check_weights
from .gpt import STRATEGIES, Case, Trainer, batches, init_megatron, make_trainer, train_step

CASE = Case(num_layers=2, hidden=24, heads=3, ffn=40, vocab=53, seq=8, batch=1, bias=False)

RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "full, uniform": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "full, block": {
        "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1,
    },
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "MLP": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}  # fmt: skip
"""What core recomputes. Norms, activations of experts and MLA's up-projections need Transformer
Engine: tests/gpu/test_gpu_habits.py has norms."""


# Models. Each is called like a GPTModel and returns the losses of the tokens.


def _config(recompute: str, cls: type[TransformerConfig] = TransformerConfig, **more: Any) -> Any:
    options = {
        "num_layers": CASE.num_layers, "hidden_size": CASE.hidden,
        "num_attention_heads": CASE.heads, "ffn_hidden_size": CASE.ffn, "add_bias_linear": False,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_dropout_fusion": False,
        "persist_layer_norm": False, "use_cpu_initialization": True,
    }  # fmt: skip
    return cls(**{**options, **RECOMPUTE[recompute], **more})


def _gpt(config: Any, tied: bool, spec: Any = None) -> GPTModel:
    spec = spec or get_gpt_layer_local_spec(config.num_moe_experts, moe_grouped_gemm=False)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config, spec, vocab_size=CASE.vocab, max_sequence_length=CASE.seq,
        share_embeddings_and_output_weights=tied, position_embedding_type="rope",
        mtp_block_spec=mtp,
    )  # fmt: skip


def dense(recompute: str, tied: bool) -> nn.Module:
    return _gpt(_config(recompute), tied)


def shared_experts(recompute: str, tied: bool) -> nn.Module:
    config = _config(
        recompute, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=20,
        moe_shared_expert_intermediate_size=12, moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
    )  # fmt: skip
    return _gpt(config, tied)


class WideKeysAttention(nn.Module):
    """Causal attention whose keys are wider than its values. Core's own has one width for both;
    for latent attention it takes Transformer Engine's."""

    def __init__(self, config: Any, *unused: Any, softmax_scale: float, **more: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *unused: Any, **more: Any) -> torch.Tensor:
        """(sequence, batch, heads, width) three times -> (sequence, batch, heads * width)."""
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def latent_attention(recompute: str, tied: bool) -> nn.Module:
    config = _config(
        recompute, MLATransformerConfig, q_lora_rank=10, kv_lora_rank=12, qk_head_dim=8,
        qk_pos_emb_head_dim=4, v_head_dim=8, rope_type="rope",
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    spec.submodules.self_attention.submodules.core_attention = WideKeysAttention
    # Without Transformer Engine core takes what stands in for its classes for the classes.
    has_te = isinstance(multi_latent_attention.TELinear, type)
    with mock.patch.object(multi_latent_attention, "HAVE_TE", has_te):
        return _gpt(config, tied, spec)


def predicts_further_tokens(recompute: str, tied: bool) -> nn.Module:
    return _gpt(_config(recompute, mtp_num_layers=2), tied)


class TwoTowers(MegatronModule):
    """A tower of its own width whose output is added to what the text tower embeds. The tower
    reads a fixed table of features; the embedding is called from outside its model."""

    def __init__(self, recompute: str, tied: bool) -> None:
        config = _config(recompute)
        super().__init__(config)
        self.text = _gpt(config, tied)
        self.model_type, self.set_input_tensor = self.text.model_type, self.text.set_input_tensor
        self.share_embeddings_and_output_weights = tied
        tower = _config(recompute, hidden_size=16, num_attention_heads=2, ffn_hidden_size=28)
        self.vision = TransformerBlock(tower, get_gpt_layer_local_spec())
        self.projector = nn.Linear(16, CASE.hidden)
        self.register_buffer("features", torch.randn(CASE.vocab, 16))

    def forward(self, tokens: Any, positions: Any, mask: Any, labels: Any) -> torch.Tensor:
        seen = self.features[tokens].transpose(0, 1).contiguous()
        seen.requires_grad_(torch.is_grad_enabled())  # see `_need_gradients`
        seen = self.vision(hidden_states=seen, attention_mask=mask)
        hidden = self.text.embedding(input_ids=tokens, position_ids=positions)
        return self.text(
            tokens, positions, mask, decoder_input=hidden + self.projector(seen), labels=labels
        )


def two_towers(recompute: str, tied: bool) -> nn.Module:
    return TwoTowers(recompute, tied)


MODELS: Mapping[str, Callable[[str, bool], nn.Module]] = {
    "dense": dense,
    "shared experts": shared_experts,
    "latent attention": latent_attention,
    "multi-token prediction": predicts_further_tokens,
    "two towers": two_towers,
}


# What of a model is trained.


def _layers(model: nn.Module) -> Any:
    return (model.text if hasattr(model, "text") else model).decoder.layers


def _need_gradients(model: nn.Module) -> None:
    """Core's checkpoints are reentrant: without an input that needs a gradient they give none to
    the weights inside. Under a frozen embedding users of core have its output need one."""
    text = model.text if hasattr(model, "text") else model
    text.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())


def train_all(model: nn.Module) -> None:
    pass


def freeze_part(model: nn.Module) -> None:
    """The tower of its own where there is one, else the first layer; and the embedding."""
    part = model.vision if hasattr(model, "vision") else _layers(model)[0]
    for param in part.parameters():
        param.requires_grad_(False)
    for name, param in model.named_parameters():
        if "word_embeddings" in name:
            param.requires_grad_(False)
    _need_gradients(model)


class LowRank(nn.Module):
    """A linear layer with a trained addition of rank 2 to its frozen weight, as LoRA has it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        out, width = base.weight.shape
        self.down = nn.Parameter(torch.randn(2, width) * 0.1)
        self.up = nn.Parameter(torch.randn(out, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> Any:
        out, bias = self.base(x)
        return out + x @ self.down.t() @ self.up.t(), bias


def adapt(model: nn.Module) -> None:
    """Everything frozen but an addition to every layer's attention projection."""
    for param in model.parameters():
        param.requires_grad_(False)
    for layer in _layers(model):
        layer.self_attention.linear_proj = LowRank(layer.self_attention.linear_proj)
    _need_gradients(model)


TRAINED: Mapping[str, tuple[bool, Callable[[nn.Module], None]]] = {
    # whether embedding and output layer are tied, and what is done to the model
    "all": (False, train_all),
    "tied": (True, train_all),
    "frozen part": (False, freeze_part),
    "LoRA": (False, adapt),
    "tied, frozen part": (True, freeze_part),
}


# Cells.


@dataclass(frozen=True)
class Cell:
    model: str
    recompute: str
    strategy: str
    trained: str

    @property
    def values(self) -> tuple[str, str, str, str]:
        return (self.model, self.recompute, self.strategy, self.trained)


AXES = (tuple(MODELS), tuple(RECOMPUTE), STRATEGIES, tuple(TRAINED))


def impossible(cell: Cell) -> str | None:
    """Why a cell cannot be run, with or without sharding; None if it can."""
    if cell.recompute == "experts" and cell.model != "shared experts":
        return "there are no experts to recompute"
    if cell.recompute == "MLP" and cell.model == "shared experts":
        return "every MLP is one of experts there, which `moe` recomputes"
    if cell.recompute == "full, block" and cell.model == "multi-token prediction":
        return "core refuses block recompute with MTP"
    return None


def _pairs(cell: Cell) -> set[tuple[int, str, int, str]]:
    return {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(cell.values), 2)}


def every_cell() -> list[Cell]:
    return [Cell(*values) for values in product(*AXES)]


def pairwise() -> list[Cell]:
    """Few cells, in which each pair of values that can be run at all occurs: at each turn the cell
    with most pairs that are missing yet."""
    possible = [cell for cell in every_cell() if impossible(cell) is None]
    missing = set[tuple[int, str, int, str]]().union(*map(_pairs, possible))
    chosen = []
    while missing:
        best = max(possible, key=lambda cell: len(_pairs(cell) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def uncovered_pairs() -> dict[str, str]:
    """Pairs of values that occur in no cell, and why."""
    covered = set[tuple[int, str, int, str]]().union(*map(_pairs, pairwise()))
    found: dict[str, str] = {}
    for cell in every_cell():
        reason = impossible(cell)
        for _, a, _, b in _pairs(cell) - covered:
            assert reason is not None, cell
            found[f"{a} x {b}"] = reason
    return found


CELLS = pairwise()


# Training.


def _build(cell: Cell, recompute: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    tied, change = TRAINED[cell.trained]
    model = MODELS[cell.model](recompute, tied)
    change(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return model


def _run(trainer: Trainer, rank: int, device: torch.device, steps: int) -> Iterator[Any]:
    for step in range(steps):
        yield train_step(trainer, batches(trainer.case, step, rank, device))


def check_cells(rank: int, world: int, cells: list[Cell], seed: int, steps: int = 3) -> int:
    """Each cell against its reference; how many there were."""
    device = init_megatron()
    for cell in cells:
        case = CASE.but(seed=seed)
        reference = make_trainer(_build(cell, "none", seed), case.but(overlap=False), None)
        ours = make_trainer(_build(cell, cell.recompute, seed), case, cell.strategy)
        label = f"{cell} on {world} ranks, seed {seed}"
        for mine, theirs in zip(
            _run(ours, rank, device, steps), _run(reference, rank, device, steps), strict=True
        ):
            check_loss(mine[0], theirs[0], label)
            check_norm(mine[1], theirs[1], label, 1e-5)
        check_weights(ours.params(), reference.params(), label)
        ours.wrapper.zero_grad_buffer()
        ours.wrapper.engine.main_weights_changed()
        ours.wrapper.stop_communication()
        if cell.strategy == "optim_grads_params":
            for unit in ours.wrapper.engine.units:
                held = [group.weights[0].tensor.untyped_storage().nbytes() for group in unit.groups]
                assert sum(held) == 0, (label, unit.name)
    return len(cells)
