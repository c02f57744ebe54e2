"""What `benchmark.py` can measure, by name, and how often it does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


ZERO_3 = ("optim_grads_params",)
SHARDED_GRADS = ("optim_grads", *ZERO_3)


@dataclass(frozen=True)
class Kind:
    """A row of `KINDS`: the strategies it comes in, those that its bare name stands for."""

    meaning: str
    strategies: tuple[str, ...] = ()
    default: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {
    "floor": Kind("forward and backward of one process alone: no sharding, communication, step"),
    "ddp": Kind("megatron-core's DDP with its distributed optimizer and overlap"),
    "ours": Kind("this package", STRATEGIES, STRATEGIES),
    "ours-ag": Kind("this package, gathers on process groups of their own", STRATEGIES, STRATEGIES),
    "ours-db": Kind("this package, communication buffers in fixed slots", STRATEGIES, ZERO_3),
    "ours-ub": Kind("this package, slots registered with NCCL", STRATEGIES, ZERO_3),
    "ours-ce": Kind("this package, weights gathered by copy engines", ZERO_3, ZERO_3),
    "ours-ce-ub": Kind("this package, copy engines, and buckets registered", ZERO_3, ZERO_3),
    "ours-ce-rs": Kind("this package, copy engines for weights and gradients", ZERO_3, ZERO_3),
    "ours-apart": Kind("this package, each layer a unit (suggested_communication_unit_size=0)",
                       STRATEGIES, ZERO_3),
    "ours-ce-apart": Kind("ours-ce-rs with each layer a unit", ZERO_3, ZERO_3),
    "ours-late": Kind("this package, updates of the optimizer under the next forward",
                      STRATEGIES, ZERO_3),
    "ours-ce-late": Kind("ours-ce-rs with updates under the next forward", ZERO_3, ZERO_3),
    "ours-ce-late-layers": Kind("ours-ce-layers with updates under the next forward",
                                ZERO_3, ZERO_3),
    "ours-ce-late-graph": Kind("ours-ce-graph with the first gather beside the optimizer's step",
                               ZERO_3, ZERO_3),
    "ours-step": Kind("this package, the optimizer's step in a CUDA graph", STRATEGIES, ZERO_3),
    "ours-ce-step-layers": Kind("ours-ce-layers with the optimizer's step in a graph too",
                                ZERO_3, ZERO_3),
    "ours-ce-step-graph": Kind("ours-ce-graph with the optimizer's step in a graph too",
                               ZERO_3, ZERO_3),
    "ours-stream": Kind("this package, main weights and moments in host memory, streamed through "
                        "the GPU", STRATEGIES, ZERO_3),
    "ours-hybrid": Kind("this package, core's optimizer offload of everything", STRATEGIES, ZERO_3),
    "ours-muon": Kind("this package with Muon", STRATEGIES, ZERO_3),
    "ours-graph": Kind("this package, fixed slots, forward and backward in one CUDA graph",
                       STRATEGIES, ZERO_3),
    "ours-layers": Kind("this package, fixed slots, a CUDA graph for each layer's forward and "
                        "backward", SHARDED_GRADS, ZERO_3),
    "ours-ce-layers": Kind("copy engines for weights and gradients, and graphs of layers",
                           ZERO_3, ZERO_3),
    "ours-ce-graph": Kind("copy engines for weights and gradients, in one CUDA graph",
                          ZERO_3, ZERO_3),
    "floor-graph": Kind("the floor in one CUDA graph"),
    "ddp-muon": Kind("megatron-core's DDP with its layer-wise Muon (ZeRO-1), from 0.19 on"),
    "fsdp2-muon": Kind("torch fully_shard with Muon on full_tensor, and AdamW"),
    "fsdp2": Kind("torch fully_shard with AdamW"),
    "fsdp2-symm": Kind("the same with symmetric memory and zero-CTA collectives of NCCL"),
    "bundled": Kind("megatron-core's own FSDP", STRATEGIES, ("optim_grads_params",)),
}

RECIPES = ("tensorwise", "delayed", "blockwise")
PRECISIONS = ("bf16", *(f"{kind}_{recipe}" for kind in ("fp8", "fp8w") for recipe in RECIPES))
"""What a name may end in, after `@`: bf16 products; FP8 products of bf16, or of FP8, weights."""

OFFLOADS = ("half", "all")
"""What a name may have behind a slash: how many layers' activations Transformer Engine keeps on the
host, which are all but the last at most."""

OURS = tuple(kind for kind in KINDS if kind.split("-")[0] == "ours")
DEFAULT = tuple(kind for kind in KINDS if "-" not in kind)


@dataclass(frozen=True)
class Subject:
    """One wrapper: `kind` is a key of `KINDS`, `strategy` one of its strategies or None,
    `precision` one of `PRECISIONS`, or None for what the options of the run say, and `offload` one
    of `OFFLOADS`, or None for none; `budget` is GiB for units that stay whole over a step."""

    kind: str
    strategy: str | None = None
    precision: str | None = None
    offload: str | None = None
    budget: float = 0.0

    @property
    def name(self) -> str:
        name = self.kind if self.strategy is None else f"{self.kind}:{self.strategy}"
        name += f"+{self.budget:g}" if self.budget else ""
        name += "" if self.offload is None else f"/{self.offload}"
        return name if self.precision is None else f"{name}@{self.precision}"

    @property
    def floor(self) -> Subject:
        """The floor that it is measured against."""
        return Subject("floor", precision=self.precision)

    @property
    def recipe(self) -> str | None:
        """The recipe of FP8 that its name says."""
        _, _, recipe = (self.precision or "").partition("_")
        return recipe or None

    def offloaded_layers(self, layers: int) -> int:
        """How many of so many layers have their activations on the host."""
        return {None: 0, "half": layers // 2, "all": layers - 1}[self.offload]

    @property
    def has_fp8_weights(self) -> bool:
        """Whether its name says so."""
        return (self.precision or "").startswith("fp8w_")

    @property
    def is_captured(self) -> bool:
        """Whether core captures forward and backward of a step in one CUDA graph."""
        return self.kind.endswith("-graph")

    @property
    def has_muon(self) -> bool:
        """Whether it trains with Muon."""
        return self.kind.endswith("-muon")

    @property
    def captures_layers(self) -> bool:
        """Whether each layer has graphs of its own."""
        return self.kind.endswith("-layers")

    @property
    def captures_step(self) -> bool:
        """Whether core captures the optimizer's step."""
        return "step" in self.kind.split("-")

    @property
    def is_apart(self) -> bool:
        """Whether each layer is a unit, however small."""
        return self.kind.endswith("-apart")

    @property
    def is_floor(self) -> bool:
        """Whether it trains nothing."""
        return self.kind.split("-")[0] == "floor"

    @property
    def is_ours(self) -> bool:
        return self.kind in OURS

    def with_separate_gathers(self) -> Subject:
        """Ours on all-gather groups of its own; any other as it is."""
        return replace(self, kind="ours-ag") if self.kind == "ours" else self


