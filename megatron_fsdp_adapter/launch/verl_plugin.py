"""The plugin that verl loads in its driver and in every worker (entry points of `verl.plugins`):
with it, `use_megatron_fsdp=True` trains on this package's wrapper.

verl loads plugins before Megatron, and logs their errors where they are not seen; its driver may
have no GPU. So importing this imports nothing of Megatron or verl. It replaces the function of verl
that builds a model, as soon as verl has imported its module. The replacement calls `install()` if
the wrapper is asked for, so an error of `install()` is raised where the model is built.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..megatron.compat import patches
from ..megatron.compat.table import VERL
from .installation import install


def build(original: Callable[..., Any], wrap_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds and wraps a model, after `install()` if Megatron's FSDP wrapper is asked for."""
    if wrap_config.use_megatron_fsdp:
        install()
    return original(wrap_config, *args, **kwargs)


BUILD = patches.Patch(VERL, "make_megatron_module", build, parameters=("wrap_config, ...",))


class AfterImport(MetaPathFinder):
    """Calls `then` once, when the module `name` has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have for `name`, with a loader that calls `then` at its
        end; None for any other module. Python asks each finder of `sys.meta_path` for it."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # else `find_spec` below would ask this finder again
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def run(module: ModuleType) -> None:
                execute(module)
                self.then()

            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


if VERL in sys.modules:
    patches.install([BUILD])
else:
    sys.meta_path.insert(0, AfterImport(VERL, lambda: patches.install([BUILD])))
