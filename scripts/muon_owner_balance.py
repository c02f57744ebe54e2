"""How evenly Muon's work is spread over ranks: the largest Newton-Schulz cost over the mean.

    python scripts/muon_owner_balance.py

For published models, from their shapes alone. Ranks are those that share the weights: of data, and
of tensor parallelism, of a run without pipeline stages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from megatron_fsdp_adapter.sharding.muon import owners
from megatron_fsdp_adapter.sharding.muon.newton_schulz import cost

Shape = tuple[int, int]
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)


def llama(layers: int, hidden: int, ffn: int, keys: int) -> list[Shape]:
    """Queries, keys, values, output; gate, up, down. keys: rows of keys, as of values."""
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden),
             (ffn, hidden), (ffn, hidden), (hidden, ffn)]  # fmt: skip
    return layer * layers


def of_experts(experts: int, layers: int = 58, dense: int = 3) -> list[Shape]:
    """DeepSeek-V3: latent attention, and experts of 2048; the experts of one expert-parallel rank.
    Fused latents and keys are two matrices, keys and values too."""
    attention = [(1536, 7168), (24576, 1536), (512, 7168), (64, 7168), (16384, 512), (16384, 512),
                 (7168, 16384)]  # fmt: skip
    expert = [(2048, 7168), (2048, 7168), (7168, 2048)]
    first = [(18432, 7168), (18432, 7168), (7168, 18432)]
    # One expert in each layer is shared by all tokens.
    return [*(attention + first) * dense, *(attention + expert * (experts + 1)) * layers]


MODELS: Mapping[str, list[Shape]] = {
    "Llama-3 8B": llama(32, 4096, 14336, 1024),
    "Llama-3 70B": llama(80, 8192, 28672, 1024),
    "Llama-3 405B": llama(126, 16384, 53248, 1024),
    "256 experts (DeepSeek-V3), EP 1": of_experts(256),
}


def main() -> None:
    print(f"{'':34}" + "".join(f"{ranks:>8}" for ranks in RANKS) + "   matrices  seconds")
    for name, shapes in MODELS.items():
        began = time.perf_counter()
        costs = [cost(*shape) for shape in shapes]
        found = [owners.imbalance(costs, owners.assign(costs, ranks), ranks) for ranks in RANKS]
        took = time.perf_counter() - began
        print(f"{name:34}" + "".join(f"{value:8.3f}" for value in found)
              + f"{len(shapes):11}{took:9.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
