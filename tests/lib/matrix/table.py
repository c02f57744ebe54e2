"""The table of the matrix: what is combined with what, and what excludes what.

A cell gives every dimension one value. The first value of a dimension is the plain one: a cell is
named by what differs from that. A rule excludes cells; it is a predicate over the dimensions that
its parameters name, with a reason. `target` (CPU or GPU) is a dimension too, fixed for each
array, so that "needs a GPU" is a rule like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.megatron.options.support import FP8_RECIPES

Value = str | int
Cell = Mapping[str, Value]
"""A value for each dimension; in a partial cell, for some."""

DIMENSIONS: Mapping[str, tuple[Value, ...]] = {
    "target": ("cpu", "gpu"),
    "strategy": tuple(reversed(STRATEGIES)),
    "precision": (
        "fp32",
        "bf16",
        "fp16",
        "fp8_delayed",
        "fp8_tensorwise",
        "fp8_blockwise",
        "fp8w_delayed",
        "fp8w_tensorwise",
        "fp8w_blockwise",
    ),
    "fusion": ("off", "on"),
    "overlap": ("on", "off"),
    "buffers": ("plain", "slots", "nccl_ub", "ce_gather", "ce_gather_reduce"),
    "graph": ("off", "on", "layers"),
    "recompute": ("none", "full", "attention", "mlp"),
    "microbatches": (1, 3),
    "trained": ("all", "tied", "frozen", "adapter"),
    "layers": ("local", "te", "moe", "te_grouped", "mtp", "mla"),
    "tp": (1, 2),
    "sp": ("off", "on"),
    "cp": (1, 2),
    "ep": (1, 2),
    "etp": (1, 2),
    "pp": (1, 2),
    "vpp": (1, 2),
    "outer": ("plain", "hsdp", "hybrid"),
    "start": ("usual", "meta"),
    "wire": ("fp32", "bf16"),
    "kept": ("nothing", "some", "all", "found"),
    "ranks": (2, 1, 3, 4),
    "units": ("layers", "parts"),
    "joined": ("default", "pairs"),
    "ep_overlap": ("off", "on"),
    "offload": ("none", "activations", "streamed"),
    "optimizer": ("adam", "muon"),
}

MEANING: Mapping[str, str] = {
    "target": "gloo on CPUs, or NCCL on GPUs",
    "strategy": "`data_parallel_sharding_strategy`",
    "precision": "of compute. `fp8_*`: FP8 GEMMs of bf16 weights, with the named recipe; "
    "`fp8w_*`: also FP8 weights (`fp8_param`)",
    "fusion": "`gradient_accumulation_fusion`",
    "overlap": "`overlap_grad_reduce` and `overlap_param_gather`",
    "buffers": "none, `fsdp_double_buffer`, `nccl_ub`, `fsdp_copy_engine_all_gather`, both "
    "`fsdp_copy_engine_all_gather` and `fsdp_copy_engine_reduce_scatter`",
    "graph": "none, a step in one CUDA graph, graphs of single layers (on CPUs a stand-in, see "
    "below)",
    "recompute": "none, full (uniform), selective: `core_attn`, `mlp` (`moe` with experts)",
    "microbatches": "per step",
    "trained": "all, embedding and output layer tied, a part frozen, only low-rank adapters",
    "layers": "core's local spec, Transformer Engine's, local with sequential experts, Transformer "
    "Engine with grouped experts, multi-token prediction, latent attention",
    "tp": "`tensor_model_parallel_size`",
    "sp": "`sequence_parallel`",
    "cp": "`context_parallel_size`",
    "ep": "`expert_model_parallel_size`",
    "etp": "`expert_tensor_parallel_size`",
    "pp": "`pipeline_model_parallel_size`",
    "vpp": "model chunks of a stage",
    "outer": "one optimizer instance; two with replicated shards; two that split shards again",
    "start": "parameters created on the device, or on the meta device",
    "wire": "`megatron_fsdp_grad_comm_dtype`",
    "kept": "`fsdp_unsharded_budget_gib`: none; three quarters of the size of all weights; enough "
    "for everything; `auto`, with all of it agreed on before the first step",
    "ranks": "processes",
    "units": "layers, or parts of their experts too "
    "(`megatron_fsdp_enable_fine_grained_param_gather`)",
    "joined": "`suggested_communication_unit_size`: unset, which joins no layers in models this "
    "small; one element more than the largest layer has, so that two layers are joined",
    "ep_overlap": "`overlap_moe_expert_parallel_comm`: core's schedule of parts of layers",
    "offload": "nothing; saved tensors, by a user's hooks; main weights and moments, by "
    "`chunked_optimizer_state_offload`",
    "optimizer": "`optimizer`",
}

_UNSPLIT: Cell = {
    name: 1 if values[0] == 1 else "off"
    for name, values in DIMENSIONS.items()
    if name in ("tp", "sp", "cp", "ep", "etp", "pp", "vpp")
}

ARRAYS: Mapping[str, Cell] = {
    "cpu": {"target": "cpu"},
    "gpu_dp": {"target": "gpu", "ranks": 2, **_UNSPLIT},
    "gpu": {"target": "gpu", "ranks": 2},
}
"""What is fixed in each array. Those of two GPUs: `gpu_dp` shards over both, whatever else is
chosen; `gpu`, which begins with its cells, has the model-parallel axes too, which leave one rank to
shard over."""

WITH_EXPERTS = ("moe", "te_grouped")


def uses_te(target: Value, layers: Value) -> bool:
    """Whether the layers are Transformer Engine's. MTP and latent attention are made of either."""
    return layers in ("te", "te_grouped") or (target == "gpu" and layers in ("mtp", "mla"))


