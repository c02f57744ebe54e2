"""Errors for operations that a module over flat buffers does not support: copies, pickles and
compilation."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable
def _raise_under_compilation() -> None:
    """Raises. `torch.compiler.disable` makes the compiler break its graph here and run this call:
    an error during tracing would only make it run the module without a graph."""
    raise RuntimeError(
        "torch.compile of a wrapped model: gathers change storage, which a compiled graph does "
        "not track. Compile layers of a model for fully_shard_model, or functions of Megatron's "
        "layers."
    )


def refuse_compilation() -> None:
    """Raises RuntimeError if torch.compile is tracing the caller."""
    if torch.compiler.is_compiling():
        _raise_under_compilation()


class NotCopyable:
    """Refuses copies and pickles, which could not share flat buffers and process groups."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(self._why_not("copy.deepcopy (as by AveragedModel of torch.optim)"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(self._why_not("pickle (as by torch.save of the module)"))

    def _why_not(self, what: str) -> str:
        return (
            f"{what} of a {type(self).__name__}: its weights are views of flat buffers of process "
            "groups and cannot be copied. Copy or save model.state_dict(), and load it into "
            "another wrapped module for a second model"
        )
