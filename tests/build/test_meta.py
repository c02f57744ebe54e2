"""A start on the meta device: the weights of a start without it, one unit at a time, and errors
that name what cannot be initialized (traps I1, I2)."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch import nn

from megatron_fsdp_adapter import FullyShardedDataParallel, fully_shard_model
from megatron_fsdp_adapter.build.materialize import initialize
from megatron_fsdp_adapter.megatron.wrapper.core_init import core_initializers
from tests.lib.gpt.checks import check_same_bits
from tests.lib.gpt.gpt import Case, ddp_config, full_all, init_megatron, make_trainer, model_config
from tests.lib.gpt.memory import live_bytes
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("build/materialize.py", "megatron/wrapper/core_init.py")

CASE = Case(heads=4, vocab=54)
TIED = "tied, learned positions"
CASES = {
    "dense": (CASE, {}),
    TIED: (CASE.but(tied=True, positions="learned_absolute"), {}),
    "bf16, SwiGLU": (CASE.but(bf16=True, swiglu=True, bias=False), {}),
    "experts, a shared one with a gate": (
        CASE.but(bias=False, bf16=True),
        {
            "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 20,
            "moe_shared_expert_intermediate_size": 12,
            "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather",
        },
    ),
}  # fmt: skip


def on_meta(wanted: bool) -> Any:
    return torch.device("meta") if wanted else contextlib.nullcontext()


def build(case: Case, options: dict[str, Any], meta: bool, change: Any = None) -> Any:
    """As Megatron-LM's `get_model` does it."""
    torch.manual_seed(case.seed)
    model_parallel_cuda_manual_seed(case.seed)
    config = model_config(case)
    for name, value in {**options, "init_model_with_meta_device": meta}.items():
        setattr(config, name, value)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        normalization=config.normalization,
    )
    with on_meta(meta):
        model = GPTModel(
            config,
            spec,
            vocab_size=case.vocab,
            max_sequence_length=case.seq,
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type=case.positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        if change is not None:
            change(model)
    return Float16Module(config, model) if case.bf16 else model


def _wrapped(case: Case, options: dict[str, Any], strategy: str, meta: bool) -> Any:
    model = build(case, options, meta)
    assert all(param.is_meta for param in model.parameters()) == meta
    return make_trainer(model, case, strategy).wrapper


WHOLE = {}
TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
STARTS = (
    ("dense", "optim", WHOLE),
    *((name, "optim_grads_params", WHOLE) for name in CASES),
    *((TIED, strategy, PIPELINE) for strategy in ("no_shard", "optim_grads_params")),
    *(
        pytest.param(name, "optim_grads_params", TENSOR, marks=pytest.mark.full)
        for name in ("dense", "bf16, SwiGLU")
    ),
)
"""Cases, strategies, and what splits a model: tensor-parallel ranks each have their pieces of
weights, and the second pipeline stage has a copy of a tied embedding."""


@pytest.mark.parametrize(("name", "strategy", "split"), STARTS)
@on_ranks(2)
def test_weights_are_those_of_a_start_without_the_meta_device(
    name: str, strategy: str, split: dict[str, int]
) -> None:
    """Bit for bit, with the same marks on the parameters."""
    init_megatron(**split)
    case, options = CASES[name]
    wrappers = [_wrapped(case, {**options, **split}, strategy, meta) for meta in (True, False)]
    for ours, expected in zip(*(wrapper.engine.pairs for wrapper in wrappers), strict=True):
        assert sorted(vars(ours.unsharded)) == sorted(vars(expected.unsharded))
        local = [pair.sharded._local_tensor for pair in (ours, expected)]
        assert torch.equal(*local), ours.managed.fqns[0]


class Unfilled(MegatronModule):
    """Has a parameter of its own and no `reset_parameters`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(2))


class Forgetful(nn.Linear):
    """Fills one of its two parameters."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def _add_unfilled(model: Any) -> None:
    model.decoder.layers[1].extra = Unfilled(model.config)
    model.extra = Unfilled(model.config)
    model.pooler = MegatronModule(model.config)
    model.pooler.dense = nn.Linear(3, 3)
    type(model.pooler).__module__ = "megatron.core.transformer.module"


@on_ranks(1)
def test_what_cannot_be_initialized_is_one_error(rank: int) -> None:
    """All modules at once, before any collective; what `reset_parameters` left out, too."""
    init_megatron()
    case, options = CASES["dense"]
    model = build(case, options, True, _add_unfilled)
    with pytest.raises(ValueError) as caught:
        FullyShardedDataParallel(model.config, ddp_config(case, "optim"), model)
    text = str(caught.value)
    assert "init_model_with_meta_device=True: 3 modules" in text
    for named in (
        "decoder.layers.1.extra (Unfilled: scale, table)",
        "extra (Unfilled: scale",
        "pooler.dense (Linear: weight, bias)",
    ):
        assert named in text, text
    model = build(case, options, True)
    model.config.init_model_with_meta_device = False
    with pytest.raises(ValueError, match="init_model_with_meta_device=False: .*word_embeddings"):
        FullyShardedDataParallel(model.config, ddp_config(case, "optim"), model)
    with torch.device("meta"):
        forgetful, plain = nn.Sequential(nn.Linear(3, 3), Forgetful(3, 3)), nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"of the module of 1\.bias left a part"):
        fully_shard_model(forgetful, init_model_with_meta_device=True)
    with pytest.raises(ValueError, match="init_model_with_meta_device=False"):
        fully_shard_model(plain)


