"""The state that a joining replica takes over beside weights and optimizer state: Megatron-LM's
counts, its scheduler, and generators of random numbers. And the arguments that replicas must have
in common."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker

COUNTS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
"""Arguments of Megatron-LM in which its loop counts. `iteration` is torchft's step."""


class Counts:
    """The samples that the run has taken."""

    def __init__(self, args: Any) -> None:
        self._args = args  # Megatron-LM's, which its loop changes

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self._args, name) for name in COUNTS if hasattr(self._args, name)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        vars(self._args).update(state)


class Schedule:
    """The position of core's scheduler of learning rate and weight decay. Its own `load_state_dict`
    adds to the position, and compares options, which replicas have in common."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler  # core's

    def state_dict(self) -> int:
        return int(self._scheduler.num_steps)

    def load_state_dict(self, position: int) -> None:
        self._scheduler.num_steps = position
        self._scheduler.step(increment=0)


class Generators:
    """Core's generators of random numbers that tensor-parallel ranks draw apart."""

    def state_dict(self) -> dict[str, Any]:
        return dict(get_cuda_rng_tracker().get_states())

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        on_host = {name: state.cpu() for name, state in states.items()}
        get_cuda_rng_tracker().set_states(on_host)


_OWN = (
    "async_", "auto_detect", "ckpt_", "curr_iteration", "data_cache", "dist_ckpt", "distributed_",
    "enable_one_logger", "exit_", "iteration", "load", "local_rank", "log_", "logging", "master_",
    "mlflow_", "non_persistent", "num_floating", "num_workers", "one_logger", "profile", "rank",
    "retro_", "save", "tensorboard", "timing", "wandb", *COUNTS,
)  # fmt: skip
"""Beginnings of names of arguments that a replica may have for itself."""
_SIMPLE = (bool, int, float, str, type(None))


def shared_arguments(args: Any) -> dict[str, str]:
    """The arguments that must be those of all replicas, by flag. Only plain values are
    compared."""
    found = {}
    for name, value in vars(args).items():
        entries = value if isinstance(value, list | tuple) else [value]
        if name.startswith(_OWN) or not all(isinstance(one, _SIMPLE) for one in entries):
            continue
        found[f"--{name.replace('_', '-')}"] = repr(value)
    return found


def code_of(*modules: Any) -> str:
    """A digest of the source files below the folders of packages."""
    total = hashlib.blake2b(digest_size=8)
    for module in modules:
        for folder in module.__path__:
            for path in sorted(Path(folder).rglob("*.py")):
                total.update(str(path.relative_to(folder)).encode())
                total.update(path.read_bytes())
    return total.hexdigest()
