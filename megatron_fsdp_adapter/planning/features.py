"""What a user turns on beside how a run is split and sharded: a plan takes it as it is told, since
it changes numbers or asks for other resources, and does not search for it."""

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
    """quantized: matrix products and weights of layers in FP8. budget_gib: for units that stay
    whole over a step. bf16_wire: gradients travel in bf16 and are summed in fp32. layer_graphs:
    each layer in CUDA graphs of its own. unit_numel: neighboring layers are joined to units of so
    many elements, 0: each is one, None: as the wrapper joins them by default."""

    quantized: Quantization = PLAIN
    budget_gib: float = 0.0
    bf16_wire: bool = False
    layer_graphs: bool = False
    unit_numel: int | None = None

    def __post_init__(self) -> None:
        if self.unit_numel is not None and self.unit_numel < 0:
            raise ValueError(f"--suggested-communication-unit-size {self.unit_numel}: 0 or more")
        if self.unit_numel and self.layer_graphs:
            raise ValueError(
                "--suggested-communication-unit-size with graphs of layers: those need each layer "
                "for itself; leave it out"
            )
        if self.budget_gib < 0:
            raise ValueError(f"--fsdp-unsharded-budget-gib {self.budget_gib}: use 0 or more")

    @property
    def precision(self) -> Precision:
        """For the formula of memory."""
        return Precision(comm=torch.bfloat16 if self.bf16_wire else torch.float32)

    @property
    def budget(self) -> int:
        """Bytes."""
        return int(self.budget_gib * GIB)

    @property
    def every_layer_counts(self) -> bool:
        """Whether layers differ, so that no few of them tell what all take. Those whose updates run
        under a forward do: the first ones hide other parts of them than the last ones."""
        return bool(self.budget_gib or self.unit_numel)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """For a table."""
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
    """Of Megatron's options, by their names; what is unset is off. ValueError for what is unknown
    or cannot be combined."""
    refuse_unmodeled(options)
    wire = str(options.get("megatron_fsdp_grad_comm_dtype")).removeprefix("torch.")
    return Features(
        quantization(options, "bf16"),
        float(options.get("fsdp_unsharded_budget_gib") or 0.0), wire in ("bf16", "bfloat16"),
        str(options.get("cuda_graph_impl")) == "local", options.get(UNIT_NUMEL),
    )  # fmt: skip


UNMODELED = {
    "tp_comm_overlap": "tensor parallel communication beside products: a plan without it is too "
    "slow by what it hides",
    "optimizer_cpu_offload": "an optimizer on the host; `estimate` counts its memory",
    "chunked_optimizer_state_offload": "a streamed optimizer; `estimate` counts its memory",
    "overlap_moe_expert_parallel_comm": "exchanges between experts beside another microbatch: a "
    "plan without it is too slow by what it hides",
    "cpu_offloading": "activations in host memory",
    "fp4_format": "FP4 products and weights: there are no numbers for them",
    "cuda_graph_modules": "graphs of parts of layers; those of whole layers and of an iteration "
    "are planned",
}
"""Options that a plan would be wrong with, and what they are."""

OTHER_NAMES = {
    "fp4": "fp4_format", "cuda_graph_scope": "cuda_graph_modules",
    "cpu_offloading_num_layers": "cpu_offloading",
}  # fmt: skip
"""Of the same in configs, or in other releases."""

WHOLE = ("full", "full_iteration", "full_iteration_inference")


def refuse_unmodeled(options: Mapping[str, Any]) -> None:
    """ValueError for what is set and not modeled, by name."""
    if options.get("optimizer") not in (None, ADAM):
        raise ValueError(
            f"optimizer={options['optimizer']!r} is not modeled: Adam's step is; leave it out, or "
            "see `estimate`, which counts the memory of others"
        )
    for name in (*UNMODELED, *OTHER_NAMES):
        value = options.get(name)
        parts = value if isinstance(value, (list, tuple)) else [value] if value else []
        parts = [part for part in parts if str(getattr(part, "name", part)) not in WHOLE]
        if parts:
            what = UNMODELED[OTHER_NAMES.get(name, name)]
            raise ValueError(f"{name}={value!r} is not modeled: {what}; leave it out")


def ddp_options(features: Features) -> dict[str, Any]:
    """Fields of the DDP config."""
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
    """Of the model's config and the run."""
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
"""A recipe for each format that products are modeled of."""


def problem(features: Features, strategy: Strategy, graph: bool) -> str | None:
    """Why a way to shard does not go with `features`; None where it does. graph: of a whole
    iteration."""
    if features.bf16_wire and strategy == STRATEGIES["no_shard"]:
        return "sums in fp32 are for reductions to shards"
    if features.budget_gib and not strategy.shard_grads:
        return "a budget is for strategies that shard gradients"
    if features.budget_gib and features.layer_graphs:
        return "graphs of layers write fresh buckets"
    if graph and features.layer_graphs:
        return "not in a graph of the iteration"
    return None
