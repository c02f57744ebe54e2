"""What a user turns on beside how a run is split and sharded: a plan takes it as it is told, since
it changes numbers or asks for other resources, and does not search for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron_fsdp_adapter.cli.precision_options import MOMENTS
from megatron_fsdp_adapter.cli.quantised_options import PLAIN, Quantisation, quantisation
from megatron_fsdp_adapter.core.config import STRATEGIES, Strategy
from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8, PER_TENSOR
from megatron_fsdp_adapter.diagnostics.memory import Precision
from megatron_fsdp_adapter.megatron.options.ddp_options import OFFLOAD
from megatron_fsdp_adapter.megatron.options.joining import UNIT_NUMEL
from megatron_fsdp_adapter.megatron.options.support import CORES_OFFLOAD
from megatron_fsdp_adapter.sharding.budget import GIB

ADAM, MUON = "adam", "muon"


@dataclass(frozen=True)
class Features:
    """quantised: matrix products and weights of layers in FP8. optimizer: "adam" or "muon".
    streamed: main weights and state in host memory. host_layers: layers whose activations are
    there, the first ones of a stage. budget_gib: for units that stay whole over a step. bf16_wire:
    gradients travel in bf16, summed in fp32. layer_graphs: each layer in CUDA graphs of its own.
    unit_numel: neighboring layers are joined to units of so many elements, 0: each is one, None:
    as the wrapper joins them by default. expert_overlap: exchanges between experts run beside
    another microbatch's layers."""

    quantised: Quantisation = PLAIN
    optimizer: str = ADAM
    streamed: bool = False
    host_layers: int = 0
    budget_gib: float = 0.0
    bf16_wire: bool = False
    layer_graphs: bool = False
    unit_numel: int | None = None
    expert_overlap: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in (ADAM, MUON):
            raise ValueError(f"--optimizer {self.optimizer!r}: use {ADAM!r} or {MUON!r}")
        if self.unit_numel is not None and self.unit_numel < 0:
            raise ValueError(f"--suggested-communication-unit-size {self.unit_numel}: 0 or more")
        if self.unit_numel and (self.layer_graphs or self.expert_overlap):
            raise ValueError(
                "--suggested-communication-unit-size with graphs of layers or "
                "--overlap-moe-expert-parallel-comm: those need each layer for itself; leave it out"
            )
        if self.host_layers < 0 or self.budget_gib < 0:
            raise ValueError(
                f"--cpu-offloading-num-layers {self.host_layers}, --fsdp-unsharded-budget-gib "
                f"{self.budget_gib}: use 0 or more"
            )
        if self.streamed and self.optimizer == MUON:
            raise ValueError(
                "--chunked-optimizer-state-offload with --optimizer muon: it is for adam; leave "
                "one out"
            )

    @property
    def precision(self) -> Precision:
        """For the formula of memory."""
        return Precision(
            comm=torch.bfloat16 if self.bf16_wire else torch.float32, offload=self.streamed,
            moments=MOMENTS.get(self.optimizer),
        )  # fmt: skip

    @property
    def budget(self) -> int:
        """Bytes."""
        return int(self.budget_gib * GIB)

    @property
    def every_layer_counts(self) -> bool:
        """Whether layers differ, so that no few of them tell what all take. Those whose updates run
        under a forward do: the first ones hide other parts of them than the last ones."""
        return bool(self.host_layers or self.budget_gib or self.streamed or self.unit_numel)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """For a table."""
        found = {
            self.quantised.name: bool(self.quantised.name), "muon": self.optimizer == MUON,
            "streamed optimizer": self.streamed,
            f"activations of {self.host_layers} layers on the host": self.host_layers > 0,
            f"budget {self.budget_gib:g} GiB": self.budget_gib > 0,
            "bf16 wire": self.bf16_wire,
            "layer graphs": self.layer_graphs,
            f"units of {self.unit_numel or 0:,}": bool(self.unit_numel),
            "layers not joined": self.unit_numel == 0,
            "experts overlapped": self.expert_overlap,
        }  # fmt: skip
        return tuple(name for name, on in found.items() if on)


NO_FEATURES = Features()