FLOOR = Subject("floor")

FP8_ROWS = (
    "floor@fp8w_tensorwise", "ours:optim_grads_params@fp8w_tensorwise",
    "ours-ce-rs@fp8w_tensorwise",
    "ddp@fp8w_tensorwise", "bundled@fp8w_tensorwise", "ours-ce-graph@fp8w_tensorwise",
    "floor@fp8w_blockwise", "ours:optim_grads_params@fp8w_blockwise", "ddp@fp8w_blockwise",
    "bundled@fp8w_blockwise", "ours-ce-rs@fp8w_blockwise",
    "floor@bf16", "ours:optim_grads_params@bf16",
    "floor@fp8_tensorwise", "ours:optim_grads_params@fp8_tensorwise", "ddp@fp8_tensorwise",
    "floor@fp8w_delayed", "ours:optim_grads_params@fp8w_delayed", "ours-ce-rs@fp8w_delayed",
    "ddp@fp8w_delayed", "bundled@fp8w_delayed",
    "ours-ce-graph@fp8w_blockwise", "ours-ce-rs@bf16", "ours-ce-graph@bf16",
    "ours-db@fp8w_tensorwise", "ours-ce@fp8w_tensorwise", "ours:optim@fp8w_tensorwise",
    "floor-graph@fp8w_tensorwise", "ours-ce-graph@fp8w_delayed",
    "floor@fp8_blockwise", "ours:optim_grads_params@fp8_blockwise", "ddp@fp8_blockwise",
    "bundled@fp8_tensorwise", "ddp@bf16", "bundled@bf16",
    "floor@fp8_delayed", "ours:optim_grads_params@fp8_delayed", "ddp@fp8_delayed",
)  # fmt: skip
"""Everything about quantised weights, what matters most first: time may end before the rows do."""
OFFLOAD_ROWS = (
    "floor", "ours:optim_grads_params", "ours:optim_grads_params/half",
    "ours:optim_grads_params/all", "bundled", "bundled/half", "bundled/all",
    "ours-ce-rs", "ours-ce-rs/half", "ours-ce-rs/all",
)  # fmt: skip
"""Activations of no, half and all layers on the host."""
OPTIMIZER_ROWS = ("ours:optim_grads_params", "ours-stream", "ours-hybrid", "ours-stream:optim")
"""Where the optimizer is. The last is for models whose gradients fit."""
BUDGET_ROWS = (
    "ddp", "ours:optim_grads_params", "ours:optim_grads_params+5", "ours:optim_grads_params+10",
    "ours:optim_grads_params+20", "ours:optim_grads_params+30", "ours-ce-graph",
    "ours-ce-graph+10", "ours-ce-graph+30", "ours:optim", "bundled",
)  # fmt: skip
"""GiB for units that stay whole over the microbatches of a step."""
MUON_ROWS = ("ours:optim_grads_params", "ours-muon", "fsdp2-muon", "ddp-muon", "fsdp2", "ddp",
             "ours-muon:optim")  # fmt: skip
