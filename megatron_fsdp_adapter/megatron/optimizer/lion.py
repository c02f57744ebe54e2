"""`optimizer` `lion`: which weights Lion updates, and with which betas.

Both are as in the installed core:

- From 0.18 on, Lion updates matrices, except embeddings and the output layer. Adam updates the
  rest. Lion uses Adam's betas; core reads `lion_beta1` and `lion_beta2` only for a Lion beside its
  own Muon.
- In 0.17, Lion updates all weights and uses `lion_beta1` and `lion_beta2`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.engine.params import ParamPair
from ...optim.lion import lion as lion_rule
from ...optim.local_shards import UpdateRule
from ...optim.state import GroupOptions
from ..compat import core_api
from ..inner_module import ModelChunks
from ..options.support import LION

OTHERS = "is_embedding_or_output_parameter"
"""Core's mark of matrices that Adam updates."""

if core_api.HAS_EMERGING_FUNCTION:
    BETAS = ("adam_beta1", "adam_beta2")
else:
    BETAS = ("lion_beta1", "lion_beta2")
"""Fields of the optimizer config with the betas that core gives its Lion."""


def problems(config: Any) -> list[str]:
    """Problems with Lion: an installed core without it, or betas out of range."""
    if not hasattr(config, "lion_beta1"):
        return [
            f"optimizer={LION!r}: not in this megatron-core. Use 'adam', or a release from 0.18 on"
        ]
    return [
        f"optimizer={LION!r} with {name}={beta}: must be at least 0 and below 1"
        for name, beta in zip(BETAS, betas(config), strict=True)
        if not 0 <= beta < 1
    ]


def betas(config: Any) -> tuple[float, float]:
    """The betas that core gives its Lion."""
    first, second = BETAS
    return getattr(config, first), getattr(config, second)


def updates(pair: ParamPair) -> bool:
    """True if Lion updates a weight, and not Adam."""
    if not core_api.HAS_EMERGING_FUNCTION:
        return True
    return len(pair.spec.layout_shape) == 2 and not getattr(pair.unsharded, OTHERS, False)


def rule_of(
    chunks: ModelChunks, config: Any, has_mark: Callable[[GroupOptions], bool]
) -> UpdateRule:
    """The update rule of an optimizer whose marked groups Lion updates."""
    return lion_rule(has_mark, betas(config))


def make_groups(chunks: ModelChunks) -> None:
    """Makes no process groups: in a step of Lion ranks exchange nothing."""


def summary(chunks: ModelChunks, config: Any) -> str:
    """A line with the betas of Lion and the number of weights that it updates."""
    trained = [
        pair for chunk in chunks for pair in chunk.engine.pairs if pair.group.key.requires_grad
    ]
    values = zip(BETAS, betas(config), strict=True)
    used = ", ".join(f"{name} {beta:g}" for name, beta in values)
    return (
        f"  Lion, as in megatron-core with {used}: {sum(map(updates, trained))} of {len(trained)} "
        "weights; Adam: others"
    )
