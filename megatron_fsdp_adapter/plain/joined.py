"""Parameters that join a module after it was sharded, such as adapters that are put in later."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_numbers = itertools.count(1)
_last = 0
"""Number of the last registration of a parameter or a module, in any module of the process."""


def _note(*_: Any) -> None:
    global _last
    _last = next(_numbers)


@functools.cache
def _note_registrations() -> None:
    """Has torch tell of registrations, from the first call on. A walk over all modules in each
    forward takes about half a microsecond a module."""
    register_module_parameter_registration_hook(_note)
    register_module_module_registration_hook(_note)


class JoiningParameters:
    """Looks for trainable parameters that are in a module now and were not when this was made.

    The module is held weakly."""

    def __init__(self, module: nn.Module) -> None:
        _note_registrations()
        self._root = weakref.ref(module)  # the module that was sharded
        # The names that parameters had. Another parameter of such a name has replaced one, which
        # the engine notices when it shows parameters.
        self._names: Collection[str] = {name for name, _ in module.named_parameters()}
        self._seen = _last  # the last registration when it was looked at

    def refuse(self) -> None:
        """RuntimeError if there are any: no rank would have the gradients of others."""
        module = self._root()
        if self._seen == _last or module is None:
            return
        found = []
        for name, param in module.named_parameters():
            is_sharded = hasattr(param, "_fsdp_label") or hasattr(param, "fsdp_layout_ref")
            if param.requires_grad and not is_sharded and name not in self._names:
                found.append(name)
        if found:
            raise RuntimeError(
                f"{len(found)} trainable parameters joined the model after it was sharded "
                f"({found[:4]}), so each rank would train its own. Add them before the model is "
                "sharded, or freeze them"
            )
        self._seen = _last
