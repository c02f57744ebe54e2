"""Subjects of `benchmark.py`, by name: tables of options and of captured parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO

ALL = tuple(STRATEGIES)
ZERO_3 = ALL[-1:]
SLOTS = {"fsdp_double_buffer": True}
GATHERS = {"fsdp_copy_engine_all_gather": True}
BOTH = {**GATHERS, "fsdp_copy_engine_reduce_scatter": True}
APART = {"suggested_communication_unit_size": 0}
FIVE_AGAIN = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 5,
}
STEP = "step"
LAYERS = "layers"
"""The parts captured in CUDA graphs: forward and backward of a step, or of each layer."""


@dataclass(frozen=True)
class Kind:
    """A row of `KINDS`.

    strategies: those that it supports; default: those that its bare name stands for; options: those
    that select it; captures: the part captured in CUDA graphs, `STEP`, `LAYERS` or none ("")."""

    meaning: str
    strategies: tuple[str, ...] = ()
    default: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    captures: str = ""


KINDS: dict[str, Kind] = {
    "floor": Kind("forward and backward of one process alone: no sharding, communication, step"),
    "ddp": Kind("megatron-core's DDP with its distributed optimizer and overlap"),
    "ours": Kind("this package", ALL, ALL),
    "ours-ag": Kind(
        "gathers on separate process groups", ALL, ALL, {"separate_all_gather_groups": True}
    ),
    "ours-db": Kind("communication buffers in fixed slots", ALL, ZERO_3, SLOTS),
    "ours-ub": Kind("slots registered with NCCL", ALL, ZERO_3, {**SLOTS, "nccl_ub": True}),
    "ours-ce": Kind("weights gathered by copy engines", ZERO_3, ZERO_3, GATHERS),
    "ours-ce-rs": Kind("copy engines for weights and gradients", ZERO_3, ZERO_3, BOTH),
    "ours-apart": Kind("each layer a unit", ALL, ZERO_3, APART),
    "ours-ce-apart": Kind("ours-ce-rs with each layer a unit", ZERO_3, ZERO_3, {**BOTH, **APART}),
    "ours-stream": Kind(
        "main weights and moments in host memory, streamed through the GPU",
        ALL,
        ZERO_3,
        {"chunked_optimizer_state_offload": True},
    ),
    "ours-muon": Kind("Muon", ALL, ZERO_3, {"optimizer": "muon"}),
    "ours-graph": Kind(
        "fixed slots, forward and backward in one CUDA graph", ALL, ZERO_3, SLOTS, STEP
    ),
    "ours-layers": Kind(
        "fixed slots, a CUDA graph for each layer's forward and backward",
        ALL,
        ZERO_3,
        SLOTS,
        LAYERS,
    ),
    "ours-ce-layers": Kind(
        "copy engines for both, and graphs of layers", ZERO_3, ZERO_3, BOTH, LAYERS
    ),
    "ours-ce-graph": Kind("copy engines for both, in one CUDA graph", ZERO_3, ZERO_3, BOTH, STEP),
    "floor-graph": Kind("the floor in one CUDA graph", captures=STEP),
    "ddp-recompute": Kind("DDP that recomputes 5 layers in backward", options=FIVE_AGAIN),
    "fsdp2": Kind("torch fully_shard with AdamW"),
    "bundled": Kind("megatron-core's own FSDP", ALL, ZERO_3),
    "bundled-v2": Kind("the rewrite of megatron-core's own FSDP (core 0.20)", ZERO_3, ZERO_3),
}

RECIPES = ("tensorwise", "delayed", "blockwise")
PRECISIONS = ("bf16", *(f"{kind}_{recipe}" for kind in ("fp8", "fp8w") for recipe in RECIPES))
"""Suffixes of a name, after `@`: bf16 GEMMs; FP8 GEMMs of bf16, or of FP8, weights."""

DEFAULT = tuple(kind for kind in KINDS if "-" not in kind)
"""Kinds that are measured without --wrappers."""


@dataclass(frozen=True)
class Subject:
    """One wrapper that is measured.

    kind: a key of `KINDS`; strategy: one of its strategies, or None if it has none; precision: one
    of `PRECISIONS`, or None for that of the run's options; budget: GiB for units that stay
    unsharded over a step, or "auto"."""

    kind: str
    strategy: str | None = None
    precision: str | None = None
    budget: float | str = 0.0

    @property
    def name(self) -> str:
        name = self.kind
        if self.strategy is not None:
            name += f":{self.strategy}"
        if self.budget:
            name += f"+{self.budget}".removesuffix(".0")
        if self.precision is not None:
            name += f"@{self.precision}"
        return name

    @property
    def file_name(self) -> str:
        """The name of its files, without a suffix."""
        return self.name.replace(":", "-").replace("@", "-")

    @property
    def floor(self) -> Subject:
        """The floor of the same precision."""
        return Subject("floor", precision=self.precision)

    @property
    def captures(self) -> str:
        """The part captured in CUDA graphs."""
        return KINDS[self.kind].captures

    @property
    def is_floor(self) -> bool:
        """True for a floor, which does not train."""
        return self.kind.startswith("floor")

    @property
    def is_ddp(self) -> bool:
        """True for megatron-core's DDP."""
        return self.kind.startswith("ddp")

    @property
    def is_ours(self) -> bool:
        return self.kind.startswith("ours")

    def options(self) -> dict[str, Any]:
        """Options of `pretrain_gpt.py` that select it and override those of the run."""
        found = dict(KINDS[self.kind].options)
        if self.budget == AUTO:  # its units have buffers of their own
            found = {name: value for name, value in found.items() if name not in SLOTS}
        if self.precision is None:
            return found
        kind, _, recipe = self.precision.partition("_")
        found["bf16"] = True
        found["fp8_format"] = "hybrid" if recipe else None
        found["fp8_param_gather"] = kind == "fp8w"
        if recipe:
            found["fp8_recipe"] = recipe
        return found


def parse_subjects(text: str) -> list[Subject]:
    """Parses names as in "floor,ddp,ours:optim+4@fp8w_delayed". A kind alone stands for its default
    strategies. Each subject is returned once, in order. Raises a ValueError that lists the known
    ones."""
    subjects: list[Subject] = []
    for part in map(str.strip, text.split(",")):
        if not part:
            continue
        wrapper, _, precision = part.partition("@")
        wrapper, _, budget = wrapper.partition("+")
        kind, _, strategy = wrapper.partition(":")
        known = KINDS.get(kind)
        strange = known is None or (strategy and strategy not in known.strategies)
        strange = strange or (precision and precision not in PRECISIONS)
        if budget:
            is_budget = budget == AUTO or budget.replace(".", "", 1).isdigit()
            strange = strange or kind[:4] != "ours" or not is_budget
        if known is None or strange:
            raise ValueError(f"--wrappers {text}: {part!r} is unknown. Use {_known()}")
        chosen = (strategy,) if strategy else known.default or (None,)
        gib = budget if budget == AUTO else float(budget or 0)
        subjects += [Subject(kind, one, precision or None, gib) for one in chosen]
    if not subjects:
        raise ValueError(f"--wrappers {text!r} names nothing. Use {_known()}")
    return list(dict.fromkeys(subjects))


def _known() -> str:
    names = []
    for name, kind in KINDS.items():
        strategies = "|".join(kind.strategies)
        names.append(f"{name}[:{strategies}]" if strategies else name)
    wrappers = ", ".join(names)
    return (
        f"{wrappers}; each may end in +GIB (ours: for units that stay unsharded over a step) and "
        f"@{'|'.join(PRECISIONS)}"
    )
