"""Models under tensor, sequence, context, expert and pipeline parallelism, with stock DDP and ours.

Every rank compares what it holds: the parameters of its pipeline stage, in the shape that tensor
parallelism leaves of them, whole over the data-parallel ranks. The reference is stock DDP without
a distributed optimizer, so that each rank has all of a gradient and nothing has to be put together.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.tools.models.local_spec import TorchNorm
from megatron_fsdp_adapter.tools.prove.build import coordinates, wire_schedule
from tests.lib.gpt.gather_full import full_values, plain_name
from tests.lib.ranks.groups import use_groups

from .checks import Step, finished
from .gpt import (
    Case,
    Trainer,
    batches,
    ddp_config,
    device_of_rank,
    optimizer_config,
    run_passes,
    set_rates,
)


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel axes, and what depends on them. `etp` None is `tp`.

    `aligned`: the schedule starts reductions and gathers itself (`grad_sync_func`,
    `param_sync_func`).
    """

    name: str
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    experts: int | None = None
    dispatcher: str = "alltoall"
    aligned: bool = False

    @property
    def num_chunks(self) -> int:
        return self.vpp or 1


TOPOLOGIES: Mapping[str, Topology] = {
    row.name: row
    for row in (
        Topology("tp2", tp=2),
        Topology("tp2-sp", tp=2, sp=True),
        Topology("cp2", cp=2),
        Topology("ep2", ep=2, experts=4),
        Topology("ep4", ep=4, experts=4, dispatcher="allgather"),
        # alltoall gathers pieces of unequal sizes over the expert-tensor group: gloo cannot.
        Topology("ep2-etp2", tp=2, ep=2, etp=2, sp=True, experts=4, dispatcher="allgather"),
        Topology("pp2", pp=2),
        Topology("pp2-vpp2", pp=2, vpp=2, aligned=True),
        Topology("tp2-pp2", tp=2, pp=2, aligned=True),
        Topology("ep2-pp2", ep=2, pp=2, experts=4),
    )
}

CASE = Case(num_layers=2, hidden=24, heads=4, ffn=44, vocab=54, seq=8, batch=2)
"""Of each size tensor parallelism leaves something that the data-parallel ranks split unevenly."""


def case_for(topology: Topology, **changes: Any) -> Case:
    """`CASE` with a layer for each model chunk and, with pipelines, tied embeddings."""
    options = {
        "num_layers": max(2, topology.pp * topology.num_chunks),
        "tied": topology.pp > 1,
        "bias": topology.experts is None,
        **changes,
    }
    return CASE.but(**options)


def init_topology(topology: Topology, instances: int = 1) -> torch.device:
    """Uses the topology's groups, for so many optimizer instances, in place of those that were
    there; collective. Returns the device."""
    use_groups(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp,
        context_parallel_size=topology.cp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=topology.etp,
        num_distributed_optimizer_instances=instances,
        create_gloo_process_groups=False,
    )
    return device_of_rank()


# The model.


