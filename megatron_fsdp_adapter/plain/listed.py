"""Lists of the parameters of modules inside a sharded model, for which a program may ask."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ListedParameters(dict[str, Any]):
    """`_parameters` of a module in a sharded model.

    `items`, which `parameters()` and `zero_grad()` of the module and of those around it call, tells
    the engine first. Reads by name tell nothing.
    """

    # Called before the parameters are listed, with the model's engine, if that is alive.
    tell: Callable[[Any], None]
    # A weak reference to the engine.
    engine: Callable[[], Any]

    def items(self) -> Any:
        engine = self.engine()
        if engine is not None:
            self.tell(engine)
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)  # a copy of the model is not this one


def tell_of_lists(module: nn.Module, engine: Any, tell: Callable[[Any], None]) -> None:
    """Calls `tell` with `engine` before parameters in `module` are listed."""
    for owner in module.modules():
        if owner._parameters:
            listed = ListedParameters(owner._parameters)
            listed.tell = tell
            listed.engine = weakref.ref(engine)
            owner._parameters = listed
