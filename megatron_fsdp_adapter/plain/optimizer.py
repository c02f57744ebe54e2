"""Optimizers over the parameters of sharded models: their step on this rank's rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..build.shard_attributes import engines_behind, params_of
from ..optim.local_shards import INNER, LocalShards, UpdateRule
from ..optim.muon.torch_muon import is_torch_muon, torch_muon
from ..optim.residency import OFFLOAD_OPTION, Residency
from ..optim.step import adopt, end_step
from .fsdp2_model import make_engines
from .user_loop import UserLoopEngine

NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "SparseAdam")
"""Optimizers of torch whose step needs whole tensors, and not only their rows."""


def _engines_of(params: Sequence[torch.Tensor]) -> list[UserLoopEngine]:
    """The engines that an optimizer's parameters belong to; ValueError if some are of none."""
    if any(getattr(param, "__fsdp_param__", False) for param in params):
        raise ValueError(
            "optimizer: parameters of FullyShardedDataParallel require Megatron's optimizer. Use "
            "get_megatron_optimizer"
        )
    foreign = sum(not hasattr(param, "_fsdp_engine") for param in params)
    if foreign or not params:
        raise ValueError(
            f"optimizer: {foreign} of its {len(params)} parameters are not from a "
            "sharded model. Make it from fully_shard_model(...).parameters()"
        )
    split = sum(not hasattr(param, "fsdp_layout_ref") for param in params)
    if split:
        raise ValueError(
            f"optimizer: {split} of its parameters are also split over ranks of tensor "
            "parallelism, split by another dim than the first, or gathered by functions of their "
            "own, which fully_shard_optimizer does not support. Use the optimizer as it is"
        )
    return engines_behind(params)


def _engines_now(optimizer: Any) -> list[UserLoopEngine]:
    """The engines of the parameters that the groups have now. ValueError if some are of none."""
    # The engines were looked up for the pairs `known`.
    known, engines = optimizer._fsdp_engines
    shards: LocalShards = optimizer._fsdp_shards
    shards.follow_groups(optimizer)
    if shards.pairs is not known:
        engines = _engines_of(params_of(optimizer))
        optimizer._fsdp_engines = shards.pairs, engines
    return engines


def _complete_gradients(optimizer: Any) -> None:
    """Finishes gradients before a step."""
    for engine in _engines_now(optimizer):
        engine.complete_grads()
        engine.to_sharded()


def _weights_changed(optimizer: Any, *unused: Any) -> None:
    """Marks gathered weights stale after a step."""
    for engine in _engines_now(optimizer):
        engine.main_weights_changed(stepped=True)


def _zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
    """Forgets the gradients of this optimizer's parameters, with either `set_to_none`."""
    end_step(optimizer)
    params = params_of(optimizer)
    for engine in _engines_now(optimizer):
        engine.zero_grads_of(params)


@functools.cache
def _training_class(base: type) -> type:
    """A subclass of an adopted optimizer's class, with methods for which torch has no hooks."""

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        base.add_param_group(self, param_group)  # type: ignore[attr-defined]
        try:
            _engines_of(params_of(self))
        except ValueError:
            self.param_groups.pop()  # the base class has added it
            raise

    return type(
        base.__name__, (base,), {"zero_grad": _zero_grad, "add_param_group": add_param_group}
    )


def _rule_for(optimizer: torch.optim.Optimizer, engines: Sequence[UserLoopEngine]) -> UpdateRule:
    """The rule by which `optimizer` steps on shards. ValueError if it cannot step on any."""
    kind = type(optimizer)
    if is_torch_muon(kind):
        if any(engine.config.offload for engine in engines):
            raise ValueError(
                f"optimizer={kind.__name__} with {OFFLOAD_OPTION}=True: only Adam is "
                "supported. Use "
                "AdamW, or set it to False"
            )
        return torch_muon(engines)
    if kind.__name__ in NOT_ELEMENTWISE or issubclass(kind, torch.optim.Muon):
        raise ValueError(
            f"optimizer={kind.__name__}: its step needs whole tensors, but shards are rows. Use "
            "torch.optim.Muon itself, or an elementwise one (Adam, AdamW, SGD, ...)"
        )
    return INNER


def fully_shard_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes an optimizer step on the shards of this rank, without DTensor's overhead.

    Its parameters may be those of several models. `fully_shard_model` needs this call. For a model
    of `fully_shard` it is optional, and halves the host's time for a step of the optimizer.
    `torch.optim.Muon` then computes each matrix on one of the ranks that share it. `zero_grad`
    frees gradients of this optimizer's parameters.

    If gradients have another dtype than main weights, a step copies them to the dtype of the
    weights, as torch's optimizers require. Step hooks see DTensors if they were registered before
    this call, and local shards otherwise.

    Examples:
        >>> model = fully_shard_model(nn.Linear(8, 4, bias=False))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> optimizer = fully_shard_optimizer(optimizer)
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> optimizer.step()
        >>> moment = optimizer.state[model.module.weight]["exp_avg"]
        >>> moment.shape, moment.to_local().shape  # on each of two ranks
        (torch.Size([4, 8]), torch.Size([2, 8]))

    Args:
        optimizer: one of torch's, or a subclass, whose step is elementwise, or Muon.

    Returns:
        The same object.

    Raises:
        ValueError: parameters that are not sharded, here or in a later `add_param_group`. An
            optimizer that is sharded already, or whose step needs whole tensors. Muon with main
            weights in host memory.
    """
    if hasattr(optimizer, "_fsdp_engines"):
        raise ValueError("optimizer: sharded already. Call fully_shard_optimizer once for it")
    make_engines(params_of(optimizer))
    engines = _engines_of(params_of(optimizer))
    rule = _rule_for(optimizer, engines)
    # The user may read weights after a step without asking the engine.
    adopt(optimizer, _complete_gradients, rule, Residency(engines, optimizer, readers_ask=False))
    optimizer._fsdp_engines = None, engines  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(_weights_changed)
    optimizer.__class__ = _training_class(type(optimizer))  # type: ignore[assignment,arg-type]
    return optimizer