def features_of(options: Mapping[str, Any]) -> Features:
    """Of Megatron's options, by their names; what is unset is off. ValueError for what is unknown
    or cannot be combined."""
    refuse_unmodelled(options)
    offloads = options.get("cpu_offloading", True)
    graphs = str(options.get("cuda_graph_impl")) == "local"
    wire = str(options.get("megatron_fsdp_grad_comm_dtype")).removeprefix("torch.")
    return Features(
        quantisation(options, "bf16"), options.get("optimizer") or ADAM,
        any(options.get(name) for name in (OFFLOAD, CORES_OFFLOAD)),
        (options.get("cpu_offloading_num_layers") or 0) if offloads else 0,
        float(options.get("fsdp_unsharded_budget_gib") or 0.0), wire in ("bf16", "bfloat16"),
        graphs, options.get(UNIT_NUMEL),
        bool(options.get("overlap_moe_expert_parallel_comm")),
    )  # fmt: skip


UNMODELLED = {
    "tp_comm_overlap": "tensor parallel communication beside products: a plan without it is too "
    "slow by what it hides",
    "fp4_format": "FP4 products and weights: there are no numbers for them",
    "cuda_graph_modules": "graphs of parts of layers; those of whole layers and of an iteration "
    "are planned",
}
"""Options that a plan would be wrong with, and what they are."""

OTHER_NAMES = {"fp4": "fp4_format", "cuda_graph_scope": "cuda_graph_modules"}
"""Of the same in configs, or in other releases."""

WHOLE = ("full", "full_iteration", "full_iteration_inference")


def refuse_unmodelled(options: Mapping[str, Any]) -> None:
    """ValueError for what is set and not modelled, by name."""
    for name in (*UNMODELLED, *OTHER_NAMES):
        value = options.get(name)
        parts = value if isinstance(value, (list, tuple)) else [value] if value else []
        parts = [part for part in parts if str(getattr(part, "name", part)) not in WHOLE]
        if parts:
            what = UNMODELLED[OTHER_NAMES.get(name, name)]
            raise ValueError(f"{name}={value!r} is not modelled: {what}; leave it out")


def ddp_options(features: Features) -> dict[str, Any]:
    """Fields of the DDP config."""
    options: dict[str, Any] = {}
    if features.bf16_wire:
        options["megatron_fsdp_grad_comm_dtype"] = "bf16"
        options["reduce_scatter_with_fp32_accumulation"] = True
    if features.streamed:
        options["chunked_optimizer_state_offload"] = True
    if features.budget_gib:
        options["fsdp_unsharded_budget_gib"] = features.budget_gib
    if features.unit_numel is not None:
        options[UNIT_NUMEL] = features.unit_numel
    return options


def model_options(features: Features) -> dict[str, Any]:
    """Of the model's config and the run."""
    options: dict[str, Any] = {}
    form = features.quantised.weights or features.quantised.products
    if form is not None:
        options |= {"fp8_format": "hybrid", "fp8_recipe": RECIPE_OF[form.name]}
    if features.quantised.weights is not None:
        options["fp8_param_gather"] = True
    if features.host_layers:
        options |= {"cpu_offloading": True, "cpu_offloading_num_layers": features.host_layers}
    if features.layer_graphs:
        options["cuda_graph_impl"] = "local"
    if features.expert_overlap:
        options["overlap_moe_expert_parallel_comm"] = True
    if features.optimizer != ADAM:
        options["optimizer"] = features.optimizer
    return options


RECIPE_OF = {PER_TENSOR.name: "tensorwise", BLOCK128.name: "blockwise", MXFP8.name: "mxfp8"}
"""A recipe for each format that products are modelled of."""


def problem(
    features: Features, strategy: Strategy, graph: bool, plain: bool, fixed: bool = False
) -> str | None:
    """Why a way to shard does not go with `features`; None where it does. graph: of a whole
    iteration; plain: neither a pipeline nor recomputation; fixed: gathered weights are in slots."""
    if features.expert_overlap and (
        graph or not plain or (fixed and strategy.shard_weights)
    ):
        return "experts overlap without graphs, pipelines, recomputation and weights in slots"
    if features.bf16_wire and strategy == STRATEGIES["no_shard"]:
        return "sums in fp32 are for reductions to shards"
    if features.budget_gib and not strategy.shard_grads:
        return "a budget is for strategies that shard gradients"
    if features.budget_gib and features.layer_graphs:
        return "graphs of layers write fresh buckets"
    if features.host_layers and not plain:
        return "activations are offloaded without pipelines and recomputation"
    if graph and (features.streamed or features.host_layers or features.layer_graphs):
        return "not in a graph of the iteration"
    return None
