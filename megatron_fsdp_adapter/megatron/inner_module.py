"""The inner wrapper, at the depth where Megatron's checkpoint code looks for it, and what both
wrappers show to Megatron's optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import nn

from ..core.comm.registered import RegisteredMemory
from ..core.engine.buffer import COMPUTE_WEIGHTS, GRADIENTS, MAIN_WEIGHTS
from ..core.engine.engine import FsdpEngine
from ..rollout.release import release, take_back
from ..state.not_copyable import refuse_compilation
from ..state.sharded_state_dict import ShardedStateDict
from .compat.patches import Original


class ParamAndGradBuffer:
    """The object behind `param_and_grad_buffer`, with what Megatron's optimizer calls on it."""

    parameter_groups: tuple[()] = ()
    """Read only to find quantized parameters, of which core need not know."""

    def __init__(
        self, engine: FsdpEngine, slots: RegisteredMemory | None, use_decoupled_grad: bool
    ) -> None:
        self._engine = engine
        self._slots = slots  # the memory of fixed buffers, if it is registered with NCCL
        self.use_decoupled_grad = use_decoupled_grad  # as asked for: both names hold the gradient

    def copy_main_weights_to_model_weights(self) -> None:
        """The optimizer has stepped: gathered weights are outdated. The cast itself happens in
        the next gather, straight into the gather buffer; quantized weights are made when the next
        pass begins.

        Raises:
            RuntimeError: the step is captured in a CUDA graph, whose replays would not do this.
        """
        if self._engine.runtime.is_capturing():
            raise RuntimeError(
                "optimizer.step() in a CUDA graph: its replays would leave gathered weights "
                "stale. Take the step outside of the graph."
            )
        self._engine.main_weights_changed(stepped=True)

    def offload_to_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Calls `release_memory` for weights, and for gradients, as core's buffers do."""
        release(self._engine, _kinds(move_params, move_grads), {})

    def reload_from_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """`return_memory` of the same."""
        take_back(self._engine, _kinds(move_params, move_grads))

    def manual_buffer_registration(self) -> None:
        """Registers fixed buffers with NCCL, all at once, where that was left for after the first
        step (`fsdp_manual_registration`)."""
        if self._slots is not None:
            self._slots.register()


def _kinds(weights: bool, gradients: bool) -> list[str]:
    kinds = []
    if weights:
        kinds += [MAIN_WEIGHTS, COMPUTE_WEIGHTS]
    if gradients:
        kinds.append(GRADIENTS)
    return kinds


class ShardedModule(ShardedStateDict, MegatronModule):
    """The inner wrapper: state dicts of sharded weights, and the entry of every forward pass.

    param_and_grad_buffer: the outer wrapper's, which Megatron's own inner wrapper has too.
    """

    param_and_grad_buffer: ParamAndGradBuffer

    def __init__(self, config: Any, module: nn.Module, engine: FsdpEngine) -> None:
        super().__init__(config=config)
        self.module = module
        self.engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; its hooks gather and reshard. RuntimeError under torch.compile."""
        refuse_compilation()
        return self.module(*args, **kwargs)

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """`checkpoint_state_dict`. Megatron's own split of SwiGLU and numbering of experts, which
        it applies to this, then find nothing left to do."""
        state = self.checkpoint_state_dict(keep_vars)
        return {prefix + key: value for key, value in state.items()}

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Only for `torch_dist`, which cannot describe these shards."""
        raise RuntimeError(
            "sharded_state_dict: the torch_dist format cannot represent row-wise flat shards. "
            "Save with ckpt_format='fsdp_dtensor'"
        )

    def install_optimized_model_weights(self) -> None:
        """Main weights were written from outside: compute weights follow."""
        self.engine.main_weights_changed(loaded=True)


ModelChunks = Sequence[Any]
"""Model chunks that are ours."""


def ours_among(chunks: Sequence[Any]) -> list[Any]:
    """The model chunks that our wrapper holds."""
    return [chunk for chunk in chunks if isinstance(getattr(chunk, "module", None), ShardedModule)]


def our_chunks(optimizer: Any) -> list[Any]:
    """The model chunks of one of core's optimizers that are ours."""
    return ours_among(getattr(optimizer, "model_chunks", None) or [])


def for_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement for a method of core's optimizer: `function`, given the model chunks of this
    package in front of the call's own arguments, where there are such; else the original."""

    @functools.wraps(function)
    def chosen(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = our_chunks(self)
        if not ours:
            return original(self, *args, **kwargs)
        return function(ours, self, *args, **kwargs)

    return chosen