@dataclass(frozen=True)
class Rule:
    """A cell for which `broken` holds cannot be run. Its parameters are the dimensions it reads."""

    name: str
    reason: str
    broken: Callable[..., bool]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.broken).parameters)

    def breaks(self, cell: Cell) -> bool:
        """False for a partial cell that lacks what the rule reads."""
        if not cell.keys() >= self._needs:
            return False
        return self.broken(*[cell[name] for name in self.reads])

    @cached_property
    def _needs(self) -> frozenset[str]:
        return frozenset(self.reads)


def _fp8(precision: Value) -> bool:
    return str(precision).startswith("fp8")


def has_fp8_weights(precision: Value) -> bool:
    return str(precision).startswith("fp8w_")


def recipe_of(precision: Value) -> str:
    """Of FP8; empty for another precision."""
    return str(precision).partition("_")[2]


RULES: tuple[Rule, ...] = (
    # What a machine must have.
    Rule(
        "needs a GPU: buffers",
        "registered memory and copy engines are NCCL's",
        lambda target, buffers: target == "cpu" and buffers not in ("plain", "slots"),
    ),
    Rule(
        "needs a GPU: graph",
        "there are no CUDA graphs on a CPU",
        lambda target, graph: target == "cpu" and graph == "on",
    ),
    Rule(
        "needs Transformer Engine: layers",
        "its layers need a GPU",
        lambda target, layers: target == "cpu" and layers in ("te", "te_grouped"),
    ),
    Rule(
        "needs Transformer Engine: FP8",
        "only Transformer Engine's layers compute in FP8",
        lambda target, precision, layers: _fp8(precision) and not uses_te(target, layers),
    ),
    Rule(
        "needs ranks: model-parallel",
        "TP x CP x PP must divide the number of ranks",
        lambda tp, cp, pp, ranks: ranks % (tp * cp * pp) != 0,
    ),
    Rule(
        "needs ranks: experts",
        "EP x ETP x PP must divide the number of ranks",
        lambda ep, etp, pp, ranks: ranks % (ep * etp * pp) != 0,
    ),
    Rule(
        "needs ranks: outer axis",
        "two optimizer instances require an even number of data-parallel ranks",
        lambda outer, tp, pp, ranks: outer != "plain" and (ranks // (tp * pp)) % 2 != 0,
    ),
    Rule(
        "needs ranks: outer axis of experts",
        "two optimizer instances require an even number of ranks per expert",
        lambda outer, layers, ep, etp, pp, ranks: (
            outer != "plain" and layers in WITH_EXPERTS and (ranks // (ep * etp * pp)) % 2 != 0
        ),
    ),
    # What this package refuses.
    Rule(
        "refused: FP8 recipe",
        "`support.py` does not accept it",
        lambda precision: _fp8(precision) and recipe_of(precision) not in FP8_RECIPES,
    ),
    Rule(
        "refused: copy engines without ZeRO-3",
        "weights that stay unsharded are gathered only once a step",
        lambda buffers, strategy: (
            buffers in ("ce_gather", "ce_gather_reduce") and strategy != "optim_grads_params"
        ),
    ),
    Rule(
        "refused: nothing to keep",
        "weights and gradients are unsharded anyway",
        lambda kept, strategy: kept != "nothing" and strategy in ("optim", "no_shard"),
    ),
    Rule(
        "refused: a budget that is found beside fixed addresses",
        "units in fixed buffers share memory; a graph is captured before a budget is found",
        lambda kept, buffers, graph: kept == "found" and (buffers != "plain" or graph != "off"),
    ),
    Rule(
        "refused: ETP unlike TP without EP",
        "core marks such experts as dense",
        lambda layers, tp, ep, etp: layers in WITH_EXPERTS and ep == 1 and etp != tp,
    ),
    Rule(
        "refused: fused GEMMs of another dtype",
        "Transformer Engine's GEMMs write float32 or the weights' dtype",
        lambda target, layers, fusion, wire, strategy, precision: (
            fusion == "on"
            and wire == "bf16"
            and precision in ("fp32", "fp16")
            and uses_te(target, layers)
            and STRATEGIES[str(strategy)].shard_grads
        ),
    ),
    Rule(
        "refused: offload of the optimizer in a graph",
        "a replay does not run the host code of the offload",
        lambda offload, graph: offload == "streamed" and graph == "on",
    ),
    Rule(
        "refused: graphs of layers without slots",
        "a graph requires fixed addresses",
        lambda graph, buffers: graph == "layers" and buffers in ("plain", "ce_gather"),
    ),
    Rule(
        "refused: graphs of layers that add to gradients",
        "each captured backward overwrites its bucket",
        lambda graph, strategy, kept: (
            graph == "layers" and (kept != "nothing" or not STRATEGIES[str(strategy)].shard_grads)
        ),
    ),
    Rule(
        "refused: graphs of layers that are recomputed",
        "backward runs recomputed layers "
        "eagerly; core recomputes experts only in graphs of its own",
        lambda graph, recompute, layers: (
            graph == "layers"
            and (recompute == "full" or (recompute == "mlp" and layers in WITH_EXPERTS))
        ),
    ),
    Rule(
        "refused: graphs of layers and delayed scaling",
        "scales are updated only for modules that are called, and a replay calls none",
        lambda graph, precision: graph == "layers" and recipe_of(precision) == "delayed",
    ),
    Rule(
        "refused: graphs of layers and CP",
        "attention uses its own streams",
        lambda graph, cp: graph == "layers" and cp > 1,
    ),
    Rule(
        "refused: graphs of layers and parts of layers",
        "core's schedule calls parts, a graph captures whole layers",
        lambda graph, ep_overlap: graph == "layers" and ep_overlap == "on",
    ),
    Rule(
        "refused: parts of layers in slots",
        "two passes would need the same slots for different layers",
        lambda ep_overlap, buffers, strategy: (
            ep_overlap == "on"
            and buffers in ("slots", "nccl_ub")
            and STRATEGIES[str(strategy)].shard_weights
        ),
    ),
    Rule(
        "refused: joined layers in graphs of layers",
        "a graph captures one layer",
        lambda joined, graph: joined == "pairs" and graph == "layers",
    ),
    Rule(
        "refused: joined layers and parts of layers",
        "they would stay unsharded during a pass",
        lambda joined, ep_overlap: joined == "pairs" and ep_overlap == "on",
    ),
    Rule(
        "refused: Muon in fp16",
        "megatron-core does not support it either",
        lambda optimizer, precision: optimizer == "muon" and precision == "fp16",
    ),
    Rule(
        "refused: offload of Muon",
        "only Adam's state is streamed",
        lambda optimizer, offload: optimizer == "muon" and offload == "streamed",
    ),
    # What has no meaning.
    Rule(
        "no hooks in a graph",
        "saved-tensor hooks are Python",
        lambda offload, graph: offload == "activations" and graph != "off",
    ),
    Rule(
        "no hooks around parts",
        "core's schedule does not call the model. Recompute in backward "
        "then passes weights to the hooks",
        lambda offload, ep_overlap, recompute: (
            offload == "activations" and ep_overlap == "on" and recompute != "none"
        ),
    ),
    Rule(
        "no parts",
        "only layers with experts have parts",
        lambda units, layers: units == "parts" and layers not in WITH_EXPERTS,
    ),
    Rule(
        "no layers to join",
        "layers that contain units are not joined",
        lambda joined, units: joined == "pairs" and units == "parts",
    ),
    Rule(
        "no EP",
        "`ep_overlap` overlaps communication of expert-parallel ranks",
        lambda ep_overlap, ep: ep_overlap == "on" and ep == 1,
    ),
    Rule(
        "no experts",
        "EP and ETP are axes of experts",
        lambda layers, ep, etp: layers not in WITH_EXPERTS and (ep > 1 or etp > 1),
    ),
    Rule(
        "no TP",
        "SP splits activations over the ranks of TP",
        lambda sp, tp: sp == "on" and tp == 1,
    ),
    Rule("no PP", "only pipelines have several model chunks", lambda vpp, pp: vpp > 1 and pp == 1),
    # What core cannot do with any wrapper.
    Rule(
        "core: parts of layers in float32",
        "core's configuration requires a 16-bit dtype",
        lambda ep_overlap, precision: ep_overlap == "on" and precision == "fp32",
    ),
    Rule(
        "core: parts of layers and recompute",
        "core's configuration excludes full recompute, and in 0.19 also recompute of experts",
        lambda ep_overlap, recompute: ep_overlap == "on" and recompute in ("full", "mlp"),
    ),
    Rule(
        "core: parts of layers in a pipeline without chunks",
        "core's schedule of parts is an interleaved one",
        lambda ep_overlap, pp, vpp: ep_overlap == "on" and pp > 1 and vpp == 1,
    ),
    Rule(
        "core: parts of adapted layers",
        "core's schedule calls `backward_dw` of an MLP, which adapted layers lack",
        lambda ep_overlap, trained: ep_overlap == "on" and trained == "adapter",
    ),
    Rule(
        "core: parts of layers need alltoall",
        "with ETP, gloo has no alltoall of unequal sizes: such cells use the allgather dispatcher",
        lambda ep_overlap, etp: ep_overlap == "on" and etp > 1,
    ),
    Rule(
        "core: experts with TP need SP",
        "MoELayer raises in training without it",
        lambda layers, tp, sp: layers in WITH_EXPERTS and tp > 1 and sp == "off",
    ),
    Rule(
        "core: interleaving needs microbatches",
        "at least as many as stages",
        lambda vpp, pp, microbatches: vpp > 1 and microbatches < pp,
    ),
    Rule(
        "core: no CP in local attention on GPUs",
        "only Transformer Engine's attention supports CP; CPU cells use the tests' own attention",
        lambda target, layers, cp: target == "gpu" and cp > 1 and not uses_te(target, layers),
    ),
    Rule(
        "core: no CP in float32 on GPUs",
        "no attention kernel of Transformer Engine supports it",
        lambda target, cp, precision: target == "gpu" and cp > 1 and precision == "fp32",
    ),
    Rule(
        "core: fused, tied, MTP and PP",
        "stock DDP drops the embedding's part of the fused "
        "gradient of the tied weight on the last stage",
        lambda fusion, trained, layers, pp: (
            fusion == "on" and trained == "tied" and layers == "mtp" and pp > 1
        ),
    ),
    Rule(
        "core: graph, recompute and TP",
        "recompute seeds the generator of tensor-parallel ranks differently from the capture",
        lambda graph, recompute, tp: graph == "on" and recompute == "full" and tp > 1,
    ),
    Rule(
        "core: graph and experts",
        "the host reads the number of tokens of each expert",
        lambda graph, layers: graph == "on" and layers in WITH_EXPERTS,
    ),
    Rule(
        "core: graph and PP",
        "the host synchronizes after sends between stages",
        lambda graph, pp: graph == "on" and pp > 1,
    ),
    Rule(
        "core: graph and CP",
        "the split of a batch uses numbers copied from the host",
        lambda graph, cp: graph == "on" and cp > 1,
    ),
    Rule(
        "core: graph and fp16",
        "the loss scaler replaces the tensor that the graph reads",
        lambda graph, precision: graph == "on" and precision == "fp16",
    ),
)


REFERENCE: Mapping[str, Value | None] = {
    "strategy": None,
    "overlap": "off",
    "buffers": "plain",
    "graph": "off",
    "outer": "plain",
    "start": "usual",
    "wire": "fp32",
    "units": "layers",
    "offload": "none",
    "kept": "nothing",
}
"""How a cell becomes its reference, stock DDP: these dimensions are set, the others stay. Strategy
None is DDP; it has no such buffers, outer axis, meta start, dtype on the wire or budget, and
overlap and graph do not change what is computed. Without the distributed optimizer, so that each
rank has whole gradients and main weights and nothing has to be put together; but for FP8 weights,
which are stock DDP's `fp8_param_gather`: it is the distributed optimizer that makes their bytes."""


PLAIN: Cell = {dimension: values[0] for dimension, values in DIMENSIONS.items()}


def name_of(cell: Cell) -> str:
    """What differs from the plain values, as "strategy=optim tp=2"."""
    words = [
        f"{dimension}={cell[dimension]}"
        for dimension in DIMENSIONS
        if dimension != "target" and cell[dimension] != PLAIN[dimension]
    ]
    return " ".join([str(cell["target"]), *words])


def cell_named(name: str) -> dict[str, Value]:
    """The reverse of `name_of`. KeyError for an unknown dimension or value."""
    target, *words = name.split()
    cell = {**PLAIN, "target": target}
    for word in words:
        dimension, _, text = word.partition("=")
        cell[dimension] = {str(value): value for value in DIMENSIONS[dimension]}[text]
    return cell


def broken_rules(cell: Cell) -> list[Rule]:
    return [rule for rule in RULES if rule.breaks(cell)]
