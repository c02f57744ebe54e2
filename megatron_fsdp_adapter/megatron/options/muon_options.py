"""Options of `optimizer` `muon` and `adaptive_muon`: which values there are, and what does not go
with them. Of a config of Megatron's, or of Megatron-LM's arguments, which lack some."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...sharding.muon.newton_schulz import COEFFICIENTS
from .support import ADAPTIVE, MUON

KINDS = (MUON, ADAPTIVE)
"""Of `optimizer`."""
SAYS_THAT_CORE_MAKES_IT = "muon_nesterov"
"""An argument of Megatron-LM, and field of the optimizer config. Where it has this name,
Megatron-LM makes every optimizer as it makes Adam; where it has an older one, it calls another
function for Muon, and has no config for Lion."""
METHOD = "adamuon"
"""Of `adaptive_muon_moment2_method`: the one whose second moment is entry by entry. The others have
means over rows, columns or all of a matrix, which ranks have parts of."""
HALF = "medium"
"""Of `muon_fp32_matmul_prec`: products of 16 bits."""

SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
"""The factor on an update, by `muon_scale_mode`, as NVIDIA's emerging_optimizers have them."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "adaptive_muon_moment2_method": (METHOD,),
    "muon_coefficient_type": tuple(COEFFICIENTS),
    "muon_scale_mode": tuple(SCALES),
    "muon_fp32_matmul_prec": (HALF, "high", "highest"),
    "muon_scalar_optimizer": ("adam",),
}


def problems(config: Any) -> list[str]:
    """What the options have against Muon; none if the config asks for another optimizer. What it
    lacks has its default."""
    if config.optimizer not in KINDS:
        return []
    found = []
    for name, known in CHOICES.items():
        value = getattr(config, name, known[0])
        is_read = config.optimizer == ADAPTIVE or not name.startswith(ADAPTIVE)
        if is_read and value not in known:
            found.append(
                f"{name}={value!r}: with sharded weights it is one of {list(known)}; use one of "
                "them"
            )
    steps, momentum = getattr(config, "muon_num_ns_steps", 5), getattr(config, "muon_momentum", 0)
    if steps < 1:
        found.append(f"muon_num_ns_steps={steps}: there is at least one")
    if not 0 <= momentum < 1:
        found.append(f"muon_momentum={momentum}: use 0 or more, and less than 1")
    return [f"optimizer={config.optimizer!r} with {line}" for line in found]
