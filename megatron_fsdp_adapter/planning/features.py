"""Options beside parallelism and sharding. A plan does not search for them, because they change
numerics or need other resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron_fsdp_adapter.core.config import STRATEGIES, Strategy
from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8, PER_TENSOR
from megatron_fsdp_adapter.diagnostics.memory import Precision
from megatron_fsdp_adapter.megatron.options.table import UNIT_NUMEL
from megatron_fsdp_adapter.models.quantization import PLAIN, Quantization, quantization
from megatron_fsdp_adapter.sharding.unsharded_budget import GIB

ADAM = "adam"


@dataclass(frozen=True)
class Features:
    """Features of a run.

    quantized: GEMMs and weights of layers in FP8. budget_gib: for units that stay unsharded over a
    step. bf16_wire: bf16 gradients on the wire, summed in fp32. layer_graphs: CUDA graphs of each
    layer. unit_numel: elements up to which neighboring layers are grouped (0: each layer is a unit;
    None: the wrapper's default)."""

    quantized: Quantization = PLAIN
    budget_gib: float = 0.0
    bf16_wire: bool = False
    layer_graphs: bool = False
    unit_numel: int | None = None

    def __post_init__(self) -> None:
        if self.unit_numel is not None and self.unit_numel < 0:
            raise ValueError(
                f"--suggested-communication-unit-size {self.unit_numel}: must be 0 or more"
            )
        if self.unit_numel and self.layer_graphs:
            raise ValueError(
                "--suggested-communication-unit-size is incompatible with layer graphs, which "
                "need one layer per unit. Leave it out"
            )
        if self.budget_gib < 0:
            raise ValueError(f"--fsdp-unsharded-budget-gib {self.budget_gib}: must be 0 or more")

    @property
    def precision(self) -> Precision:
        """Precision for the memory formula."""
        return Precision(comm=torch.bfloat16 if self.bf16_wire else torch.float32)

    @property
    def budget(self) -> int:
        """The budget in bytes."""
        return int(self.budget_gib * GIB)

    @property
    def every_layer_counts(self) -> bool:
        """True if layers differ in time, so that all must be simulated."""
        return bool(self.budget_gib or self.unit_numel)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Words for a table."""
        found = {
            self.quantized.name: bool(self.quantized.name),
            f"budget {self.budget_gib:g} GiB": self.budget_gib > 0,
            "bf16 wire": self.bf16_wire,
            "layer graphs": self.layer_graphs,
            f"units of {self.unit_numel or 0:,}": bool(self.unit_numel),
            "layers not joined": self.unit_numel == 0,
        }  # fmt: skip
        return tuple(name for name, on in found.items() if on)


NO_FEATURES = Features()


def features_of(options: Mapping[str, Any]) -> Features:
    """The features by Megatron's options; unset ones are off. Raises ValueError for unsupported
    options and combinations."""
    refuse_unmodeled(options)
    wire = str(options.get("megatron_fsdp_grad_comm_dtype")).removeprefix("torch.")
    return Features(
        quantization(options, "bf16"),
        float(options.get("fsdp_unsharded_budget_gib") or 0.0), wire in ("bf16", "bfloat16"),
        str(options.get("cuda_graph_impl")) == "local", options.get(UNIT_NUMEL),
    )  # fmt: skip


UNMODELED = {
    "tp_comm_overlap": (
        "tensor-parallel communication beside GEMMs: a plan would overestimate the time"
    ),
    "optimizer_cpu_offload": "an optimizer on the host; `estimate` counts its memory",
    "chunked_optimizer_state_offload": "a streamed optimizer; `estimate` counts its memory",
    "overlap_moe_expert_parallel_comm": (
        "exchanges between experts beside another microbatch: a plan would overestimate the time"
    ),
    "cpu_offloading": "activations in host memory",
    "fp4_format": "FP4 GEMMs and weights: there are no measurements",
    "cuda_graph_modules": (
        "graphs of parts of layers; graphs of layers and of an iteration are planned"
    ),
}
"""Options that are not modeled, and what they do."""

OTHER_NAMES = {
    "fp4": "fp4_format", "cuda_graph_scope": "cuda_graph_modules",
    "cpu_offloading_num_layers": "cpu_offloading",
}  # fmt: skip
"""Names of the same options in configs, or in other releases."""

WHOLE = ("full", "full_iteration", "full_iteration_inference")


def refuse_unmodeled(options: Mapping[str, Any]) -> None:
    """Raises ValueError if an option that is not modeled is set."""
    if options.get("optimizer") not in (None, ADAM):
        raise ValueError(
            f"optimizer={options['optimizer']!r} is not modeled, only Adam. Leave it out, or use "
            "`estimate`, which counts the memory of others"
        )
    for name in (*UNMODELED, *OTHER_NAMES):
        value = options.get(name)
        parts = value if isinstance(value, (list, tuple)) else [value] if value else []
        parts = [part for part in parts if str(getattr(part, "name", part)) not in WHOLE]
        if parts:
            what = UNMODELED[OTHER_NAMES.get(name, name)]
            raise ValueError(f"{name}={value!r} is not modeled: {what}. Leave it out")


def ddp_options(features: Features) -> dict[str, Any]:
    """The features as fields of the DDP config."""
    options: dict[str, Any] = {}
    if features.bf16_wire:
        options["megatron_fsdp_grad_comm_dtype"] = "bf16"
        options["reduce_scatter_with_fp32_accumulation"] = True
    if features.budget_gib:
        options["fsdp_unsharded_budget_gib"] = features.budget_gib
    if features.unit_numel is not None:
        options[UNIT_NUMEL] = features.unit_numel
    return options


def model_options(features: Features) -> dict[str, Any]:
    """The features as options of the model's config and the run."""
    options: dict[str, Any] = {}
    form = features.quantized.weights or features.quantized.products
    if form is not None:
        options |= {"fp8_format": "hybrid", "fp8_recipe": RECIPE_OF[form.name]}
    if features.quantized.weights is not None:
        options["fp8_param_gather"] = True
    if features.layer_graphs:
        options["cuda_graph_impl"] = "local"
    return options


RECIPE_OF = {PER_TENSOR.name: "tensorwise", BLOCK128.name: "blockwise", MXFP8.name: "mxfp8"}
"""A recipe for each format whose GEMMs are modeled."""


def problem(features: Features, strategy: Strategy, graph: bool) -> str | None:
    """Why a strategy is incompatible with `features`; None if it is compatible. graph: True for a
    full-iteration graph."""
    if features.bf16_wire and strategy == STRATEGIES["no_shard"]:
        return "fp32 accumulation of bf16 gradients requires a sharded reduction"
    if features.budget_gib and not strategy.shard_grads:
        return "an unsharded budget requires a strategy that shards gradients"
    if features.budget_gib and features.layer_graphs:
        return "an unsharded budget is incompatible with layer graphs"
    if graph and features.layer_graphs:
        return "layer graphs are incompatible with a full-iteration graph"
    return None