"""Muon beside Adam."""
LATE_ROWS = ("ours:optim_grads_params", "ours-late", "ours-ce-rs", "ours-ce-late",
             "ours-ce-layers", "ours-ce-late-layers", "ours-ce-graph", "ours-ce-late-graph",
             "ours:optim", "ours-late:optim")  # fmt: skip
"""The optimizer's step between backward and forward, and under the forward."""
JOINED_ROWS = ("ours:optim_grads_params", "ours-apart", "ours:optim", "ours-apart:optim",
               "ours-ce-rs", "ours-ce-apart", "ddp")  # fmt: skip
"""Layers joined to units as by default, and each a unit."""
STEP_ROWS = ("ours:optim_grads_params", "ours-step", "ours-ce-layers", "ours-ce-step-layers",
             "ours-ce-graph", "ours-ce-step-graph")  # fmt: skip
"""The optimizer's step launched kernel by kernel, and in a CUDA graph."""
SETS = {
    "step": ",".join(STEP_ROWS), "joined": ",".join(JOINED_ROWS),
    "late": ",".join(LATE_ROWS),
    "muon": ",".join(MUON_ROWS),
    "fp8": ",".join(FP8_ROWS), "offload": ",".join(OFFLOAD_ROWS),
    "optimizer": ",".join(OPTIMIZER_ROWS), "budget": ",".join(BUDGET_ROWS),
}


def parse_subjects(text: str) -> list[Subject]:
    """Reads "floor,ddp,ours:optim@fp8w_delayed": names, or kinds that stand for several; each once,
    in order.

    ValueError lists the known ones.
    """
    subjects: list[Subject] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        wrapper, _, precision = part.partition("@")
        wrapper, _, offload = wrapper.partition("/")
        wrapper, _, budget = wrapper.partition("+")
        kind, _, strategy = wrapper.partition(":")
        known = KINDS.get(kind)
        ends = ((offload, OFFLOADS), (precision, PRECISIONS))
        strange = known is None or (strategy and strategy not in known.strategies)
        if budget:
            strange = strange or kind not in OURS or not budget.replace(".", "", 1).isdigit()
        if known is None or strange or any(one and one not in of for one, of in ends):
            raise ValueError(f"--wrappers {text}: {part!r} is unknown; use {_known()}")
        chosen = (strategy,) if strategy else known.default or (None,)
        subjects += [
            Subject(kind, one, precision or None, offload or None, float(budget or 0))
            for one in chosen
        ]
    if not subjects:
        raise ValueError(f"--wrappers {text!r} names nothing; use {_known()}")
    return list(dict.fromkeys(subjects))


def _known() -> str:
    wrappers = ", ".join(
        f"{kind}[:{'|'.join(row.strategies)}]" if row.strategies else kind
        for kind, row in KINDS.items()
    )
    ends = f"/{'|'.join(OFFLOADS)} (layers whose activations are on the host)"
    whole = "+GIB (ours: for units that stay whole over a step)"
    return f"{wrappers}; each may end in {whole}, {ends} and @{'|'.join(PRECISIONS)}"


@dataclass(frozen=True)
class Plan:
    """How often: all counts in steps, but `repeats`, which counts rounds of blocks.

    isolated: only one wrapper (and the floor) exists at a time.
    profile: folder for a trace of one step of each of ours.
    host_steps: steps after the timed ones in which the host's launching is timed, on a GPU.
    """

    steps: int = 5
    warmup: int = 3
    repeats: int = 7
    num_microbatches: int = 1
    isolated: bool = False
    profile: Path | None = None
    host_steps: int = 3

    def __post_init__(self) -> None:
        for name in ("steps", "warmup", "repeats", "num_microbatches"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {getattr(self, name)}: must be at least 1")
