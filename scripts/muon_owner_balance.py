"""How evenly Muon's work is spread over ranks: the largest Newton-Schulz cost over the mean.

    python scripts/muon_owner_balance.py

For published models, from their shapes alone. Ranks are those that share the weights: of data, and
of tensor parallelism, of a run without pipeline stages. A rank exchanges its experts with those
that have the same ones, and all else with all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_fsdp_adapter.sharding.muon import owners
from megatron_fsdp_adapter.sharding.muon.newton_schulz import cost

Shape = tuple[int, int]
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)


def llama(layers: int, hidden: int, ffn: int, keys: int) -> list[Shape]:
    """Queries, keys, values, output; gate, up, down. keys: rows of keys, as of values."""
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden),
             (ffn, hidden), (ffn, hidden), (hidden, ffn)]  # fmt: skip
    return layer * layers


def of_experts(experts: int, layers: int = 58, dense: int = 3) -> tuple[list[Shape], list[Shape]]:
    """DeepSeek-V3: latent attention, and experts of 2048: what all ranks share, and so many experts
    of each layer. Fused latents and keys are two matrices, keys and values too."""
    attention = [(1536, 7168), (24576, 1536), (512, 7168), (64, 7168), (16384, 512), (16384, 512),
                 (7168, 16384)]  # fmt: skip
    expert = [(2048, 7168), (2048, 7168), (7168, 2048)]
    first = [(18432, 7168), (18432, 7168), (7168, 18432)]
    # One expert in each layer is shared by all tokens.
    return [*(attention + first) * dense, *(attention + expert) * layers], expert * experts * layers


@dataclass(frozen=True)
class Model:
    """The matrices that all ranks share, and those of the experts of one of `parallel`
    expert-parallel ranks, which share them with the ranks that have the same ones."""

    shared: list[Shape]
    experts: list[Shape] = field(default_factory=list)
    parallel: int = 1

    def imbalance(self, ranks: int) -> float | None:
        """The largest work of a rank over the mean; None for fewer ranks than parts of experts."""
        if ranks < self.parallel:
            return None
        loads = _loads(self.shared, ranks)
        if self.experts and self.parallel == 1:  # one set of ranks has all matrices
            loads = _loads(self.shared + self.experts, ranks)
        elif self.experts:
            of_experts = _loads(self.experts, ranks // self.parallel)
            loads = [mine + of_experts[rank // self.parallel] for rank, mine in enumerate(loads)]
        return max(loads) * ranks / sum(loads)


def _loads(shapes: list[Shape], ranks: int) -> list[int]:
    of = {shape: cost(*shape) for shape in set(shapes)}
    costs = [of[shape] for shape in shapes]
    return list(owners.loads(costs, owners.assign(costs, ranks), ranks))


MODELS: Mapping[str, Model] = {
    "Llama-3 8B": Model(llama(32, 4096, 14336, 1024)),
    "Llama-3 70B": Model(llama(80, 8192, 28672, 1024)),
    "Llama-3 405B": Model(llama(126, 16384, 53248, 1024)),
    **{
        f"256 experts (DeepSeek-V3), EP {parallel}": Model(*of_experts(256 // parallel), parallel)
        for parallel in (1, 8, 64)
    },
}


def main() -> None:
    print(f"{'':34}" + "".join(f"{ranks:>8}" for ranks in RANKS) + "   matrices  seconds")
    for name, model in MODELS.items():
        began = time.perf_counter()
        found = [model.imbalance(ranks) for ranks in RANKS]
        took = time.perf_counter() - began
        said = "".join(f"{'' if one is None else format(one, '.3f'):>8}" for one in found)
        print(f"{name:34}{said}{len(model.shared) + len(model.experts):11}{took:9.2f}")


if __name__ == "__main__":
    main()