class GatheringAttention(torch.nn.Module):
    """Causal attention of a rank's queries over every context-parallel rank's keys and values."""

    def __init__(self, config: TransformerConfig, *unused: Any, **unused_too: Any) -> None:
        super().__init__()
        self.group = ps.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *unused: Any,
        **unused_too: Any,
    ) -> torch.Tensor:
        """(seq / cp, batch, heads, d) three times -> (seq / cp, batch, heads * d)."""
        length = query.size(0)
        size = self.group.size()
        places = [_zigzag_positions(length * size, size, rank) for rank in range(size)]
        key, value = (
            gather_from_sequence_parallel_region(x, group=self.group) for x in (key, value)
        )
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * query.size(-1) ** -0.5
        hidden = torch.cat(places)[None, :] > places[self.group.rank()][:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def _zigzag_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Where in the sequence the tokens of a context-parallel rank are: one chunk from the front
    and its mirror from the back."""
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def model_config(
    topology: Topology,
    case: Case,
    cls: type[TransformerConfig] = TransformerConfig,
    **changes: Any,
) -> TransformerConfig:
    """`changes` are fields of the config, in place of those here or beside them."""
    options: dict[str, Any] = {
        "num_layers": case.num_layers,
        "hidden_size": case.hidden,
        "num_attention_heads": case.heads,
        "ffn_hidden_size": case.ffn,
        "gated_linear_unit": case.swiglu,
        "add_bias_linear": case.bias,
        "activation_func": torch.nn.functional.silu if case.swiglu else torch.nn.functional.gelu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": case.dtype,
        "pipeline_dtype": case.dtype,
        "tensor_model_parallel_size": topology.tp,
        "sequence_parallel": topology.sp,
        "context_parallel_size": topology.cp,
        "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp,
        "microbatch_group_size_per_vp_stage": case.microbatches if topology.vpp else None,
        # With two stages both neighbors of a rank are the same one: batched sends would be
        # received in the wrong order, activations as gradients. Megatron-LM refuses that.
        "overlap_p2p_comm": topology.vpp is not None,
        "batch_p2p_comm": topology.vpp is None,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.etp,
        # gloo reads an output after the send was launched; the overlapped schedule frees it then.
        "deallocate_pipeline_outputs": topology.vpp is None,
        "calculate_per_token_loss": case.per_token_loss,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "use_cpu_initialization": True,
    }
    if topology.experts:
        options |= {
            "num_moe_experts": topology.experts,
            "moe_ffn_hidden_size": case.ffn,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": topology.dispatcher,
        }
    return cls(**(options | changes))


def _layer_spec(topology: Topology, with_experts: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=topology.experts if with_experts else None, moe_grouped_gemm=False
    )
    spec.submodules.input_layernorm = TorchNorm
    spec.submodules.pre_mlp_layernorm = TorchNorm
    if topology.cp > 1:
        spec.submodules.self_attention.submodules.core_attention = GatheringAttention
    return spec


def build_chunk(
    topology: Topology, case: Case, config: TransformerConfig, chunk: int
) -> torch.nn.Module:
    """A model chunk of core's own layers, its weights as `vary` leaves them."""
    torch.manual_seed(case.seed)
    model_parallel_cuda_manual_seed(case.seed)
    layer = functools.partial(_layer_spec, topology)
    model = gpt_chunk(case, config, chunk if topology.vpp else None, layer, TorchNorm)
    vary(model, case.seed, chunk)
    return model


def gpt_chunk(
    case: Case,
    config: TransformerConfig,
    vp_stage: int | None,
    layer_of: Callable[[bool], ModuleSpec],
    norm: Any,
    **more: Any,
) -> GPTModel:
    """A model chunk as core makes it; `layer_of` a layer with or without experts. Where the model
    has experts every second layer has them, counted over all stages: with pipelines there is a
    stage without any."""
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    specs = [layer_of(bool(config.num_moe_experts) and i % 2 == 1) for i in layers]
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm),
        vocab_size=case.vocab,
        max_sequence_length=case.seq,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.positions,
        vp_stage=vp_stage,
        **more,
    )


def vary(model: torch.nn.Module, seed: int, chunk: int) -> None:
    """Makes weights the same on all ranks that hold the same parameters and different on all
    others. Biases start at zero otherwise, and experts alike: both hide mistakes."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            place = repr((seed, *coordinates(param, name, chunk))).encode()
            generator = torch.Generator(param.device).manual_seed(zlib.crc32(place))
            noise = torch.randn(param.shape, generator=generator, device=param.device)
            kept = getattr(param, "_high_precision_init_val", None)
            if kept is None:
                param.add_(noise.to(param.dtype), alpha=0.02)
            else:  # a quantized weight, which is made of that value
                kept.add_(noise.to(kept), alpha=0.02)
                param.quantize_(kept.to(param.device))


# Training.


@dataclass
class TopologyTrainer:
    """Model chunks with one optimizer. `strategy` None is stock DDP."""

    topology: Topology
    case: Case
    chunks: list[Any]
    optimizer: Any
    strategy: str | None

    def params(self) -> dict[str, torch.Tensor]:
        """What this rank has of each weight, whole over data-parallel ranks; collective."""
        if self.strategy is None:
            return {n: p.detach().clone() for n, p in self.named_parameters()}
        return full_values(self._pairs(), lambda pair: local_of(pair.sharded))

    def gradients(self) -> dict[str, torch.Tensor]:
        """The same of reduced gradients, between the backwards and the optimizer's step."""
        if self.strategy is None:
            found = {}
            for name, param in self.named_parameters():
                if param.requires_grad:
                    found[name] = param.main_grad.detach().clone()
            return found
        return full_values(
            [(name, pair) for name, pair in self._pairs() if pair.sharded.requires_grad],
            lambda pair: local_of(pair.sharded.grad),
        )

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        for number, chunk in enumerate(self.chunks):
            for name, param in chunk.named_parameters():
                yield f"{number}.{plain_name(name)}", param

    def _pairs(self) -> list[tuple[str, Any]]:
        found = []
        for number, chunk in enumerate(self.chunks):
            for pair in chunk.engine.pairs:
                found.append((f"{number}.{plain_name(pair.managed.fqns[0])}", pair))
        return found

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sets the main weights of ours; no collective."""
        for chunk in self.chunks:
            chunk.stop_communication()
        for name, pair in self._pairs():
            local = pair.sharded._local_tensor
            held = pair.sharded.megatron_fsdp_slice
            with torch.no_grad():
                local.copy_(weights[name].reshape(-1)[held].view(local.shape))
        for chunk in self.chunks:
            chunk.engine.main_weights_changed(loaded=True)


def global_name(trainer: TopologyTrainer, name: str) -> str:
    """The name in the unsplit model of a parameter; `name` begins with the number of its chunk."""
    topology = trainer.topology
    (number, _, local) = name.partition(".")
    words = local.split(".")
    if local.startswith("decoder.layers."):
        vp_stage = int(number) if topology.vpp else None
        offset = get_transformer_layer_offset(trainer.chunks[0].config, vp_stage)
        words[2] = str(int(words[2]) + offset)
    if "local_experts" in words:
        at = words.index("local_experts") + 1
        before = topology.experts // topology.ep * ps.get_expert_model_parallel_rank()
        words[at] = str(int(words[at]) + before)
    if trainer.case.tied and local == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return ".".join(words)


def local_of(value: Any) -> torch.Tensor:
    """A copy of this rank's part of a DTensor."""
    return value._local_tensor.detach().clone()


