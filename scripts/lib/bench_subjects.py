"""What `benchmark.py` can measure, by name, and how often it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


ZERO_3 = ("optim_grads_params",)


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
    "ours-graph": Kind("this package, fixed slots, forward and backward in one CUDA graph",
                       STRATEGIES, ZERO_3),
    "ours-ce-graph": Kind("copy engines for weights and gradients, in one CUDA graph",
                          ZERO_3, ZERO_3),
    "floor-graph": Kind("the floor in one CUDA graph"),
    "fsdp2": Kind("torch fully_shard with AdamW"),
    "fsdp2-symm": Kind("the same with symmetric memory and zero-CTA collectives of NCCL"),
    "bundled": Kind("megatron-core's own FSDP", STRATEGIES, ("optim_grads_params",)),
}

OURS = tuple(kind for kind in KINDS if kind.split("-")[0] == "ours")
DEFAULT = tuple(kind for kind in KINDS if "-" not in kind)


@dataclass(frozen=True)
class Subject:
    """One wrapper: `kind` is a key of `KINDS`, `strategy` one of its strategies or None."""

    kind: str
    strategy: str | None = None

    @property
    def name(self) -> str:
        return self.kind if self.strategy is None else f"{self.kind}:{self.strategy}"

    @property
    def is_captured(self) -> bool:
        """Whether core captures forward and backward of a step in one CUDA graph."""
        return self.kind.endswith("-graph")

    @property
    def is_floor(self) -> bool:
        """Whether it trains nothing."""
        return self.kind.split("-")[0] == "floor"

    @property
    def is_ours(self) -> bool:
        return self.kind in OURS

    def with_separate_gathers(self) -> Subject:
        """Ours on all-gather groups of its own; any other as it is."""
        return Subject("ours-ag", self.strategy) if self.kind == "ours" else self


FLOOR = Subject("floor")


def parse_subjects(text: str) -> list[Subject]:
    """Reads "floor,ddp,ours:optim": names, or kinds that stand for several; each once, in order.

    ValueError lists the known ones.
    """
    subjects: list[Subject] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        kind, _, strategy = part.partition(":")
        known = KINDS.get(kind)
        if known is None or (strategy and strategy not in known.strategies):
            raise ValueError(f"--wrappers {text}: {part!r} is unknown; use {_known()}")
        chosen = (strategy,) if strategy else known.default
        subjects += [Subject(kind, one) for one in chosen] or [Subject(kind)]
    if not subjects:
        raise ValueError(f"--wrappers {text!r} names nothing; use {_known()}")
    return list(dict.fromkeys(subjects))


def _known() -> str:
    return ", ".join(
        f"{kind}[:{'|'.join(row.strategies)}]" if row.strategies else kind
        for kind, row in KINDS.items()
    )


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
