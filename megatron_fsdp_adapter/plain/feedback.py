"""Tells users of `fully_shard` how a model is sharded and, at exit, if none was.

Libraries may leave sharding out without a word, as accelerate does on a machine without a GPU. A
trial there says nothing about this package.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.engine.engine import FsdpEngine
from ..core.runtime.rank_warnings import warn
from ..core.topology import ShardDomain
from ..plan.unsharded_budget import GIB

NOTHING = (
    "megatron_fsdp_adapter: fully_shard is in the place of torch's, but nothing called it, and the "
    "program has trained without sharding. Configure FSDP2, and a GPU where a library asks for one"
)
"""The warning at exit."""

MIB = 2**20

_announced: weakref.WeakSet[FsdpEngine] = weakref.WeakSet()
"""Engines whose line was printed."""


def announce(root: nn.Module, engine: FsdpEngine) -> None:
    """Prints on rank 0 how the model `root` is sharded, in the first call for its engine."""
    if engine in _announced:
        return
    _announced.add(engine)
    if dist.get_rank() == 0:
        print(f"fully_shard: {described(root, engine)}", flush=True)


def described(root: nn.Module, engine: FsdpEngine) -> str:
    """Text with a model's class, units, ranks, bytes on this rank, and dtypes."""
    each = dict.fromkeys(_ranks(group.domain) for group in engine.groups)
    ranks = ", others over ".join(each)
    units = _counted(len(engine.units), "unit")
    here = 0
    whole = 0
    for pair in engine.pairs:
        here += pair.sharded.to_local().nbytes  # type: ignore[attr-defined]
        whole += pair.sharded.nbytes
    own = _listed(group.key.own_dtype for group in engine.groups)
    computed = _listed(group.key.dtype for group in engine.groups)
    trained = [group for group in engine.groups if group.key.requires_grad]
    reduced = _listed(group.config.policy.comm_dtype for group in trained)
    if any(group.config.policy.fp32_sums for group in trained):
        reduced += ", summed in float32"
    return (
        f"{type(root).__name__.removeprefix('FSDP')} has {units} over {ranks}, "
        f"{_part(here, whole)} of parameters on each; parameters in {own}, "
        f"compute in {computed}, gradients reduced in {reduced}"
    )


def _part(here: int, whole: int) -> str:
    """Text with two numbers of bytes, in a unit in which small models have digits too."""
    unit, name = (GIB, "GiB") if whole >= GIB / 10 else (MIB, "MiB")
    return f"{here / unit:.3f} of {whole / unit:.3f} {name}"


def _ranks(domain: ShardDomain) -> str:
    ranks = _counted(domain.axis.size, "rank")
    if domain.outer_size == 1:
        return ranks
    return f"{_counted(domain.outer_size, 'replica')} of {ranks}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _listed(dtypes: Iterable[torch.dtype]) -> str:
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    return " and ".join(sorted(names))


class _Door:
    """The process since `fully_shard` took the place of torch's."""

    def __init__(self) -> None:
        self.has_sharded = False  # whether `fully_shard` was called
        # Whether an optimizer has stepped, which none does in a launcher or a worker of its.
        self.has_stepped = False
        # Ends the notice of steps; None while torch's function is in its place.
        self.step_hook: Any = None

    def note_step(self, *_: Any) -> None:
        self.has_stepped = True

    def close(self) -> None:
        """Warns if this process has trained, and sharded nothing."""
        if self.has_stepped and not self.has_sharded:
            warn(NOTHING)


_door = _Door()


def expect_sharding() -> None:
    """Notes that `fully_shard` took the place of torch's."""
    if _door.step_hook is None:
        _door.step_hook = register_optimizer_step_post_hook(_door.note_step)
        atexit.register(_door.close)


def expect_nothing() -> None:
    """Notes that torch's function is back in its place."""
    if _door.step_hook is not None:
        _door.step_hook.remove()
        _door.step_hook = None
        atexit.unregister(_door.close)


def note_sharding() -> None:
    """Notes that `fully_shard` was called."""
    _door.has_sharded = True
