"""Steps of a replica that may die and come back.

manager = torchft.Manager(pg=torchft.ProcessGroupGloo(), load_state_dict=None, ...)
model = fully_shard_model(model, elastic=manager)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = elastic_optimizer(manager, fully_shard_optimizer(optimizer), model)
while manager.current_step() < STEPS:
    optimizer.zero_grad()
    model(batch(manager.current_step())).mean().backward()
    optimizer.step()
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..build.replicas import check_manager
from ..build.shard_attributes import engines_behind, params_of
from ..core.comm.managed import raise_refusal
from ..core.engine.engine import FsdpEngine
from ..elastic.facts import facts_of, set_own_facts
from ..elastic.state import HasState, ReplicaState
from .fsdp2_model import engine_of

_stepped: weakref.WeakSet[Any] = weakref.WeakSet()
"""Managers whose steps an `ElasticOptimizer` takes."""


class ElasticOptimizer(torch.optim.Optimizer):
    """An optimizer that steps only if all ranks of this replica have gradients of the whole step,
    like torchft's `OptimizerWrapper`.

    `zero_grad` begins a step, with a quorum of replicas; it must come before the forward. `step`
    leaves the step out if a replica died in it, or too few are there: weights and
    `manager.current_step()` stay, and the program goes on with the next `zero_grad`.
    """

    def __init__(self, manager: Any, optimizer: torch.optim.Optimizer, state: ReplicaState) -> None:
        # The base class is for schedulers, which ask for it. Its constructor would make groups.
        self.manager = manager  # torchft's
        self.optim = optimizer  # which steps
        self._replica_state = state  # what a replica that joins gets

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begins a step: asks for a quorum, and forgets gradients."""
        self._replica_state.take_snapshot()
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps if all ranks of this replica can. Finishes gradients before that: a reduction that
        fails after replicas have agreed would leave them with different weights.

        Raises:
            ValueError: with a closure.
            ReplicaRefused: this replica differs from the others.
        """
        if closure is not None:
            raise ValueError(
                f"closure={closure!r}: an elastic step cannot repeat a forward. Run the backward "
                "before step()"
            )
        for engine in engines_behind(params_of(self.optim)):
            engine.complete_grads()
        raise_refusal(self.manager)
        if self.manager.should_commit():
            self.optim.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    def __repr__(self) -> str:
        return f"ElasticOptimizer({self.optim!r})"


def elastic_optimizer(
    manager: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module | Sequence[nn.Module],
    **states: HasState,
) -> ElasticOptimizer:
    """Returns an optimizer for a job that is one of several replicas, which may die and come back.

    Collective: call it on all ranks of a replica. It tells torchft the state that a joining replica
    needs: main weights, optimizer state, persistent buffers, states of random number generators,
    and `states`. Each rank receives it from the same rank of another replica. Count steps with
    `manager.current_step()`. The guide of elastic training has a program.

    Args:
        manager: torchft's Manager, with which the model was sharded (`elastic=manager`).
        optimizer: an optimizer of the model's parameters. Call `fully_shard_optimizer` before, if
            the program uses it.
        model: a sharded model, or several.
        states: further objects with `state_dict` and `load_state_dict`, such as a scheduler.

    Raises:
        ValueError: `manager` is no Manager of torchft, was not given when the model was sharded, or
            has another elastic optimizer.
    """
    check_manager(manager)
    models = [model] if isinstance(model, nn.Module) else list(model)
    engines = [_engine_of(one) for one in models]
    if manager is None or any(_managers_of(engine) != {manager} for engine in engines):
        raise ValueError(
            f"manager={manager!r}: the model was sharded without it, so its gradients would stay "
            "those of this replica. Pass elastic=manager to fully_shard_model, or to all calls of "
            "fully_shard"
        )
    if manager in _stepped:
        raise ValueError(
            f"manager={manager!r}: it has an elastic optimizer, and torchft agrees on one step at "
            "a time. Put all parameters into groups of one optimizer"
        )
    _stepped.add(manager)
    facts = facts_of(engines, optimizer)
    state = ReplicaState(models, optimizer, states, facts)
    set_own_facts(facts)
    manager.register_state_dict_fn("megatron_fsdp_adapter", state.load_state_dict, state.state_dict)
    return ElasticOptimizer(manager, optimizer, state)


def _engine_of(model: Any) -> FsdpEngine:
    engine = getattr(model, "engine", None)
    return engine if isinstance(engine, FsdpEngine) else engine_of(model)


def _managers_of(engine: FsdpEngine) -> set[Any]:
    return {group.domain.manager for group in engine.groups}