class Block(nn.Module):
    """Notes how many bytes are alive when it is initialized."""

    seen: list[int] = []  # noqa: RUF012, of all blocks

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        Block.seen.append(live_bytes())
        nn.init.ones_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.norm(torch.relu(self.linear(x)))


WIDTH = 64
BLOCKS = 6


def tied() -> nn.Sequential:
    """Embedding and head share a weight; buffers; a bias beside the shared weight."""
    blocks = (Block(WIDTH) for _ in range(BLOCKS))
    model = nn.Sequential(nn.Embedding(11, WIDTH), *blocks, nn.Linear(WIDTH, 11))
    model[-1].weight = model[0].weight
    return model


@on_ranks(2)
def test_a_plain_module_starts_unit_by_unit() -> None:
    states = []
    losses = []
    for meta in (True, False):
        torch.manual_seed(5)
        with on_meta(meta):
            model = tied()
        gc.collect()
        before = live_bytes()
        Block.seen.clear()
        sharded = fully_shard_model(
            model, fsdp_unit_modules=[Block], init_model_with_meta_device=meta
        )
        if meta:
            _check_growth(before, dist.get_world_size())
        states.append(full_all(dict(sharded.named_parameters())))
        assert model[-1].weight is model[0].weight
        generator = torch.Generator().manual_seed(dist.get_rank())
        loss = sharded(torch.randint(0, 11, (8,), generator=generator)).square().mean()
        loss.backward()
        losses.append(loss.item())
    check_same_bits(states[0], states[1], "plain")
    assert losses[0] == losses[1]


def _check_growth(before: int, world: int) -> None:
    """At the start of each block there are the shards of those before it and nothing else but the
    embedding, which waits for the root unit."""
    block = 4 * (WIDTH * WIDTH + 3 * WIDTH + 1)
    own = before + 4 * 11 * WIDTH
    assert len(Block.seen) == BLOCKS
    for number, held in enumerate(Block.seen):
        shards = number * block / world
        assert held <= own + shards * 1.05 + 2 * block, (number, held, own, shards, block)
    assert Block.seen[-1] < own + BLOCKS * block - block, "this bound would pass without sharding"


class _Linear(nn.Linear):
    """Puts a new object in its weight's place when it initializes it, and marks that, as
    Transformer Engine's do."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.weight = nn.Parameter(torch.full_like(self.weight, 2.0))
            self.weight.tensor_model_parallel = True
            self.weight.partition_dim = 0


class _MarkingLinear(_Linear):
    """Core's marks whole weights in its constructor, from 0.19 on: that has the name in it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.marks = "tensor_model_parallel"


@pytest.mark.parametrize("kind", [_MarkingLinear, _Linear])
@pytest.mark.parametrize("whole", [True, False])
def test_weights_that_every_tensor_parallel_rank_has_whole_are_counted_as_core_counts_them(
    kind: type[nn.Linear], whole: bool
) -> None:
    """Each once in the gradient norm, where core's release says that they are whole. The object
    stays."""
    linear = type("TELinear", (kind,), {})(3, 2, bias=False, device="meta")
    weight = linear.weight
    if whole:
        weight.sequence_parallel = True
    initialize("layer", linear, torch.device("cpu"), core_initializers(None)(linear, None))
    assert linear.weight.tensor_model_parallel is not (whole and kind is _MarkingLinear)
    assert linear.weight is weight
    assert bool((weight == 2.0).all())
    assert hasattr(linear.weight, "sequence_parallel") is whole
