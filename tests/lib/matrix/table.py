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

from megatron_fsdp_adapter.core.config import STRATEGIES, Strategy
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
    "expert_strategy": ("same", "optim", "optim_grads_params"),
    "expert_outer": ("same", "plain", "hybrid"),
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
    "expert_strategy": "`expert_data_parallel_sharding_strategy`: that of dense parameters, or "
    "another",
    "expert_outer": "replicas of experts: those of dense parameters; one "
    "(`expert_num_distributed_optimizer_instances=1`); two that split shards again "
    "(`expert_outer_dp_sharding_strategy=optim`)",
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

_EXPERTS_ALIKE: Cell = {"expert_strategy": "same", "expert_outer": "same"}

ARRAYS: Mapping[str, Cell] = {
    "cpu": {"target": "cpu"},
    "gpu_dp": {"target": "gpu", "ranks": 2, **_UNSPLIT, **_EXPERTS_ALIKE},
    "gpu": {"target": "gpu", "ranks": 2, **_EXPERTS_ALIKE},
}
"""What is fixed in each array. Options of experts alone are in cells of CPUs. Of those of two GPUs,
`gpu_dp` shards over both, whatever else is chosen. `gpu`, which begins with its cells, has the
model-parallel axes too, which leave one rank to shard over."""

TRIPLES: Mapping[str, Mapping[str, tuple[Value, ...]]] = {
    "gpu_dp": {
        "graph": DIMENSIONS["graph"],
        "microbatches": DIMENSIONS["microbatches"],
        "kept": DIMENSIONS["kept"],
        "precision": ("bf16", "fp8_tensorwise", "fp8w_tensorwise", "fp8w_blockwise"),
    }
}
"""Of an array, the dimensions and values of which every possible triple is in a cell: a captured
layer writes to fixed addresses, where units that stay unsharded add up microbatches."""

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


def rows_of(strategy: Value, expert_strategy: Value) -> list[Strategy]:
    """Of dense parameters, and of experts if they have another one."""
    names = [str(strategy), *([str(expert_strategy)] if expert_strategy != "same" else [])]
    return [STRATEGIES[name] for name in names]


RULES: list[Rule] = []