def build_topology_trainer(
    topology: Topology,
    case: Case,
    strategy: str | None,
    change: Callable[[torch.nn.Module], None] = lambda model: None,
    ddp: Mapping[str, Any] = MappingProxyType({}),
    fields: Mapping[str, Any] = MappingProxyType({}),
    optimizer_options: Mapping[str, Any] = MappingProxyType({}),
    **wrapper_options: Any,
) -> TopologyTrainer:
    """`change` edits each bare model chunk before it is wrapped. `ddp` sets fields of our DDP
    config, `fields` those of the model's, `optimizer_options` those of the optimizer's;
    `wrapper_options` are arguments of the wrapper."""
    config = model_config(topology, case, **fields)
    models = [build_chunk(topology, case, config, i) for i in range(topology.num_chunks)]
    for model in models:
        change(model)
    wrapper = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    if strategy is not None:
        wrapper = ddp_config(case, strategy, ddp)
    return wrapped(topology, case, models, strategy, wrapper, optimizer_options, **wrapper_options)


def wrapped(
    topology: Topology,
    case: Case,
    models: Sequence[Any],
    strategy: str | None,
    ddp: DistributedDataParallelConfig,
    optimizer_options: Mapping[str, Any],
    **wrapper_options: Any,
) -> TopologyTrainer:
    """Wraps model chunks, by stock DDP without a strategy, and gives them an optimizer."""
    wrap: Any = DistributedDataParallel if strategy is None else FullyShardedDataParallel
    config = models[0].config
    chunks: list[Any] = []
    for number, model in enumerate(models):
        chunks.append(wrap(config, ddp, model, disable_bucketing=number > 0, **wrapper_options))
    options = {"use_distributed_optimizer": strategy is not None, **optimizer_options}
    optimizer = get_megatron_optimizer(
        optimizer_config(case, **options), chunks, use_gloo_process_groups=False
    )
    set_rates(optimizer, case)
    wire_schedule(config, chunks, optimizer, topology.aligned)
    return TopologyTrainer(topology, case, chunks, optimizer, strategy)


def run_schedule(
    trainer: TopologyTrainer | Trainer, step: int, forward_only: bool = False, schedule: Any = None
) -> float:
    """`run_passes` on the data of a step."""
    device = next(trainer.chunks[0].parameters()).device
    data = batches(trainer.case, step, ps.get_data_parallel_rank(), device)
    return run_passes(trainer, data, forward_only, schedule)


def topology_step(trainer: TopologyTrainer, step: int, schedule: Any = None) -> Step:
    """A training step, by core's schedule or another; collective."""
    return finished(trainer, run_schedule(trainer, step, schedule=schedule))


def feed_two_experts(model: nn.Module) -> None:
    """All tokens become alike to the router: two of the experts get all of them, the others none,
    and with one expert a rank some ranks get no token at all."""
    for name, param in model.named_parameters():
        if name.endswith("pre_mlp_layernorm.weight"):
            param.data.zero_()
