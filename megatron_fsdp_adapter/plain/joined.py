"""Parameters that join a module after it was sharded, such as adapters that are put in later."""

from __future__ import annotations

import weakref
from collections.abc import Collection

from torch import nn

Seen = tuple["weakref.ref[nn.Module]", list[int], int]
"""A module, the identities of those in it, and the number of its parameters."""


class JoiningParameters:
    """Looks for trainable parameters that are in a module now and were not when this was made.

    Modules are held weakly."""

    def __init__(self, module: nn.Module) -> None:
        self._root = weakref.ref(module)  # the module that was sharded
        # Parameters that the engine does not manage, because they were to be ignored.
        self._known: Collection[int] = {id(param) for param in module.parameters()}
        self._seen = _look(module)  # the modules in it

    def refuse(self) -> None:
        """RuntimeError if there are any: no rank would have the gradients of others."""
        if all(_is_same(*one) for one in self._seen):
            return
        module = self._root()
        if module is None:
            return
        found = []
        for name, param in module.named_parameters():
            is_sharded = hasattr(param, "_fsdp_label") or hasattr(param, "fsdp_layout_ref")
            if param.requires_grad and not is_sharded and id(param) not in self._known:
                found.append(name)
        if found:
            raise RuntimeError(
                f"{len(found)} trainable parameters joined the model after it was sharded "
                f"({found[:4]}), so each rank would train its own. Add them before the model runs "
                "and before its parameters are read, or freeze them"
            )
        self._seen = _look(module)


def _look(module: nn.Module) -> list[Seen]:
    seen = []
    for child in module.modules():
        inside = [*map(id, child._modules.values())]
        seen.append((weakref.ref(child), inside, len(child._parameters)))
    return seen


def _is_same(ref: weakref.ref[nn.Module], inside: list[int], count: int) -> bool:
    child = ref()
    if child is None or len(child._parameters) != count:
        return False
    return [*map(id, child._modules.values())] == inside