def rule(name: str, reason: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Makes a row of `RULES` of the function below it."""

    def add(broken: Callable[..., bool]) -> Callable[..., bool]:
        RULES.append(Rule(name, reason, broken))
        return broken

    return add


# What a machine must have.


@rule("needs a GPU: buffers", "registered memory and copy engines are NCCL's")
def _needs_a_gpu_buffers(target, buffers) -> bool:
    return target == "cpu" and buffers not in ("plain", "slots")


@rule("needs a GPU: graph", "there are no CUDA graphs on a CPU")
def _needs_a_gpu_graph(target, graph) -> bool:
    return target == "cpu" and graph == "on"


@rule("needs Transformer Engine: layers", "its layers need a GPU")
def _needs_transformer_engine_layers(target, layers) -> bool:
    return target == "cpu" and layers in ("te", "te_grouped")


@rule("needs Transformer Engine: FP8", "only Transformer Engine's layers compute in FP8")
def _needs_transformer_engine_fp8(target, precision, layers) -> bool:
    return _fp8(precision) and not uses_te(target, layers)


@rule("needs ranks: model-parallel", "TP x CP x PP must divide the number of ranks")
def _needs_ranks_model_parallel(tp, cp, pp, ranks) -> bool:
    return ranks % (tp * cp * pp) != 0


@rule("needs ranks: experts", "EP x ETP x PP must divide the number of ranks")
def _needs_ranks_experts(ep, etp, pp, ranks) -> bool:
    return ranks % (ep * etp * pp) != 0


@rule(
    "needs ranks: outer axis",
    "two optimizer instances require an even number of data-parallel ranks",
)
def _needs_ranks_outer_axis(outer, tp, pp, ranks) -> bool:
    return outer != "plain" and (ranks // (tp * pp)) % 2 != 0


@rule(
    "needs ranks: outer axis of experts",
    "two optimizer instances require an even number of ranks per expert",
)
def _needs_ranks_outer_axis_of_experts(outer, layers, ep, etp, pp, ranks) -> bool:
    if outer == "plain":
        return False
    if layers not in WITH_EXPERTS:
        return False
    return (ranks // (ep * etp * pp)) % 2 != 0


@rule("needs ranks: replicas of experts", "two replicas require an even number of ranks per expert")
def _needs_ranks_replicas_of_experts(expert_outer, ep, etp, pp, ranks) -> bool:
    return expert_outer == "hybrid" and (ranks // (ep * etp * pp)) % 2 != 0


# What this package refuses.


@rule("refused: FP8 recipe", "`support.py` does not accept it")
def _refused_fp8_recipe(precision) -> bool:
    return _fp8(precision) and recipe_of(precision) not in FP8_RECIPES


@rule(
    "refused: copy engines without ZeRO-3",
    "weights that stay unsharded are gathered only once a step",
)
def _refused_copy_engines_without_zero_3(buffers, strategy, expert_strategy) -> bool:
    rows = rows_of(strategy, expert_strategy)
    return buffers in ("ce_gather", "ce_gather_reduce") and not any(r.shard_weights for r in rows)


@rule("refused: nothing to keep", "weights and gradients are unsharded anyway")
def _refused_nothing_to_keep(kept, strategy, expert_strategy) -> bool:
    rows = rows_of(strategy, expert_strategy)
    return kept != "nothing" and not any(row.shard_grads for row in rows)


@rule(
    "refused: a budget that is found beside fixed addresses",
    "units in fixed buffers share memory; an iteration is captured before a budget is found",
)
def _refused_a_budget_that_is_found_beside_fixed_addresses(kept, buffers, graph) -> bool:
    return kept == "found" and (buffers != "plain" or graph == "on")


@rule("refused: ETP unlike TP without EP", "core marks such experts as dense")
def _refused_etp_unlike_tp_without_ep(layers, tp, ep, etp) -> bool:
    if layers not in WITH_EXPERTS:
        return False
    if ep != 1:
        return False
    return etp != tp


@rule(
    "refused: fused GEMMs of another dtype",
    "Transformer Engine's GEMMs write float32 or the weights' dtype",
)
def _refused_fused_gemms_of_another_dtype(
    target, layers, fusion, wire, strategy, expert_strategy, precision
) -> bool:
    if fusion != "on":
        return False
    if wire != "bf16":
        return False
    if precision not in ("fp32", "fp16"):
        return False
    if not (uses_te(target, layers)):
        return False
    return any(row.shard_grads for row in rows_of(strategy, expert_strategy))


@rule(
    "refused: offload of the optimizer in a graph",
    "a replay does not run the host code of the offload",
)
def _refused_offload_of_the_optimizer_in_a_graph(offload, graph) -> bool:
    return offload == "streamed" and graph == "on"


@rule("refused: graphs of layers without slots", "a graph requires fixed addresses")
def _refused_graphs_of_layers_without_slots(
    graph, buffers, strategy, expert_strategy, kept
) -> bool:
    rows = rows_of(strategy, expert_strategy)
    if graph != "layers" or not any(row.shard_grads for row in rows) or kept == "found":
        return False
    return buffers in ("plain", "ce_gather")


@rule(
    "refused: graphs of layers that are recomputed",
    "backward runs recomputed layers eagerly; core recomputes experts only in graphs of its own",
)
def _refused_graphs_of_layers_that_are_recomputed(graph, recompute, layers) -> bool:
    return graph == "layers" and (
        recompute == "full" or (recompute == "mlp" and layers in WITH_EXPERTS)
    )


@rule(
    "refused: graphs of layers and delayed scaling",
    "scales are updated only for modules that are called, and a replay calls none",
)
def _refused_graphs_of_layers_and_delayed_scaling(graph, precision) -> bool:
    return graph == "layers" and recipe_of(precision) == "delayed"


@rule("refused: graphs of layers and CP", "attention uses its own streams")
def _refused_graphs_of_layers_and_cp(graph, cp) -> bool:
    return graph == "layers" and cp > 1


@rule(
    "refused: graphs of layers and parts of layers",
    "core's schedule calls parts, a graph captures whole layers",
)
def _refused_graphs_of_layers_and_parts_of_layers(graph, ep_overlap) -> bool:
    return graph == "layers" and ep_overlap == "on"


@rule(
    "refused: parts of layers in slots", "two passes would need the same slots for different layers"
)
def _refused_parts_of_layers_in_slots(ep_overlap, buffers, strategy, expert_strategy) -> bool:
    if ep_overlap != "on":
        return False
    if buffers not in ("slots", "nccl_ub"):
        return False
    return any(row.shard_weights for row in rows_of(strategy, expert_strategy))


@rule("refused: joined layers and parts of layers", "they would stay unsharded during a pass")
def _refused_joined_layers_and_parts_of_layers(joined, ep_overlap) -> bool:
    return joined == "pairs" and ep_overlap == "on"


@rule("refused: Muon in fp16", "megatron-core does not support it either")
def _refused_muon_in_fp16(optimizer, precision) -> bool:
    return optimizer == "muon" and precision == "fp16"


@rule("refused: offload of Muon", "only Adam's state is streamed")
def _refused_offload_of_muon(optimizer, offload) -> bool:
    return optimizer == "muon" and offload == "streamed"


# What has no meaning.


@rule("no hooks in a graph", "saved-tensor hooks are Python")
def _no_hooks_in_a_graph(offload, graph) -> bool:
    return offload == "activations" and graph != "off"


@rule(
    "no hooks around parts",
    "core's schedule does not call the model. Recompute in backward "
    "then passes weights to the hooks",
)
def _no_hooks_around_parts(offload, ep_overlap, recompute) -> bool:
    if offload != "activations":
        return False
    if ep_overlap != "on":
        return False
    return recompute != "none"


@rule("no parts", "only layers with experts have parts")
def _no_parts(units, layers) -> bool:
    return units == "parts" and layers not in WITH_EXPERTS


@rule("no layers to join", "layers that contain units are not joined")
def _no_layers_to_join(joined, units) -> bool:
    return joined == "pairs" and units == "parts"


@rule("no EP", "`ep_overlap` overlaps communication of expert-parallel ranks")
def _no_ep(ep_overlap, ep) -> bool:
    return ep_overlap == "on" and ep == 1


@rule("no experts", "EP and ETP are axes of experts")
def _no_experts(layers, ep, etp) -> bool:
    return layers not in WITH_EXPERTS and (ep > 1 or etp > 1)


@rule("no experts: options of experts", "they set what experts have apart")
def _no_experts_options_of_experts(layers, expert_strategy, expert_outer) -> bool:
    return layers not in WITH_EXPERTS and (expert_strategy, expert_outer) != ("same", "same")


@rule("experts are alike", "it sets what dense parameters have")
def _experts_are_alike(strategy, expert_strategy, outer, expert_outer) -> bool:
    return strategy == expert_strategy or outer == expert_outer


@rule("no TP", "SP splits activations over the ranks of TP")
def _no_tp(sp, tp) -> bool:
    return sp == "on" and tp == 1


@rule("no PP", "only pipelines have several model chunks")
def _no_pp(vpp, pp) -> bool:
    return vpp > 1 and pp == 1


# What core cannot do with any wrapper.


@rule("core: parts of layers in float32", "core's configuration requires a 16-bit dtype")
def _core_parts_of_layers_in_float32(ep_overlap, precision) -> bool:
    return ep_overlap == "on" and precision == "fp32"


@rule(
    "core: parts of layers and recompute",
    "core's configuration excludes full recompute, and in 0.19 also recompute of experts",
)
def _core_parts_of_layers_and_recompute(ep_overlap, recompute) -> bool:
    return ep_overlap == "on" and recompute in ("full", "mlp")


@rule(
    "core: parts of layers in a pipeline without chunks",
    "core's schedule of parts is an interleaved one",
)
def _core_parts_of_layers_in_a_pipeline_without_chunks(ep_overlap, pp, vpp) -> bool:
    if ep_overlap != "on":
        return False
    if pp <= 1:
        return False
    return vpp == 1


@rule(
    "core: parts of adapted layers",
    "core's schedule calls `backward_dw` of an MLP, which adapted layers lack",
)
def _core_parts_of_adapted_layers(ep_overlap, trained) -> bool:
    return ep_overlap == "on" and trained == "adapter"


@rule(
    "core: parts of layers need alltoall",
    "with ETP, gloo has no alltoall of unequal sizes: such cells use the allgather dispatcher",
)
def _core_parts_of_layers_need_alltoall(ep_overlap, etp) -> bool:
    return ep_overlap == "on" and etp > 1


@rule("core: experts with TP need SP", "MoELayer raises in training without it")
def _core_experts_with_tp_need_sp(layers, tp, sp) -> bool:
    if layers not in WITH_EXPERTS:
        return False
    if tp <= 1:
        return False
    return sp == "off"


@rule("core: interleaving needs microbatches", "at least as many as stages")
def _core_interleaving_needs_microbatches(vpp, pp, microbatches) -> bool:
    return vpp > 1 and microbatches < pp


@rule(
    "core: no CP in local attention on GPUs",
    "only Transformer Engine's attention supports CP; CPU cells use the tests' own attention",
)
def _core_no_cp_in_local_attention_on_gpus(target, layers, cp) -> bool:
    if target != "gpu":
        return False
    if cp <= 1:
        return False
    return not uses_te(target, layers)


@rule("core: no CP in float32 on GPUs", "no attention kernel of Transformer Engine supports it")
def _core_no_cp_in_float32_on_gpus(target, cp, precision) -> bool:
    if target != "gpu":
        return False
    if cp <= 1:
        return False
    return precision == "fp32"


@rule(
    "core: fused, tied, MTP and PP",
    "stock DDP drops the embedding's part of the fused "
    "gradient of the tied weight on the last stage",
)
def _core_fused_tied_mtp_and_pp(fusion, trained, layers, pp) -> bool:
    if fusion != "on":
        return False
    if trained != "tied":
        return False
    if layers != "mtp":
        return False
    return pp > 1


@rule(
    "core: graph, recompute and TP",
    "recompute seeds the generator of tensor-parallel ranks differently from the capture",
)
def _core_graph_recompute_and_tp(graph, recompute, tp) -> bool:
    if graph != "on":
        return False
    if recompute != "full":
        return False
    return tp > 1


@rule("core: graph and experts", "the host reads the number of tokens of each expert")
def _core_graph_and_experts(graph, layers) -> bool:
    return graph == "on" and layers in WITH_EXPERTS


@rule("core: graph and PP", "the host synchronizes after sends between stages")
def _core_graph_and_pp(graph, pp) -> bool:
    return graph == "on" and pp > 1


@rule("core: graph and CP", "the split of a batch uses numbers copied from the host")
def _core_graph_and_cp(graph, cp) -> bool:
    return graph == "on" and cp > 1


@rule("core: graph and fp16", "the loss scaler replaces the tensor that the graph reads")
def _core_graph_and_fp16(graph, precision) -> bool:
    return graph == "on" and precision == "fp16"


REFERENCE: Mapping[str, Value | None] = {
    "strategy": None,
    "overlap": "off",
    "buffers": "plain",
    "graph": "off",
    "outer": "plain",
    "expert_strategy": "same",
    "expert_outer": "same",
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
