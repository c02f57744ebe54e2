"""The inner wrapper, at the depth where Megatron's checkpoint code looks for it; the buffer object
that both wrappers show to Megatron's optimizer; and which of a model's chunks are ours."""

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
    """Empty: Megatron reads it only to find quantized parameters, which it need not know."""

    def __init__(
        self, engine: FsdpEngine, slots: RegisteredMemory | None, use_decoupled_grad: bool
    ) -> None:
        self._engine = engine
        self._slots = slots  # the memory of fixed buffers, if it is registered with NCCL
        self.use_decoupled_grad = use_decoupled_grad  # as configured; both names hold the gradient

    def copy_main_weights_to_model_weights(self) -> None:
        """Tells the engine that the optimizer has stepped and gathered weights are outdated.

        Nothing is copied here. The next gather casts main weights straight into its buffer, and
        quantized weights are made when the next pass begins.

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
        """Releases the memory of weights, of gradients, or of both, as core's buffers do; see
        `release_memory`."""
        release(self._engine, _kinds(move_params, move_grads), {})

    def reload_from_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Takes back the memory that `offload_to_cpu` released."""
        take_back(self._engine, _kinds(move_params, move_grads))

    def manual_buffer_registration(self) -> None:
        """Registers fixed buffers with NCCL, all at once. With `fsdp_manual_registration` Megatron
        calls this after the first step; without registered memory it does nothing."""
        if self._slots is not None:
            self._slots.register()


def _kinds(weights: bool, gradients: bool) -> list[str]:
    """Names of the kinds of buffers that hold weights, gradients, or both."""
    kinds = []
    if weights:
        kinds += [MAIN_WEIGHTS, COMPUTE_WEIGHTS]
    if gradients:
        kinds.append(GRADIENTS)
    return kinds


class ShardedModule(ShardedStateDict, MegatronModule):
    """The inner wrapper: state dicts of sharded weights, and the entry of every forward pass.

    param_and_grad_buffer: the same object as the outer wrapper's. Megatron's own inner wrapper has
    one too.
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
        """The `checkpoint_state_dict`, with a prefix. Megatron would now split SwiGLU weights and
        number experts; in this state both are done, and it finds nothing to do."""
        state = self.checkpoint_state_dict(keep_vars)
        return {prefix + key: value for key, value in state.items()}

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """RuntimeError: only `torch_dist` needs it, which cannot describe these shards."""
        raise RuntimeError(
            "sharded_state_dict: the torch_dist format cannot represent row-wise flat shards. "
            "Save with ckpt_format='fsdp_dtensor'"
        )

    def install_optimized_model_weights(self) -> None:
        """Tells the engine that main weights were written from outside, so that compute weights
        follow."""
        self.engine.main_weights_changed(loaded=True)


ModelChunks = Sequence[Any]
"""Model chunks that are ours."""


def ours_among(chunks: Sequence[Any]) -> list[Any]:
    """The model chunks that our wrapper holds."""
    return [chunk for chunk in chunks if isinstance(getattr(chunk, "module", None), ShardedModule)]


def our_chunks(optimizer: Any) -> list[Any]:
    """The model chunks of one of core's optimizers that our wrapper holds."""
    return ours_among(getattr(optimizer, "model_chunks", None) or [])


def for_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement for a method of core's optimizer. If the optimizer has chunks of our wrapper,
    it calls `function` with these and then the call's own arguments; else the original."""

    @functools.wraps(function)
    def chosen(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = our_chunks(self)
        if not ours:
            return original(self, *args, **kwargs)
        return function(ours, self, *args, **kwargs)

    return chosen
