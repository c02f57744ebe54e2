"""What options of an optimizer's config and of the DDP config have against each other: for the
arguments of Megatron-LM, recipes of Megatron-Bridge, and the configs that the wrapper is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .ddp_options import OFFLOAD
from .support import is_on


@dataclass(frozen=True)
class Pair:
    """An option of the optimizer's config that is refused where one of the DDP config is on.

    Attributes:
        option: of the optimizer's config.
        broken: whether the option has a value that is refused there; of the optimizer's config.
        ddp_option: a switch of the DDP config.
        message: why, and the remedy.
    """

    option: str
    broken: Callable[[Any], bool]
    ddp_option: str
    message: str

    def problem(self, config: Any) -> str:
        value = getattr(config, self.option)
        return f"{self.option}={value!r} with {self.ddp_option}=True: {self.message}"


PAIRS: tuple[Pair, ...] = (
    Pair(
        "optimizer",
        lambda config: config.optimizer != "adam",
        OFFLOAD,
        "the state of 'adam' alone is streamed; use that, or set the latter to False",
    ),
)


def problems(config: Any, ddp_config: Any) -> list[str]:
    """One line for each pair that is broken. The two configs may be one object."""
    return [
        pair.problem(config)
        for pair in PAIRS
        if is_on(ddp_config, pair.ddp_option) and pair.broken(config)
    ]
