"""`optimizer` `lion`: which weights are Lion's, and with which betas.

As core does it, whose Lion from 0.18 on has Adam's betas (it reads `lion_beta1` and `lion_beta2`
for a Lion beside its own Muon alone), and leaves to Adam what is no matrix, embeddings and the
output layer. Before, core's Lion has all weights, and its own betas.
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
"""Core's mark of matrices that are Adam's."""


def problems(config: Any) -> list[str]:
    """Problems of an optimizer's config, and of the installed core, with Lion."""
    if not hasattr(config, "lion_beta1"):
        return [
            f"optimizer={LION!r}: not in this megatron-core. Use 'adam', or a release from 0.18 on"
        ]
    names = _BETAS[core_api.MAKES_EMERGING]
    return [
        f"optimizer={LION!r} with {name}={beta}: must be at least 0 and below 1"
        for name, beta in zip(names, betas(config), strict=True)
        if not 0 <= beta < 1
    ]


_BETAS = {True: ("adam_beta1", "adam_beta2"), False: ("lion_beta1", "lion_beta2")}
"""Names of the betas in the optimizer config, by whether core makes Lion by its function for such
optimizers."""


def betas(config: Any) -> tuple[float, float]:
    """The betas that core gives its Lion."""
    first, second = _BETAS[core_api.MAKES_EMERGING]
    return getattr(config, first), getattr(config, second)


def has(pair: ParamPair) -> bool:
    """True if core gives a weight to Lion, and not to Adam."""
    if not core_api.MAKES_EMERGING:
        return True
    return len(pair.spec.layout_shape) == 2 and not getattr(pair.unsharded, OTHERS, False)


def rule_of(
    chunks: ModelChunks, config: Any, has_mark: Callable[[GroupOptions], bool]
) -> UpdateRule:
    """The update rule of an optimizer of which Lion has the groups that are marked."""
    return lion_rule(has_mark, betas(config))


def make_groups(chunks: ModelChunks) -> None:
    """Nothing: ranks exchange nothing in a step."""


def table(chunks: ModelChunks, config: Any) -> str:
    """A line with the number of Lion's weights, and its betas."""
    trained = [
        pair for chunk in chunks for pair in chunk.engine.pairs if pair.group.key.requires_grad
    ]
    values = zip(_BETAS[core_api.MAKES_EMERGING], betas(config), strict=True)
    used = ", ".join(f"{name} {beta:g}" for name, beta in values)
    return (
        f"  Lion, as in megatron-core with {used}: {sum(map(has, trained))} of {len(trained)} "
        "weights; Adam: others"
    )
