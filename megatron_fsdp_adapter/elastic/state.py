"""The state of one rank of a replica, which the same rank of a joining replica takes over. It has
the rank's own rows of weights, so nothing is gathered.

torchft reads it in another thread, while a forward runs and modules show unsharded parameters. So
it is read from the sharded parameters and from `optimizer.state` themselves. Both change in the
optimizer's step alone, before which torchft lets its readers end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..core.dtensor.chunks import dtensor_like
from .facts import Facts, raise_differences

State = dict[str, Any]


class HasState(Protocol):
    """An object like a scheduler or a data loader."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class ReplicaState:
    """The state of this rank: main weights, buffers, optimizer state, random states and others.

    Args:
        models: their parameters must be the sharded ones now.
        others: objects whose state dicts are part of it, by name.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        others: Mapping[str, HasState],
        facts: Facts,
    ) -> None:
        self._models = models  # whose buffers are part of the state
        # Sharded ones, and those that no engine has.
        self._params = [param for model in models for param in model.parameters()]
        self._optimizer = optimizer  # steps on these
        self._others = others  # by name, whose state dicts are part of the state
        self._facts = facts  # replicas must have them in common
        self._snapshot: State = {}  # what a forward changes, as it was before the forward
        self.take_snapshot()

    def take_snapshot(self) -> None:
        """Copies what the next forward changes: random states, and buffers."""
        buffers = [buffer.clone() for buffer in self._buffers()]
        self._snapshot = {"random": _random_states(), "buffers": buffers}

    def restore_random_states(self) -> None:
        """Sets random states to those of the snapshot."""
        _set_random_states(self._snapshot["random"])

    def state_dict(self) -> State:
        """The state of this rank. Weights are no copies."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the optimizer's step, on another stream than the reader's
        return {
            "facts": self._facts,
            "weights": _storages(self._params),
            "optimizer": self._optimizer_state(),
            "others": {name: one.state_dict() for name, one in self._others.items()},
            **self._snapshot,
        }

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Takes over the state of the same rank of another replica.

        ReplicaRefused: that replica differs; nothing is written then.
        """
        raise_differences(state["facts"])
        for mine, given in zip(_storages(self._params), state["weights"], strict=True):
            mine.copy_(given)
        for buffer, given in zip(self._buffers(), state["buffers"], strict=True):
            buffer.copy_(given)
        self._load_optimizer_state(state["optimizer"])
        for name, one in self._others.items():
            one.load_state_dict(state["others"][name])
        _set_random_states(state["random"])
        self.take_snapshot()

    def _buffers(self) -> Iterator[torch.Tensor]:
        for model in self._models:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and name not in module._non_persistent_buffers_set:
                        yield buffer

    def _optimizer_state(self) -> State:
        """Options of each group, and state of each parameter: this rank's rows of what has the
        shape of the parameter, and other values."""
        groups = []
        rows: list[dict[str, torch.Tensor]] = []
        values: list[dict[str, Any]] = []
        # Kinds of devices of tensors in `values`: a transport may bring them to another one.
        devices: list[dict[str, str]] = []
        for group in self._optimizer.param_groups:
            groups.append({name: one for name, one in group.items() if name != "params"})
            for param in group["params"]:
                rows.append({})
                values.append({})
                devices.append({})
                for name, value in self._optimizer.state.get(param, {}).items():
                    if isinstance(value, DTensor):
                        rows[-1][name] = _own_storage(value._local_tensor)
                    else:
                        values[-1][name] = value
                        if isinstance(value, torch.Tensor):
                            devices[-1][name] = value.device.type
        return {"groups": groups, "rows": rows, "values": values, "devices": devices}

    def _load_optimizer_state(self, state: State) -> None:
        params = []
        for group, options in zip(self._optimizer.param_groups, state["groups"], strict=True):
            params += group["params"]
            for name, value in options.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
        given = zip(params, state["rows"], state["values"], state["devices"], strict=True)
        for param, rows, values, devices in given:
            entry: dict[str, Any] = {}
            for name, local in rows.items():
                own = local.to(param._local_tensor.device, copy=True)
                entry[name] = dtensor_like(param, own)
            for name, value in values.items():
                entry[name] = value
                if name in devices:
                    # Counts of steps are on the GPU if the optimizer is fused, else on the host.
                    is_on_host = devices[name] == "cpu"
                    there = getattr(param, "_local_tensor", param).device
                    entry[name] = value.to("cpu" if is_on_host else there, copy=True)
            if entry:
                self._optimizer.state[param] = entry
            else:
                self._optimizer.state.pop(param, None)


def _storages(params: Sequence[Any]) -> list[torch.Tensor]:
    """A flat tensor over each storage of the local tensors of `params`, each once, in order.

    A transport that sends the storage of a view would send a shared one for each parameter in it.
    """
    found = {}
    for param in params:
        local = getattr(param, "_local_tensor", param).detach()
        storage = local.untyped_storage()
        if storage.nbytes() and storage._cdata not in found:
            count = storage.nbytes() // local.element_size()
            found[storage._cdata] = local.as_strided((count,), (1,), 0)
    return list(found.values())


def _own_storage(local: torch.Tensor) -> torch.Tensor:
    """`local`, or a copy if its storage has more than it."""
    return local if local.untyped_storage().nbytes() == local.nbytes else local.clone()


def _random_states() -> State:
    states: State = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: State) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu())
