"""Options that follow from others, one row for each, for every way in; and the table that is
printed of what was set for the user, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .rules import Joined, is_on
from .support import CORES_OFFLOAD, streams_all
from .table import GRAD_COMM, MAIN_GRADS, OFFLOAD, STRATEGY, TRANSPOSES, strategy_of

WRAPPER, OPTIMIZER, RUNNER, RECIPE = "wrapper", "optimizer", "runner", "recipe"
"""Ways in: configs that are given to the wrapper, one that is given to core's optimizer, a command
line of Megatron-LM, a recipe of Megatron-Bridge."""

CKPT_FORMAT = "fsdp_dtensor"
FP8_PARAM, FP8_PARAM_GATHER = "fp8_param", "fp8_param_gather"
"""The option of a model config by which weights are made quantized, and that of the DDP config
which says that they are gathered so. Core from 0.19 on reads the second under its own DDP: without
it quantized weights are never written again. Here weights are what the model has."""
MXFP8_BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
"""Core's DDP lays out gathered MXFP8 weights in the memory of gradients, before it makes them. Here
bytes are gathered, so that there is nothing to lay out; core's optimizer would never tell this
wrapper about a step."""
CORES_LATE_STEP = "overlap_param_gather_with_optimizer_step"


@dataclass(frozen=True)
class Change:
    """An option or environment variable that was set, its value before and after, and the reason.

    `before` is None where there was no value.
    """

    option: str
    before: Any
    after: Any
    reason: str


@dataclass(frozen=True)
class Setting:
    """An option that follows from others.

    Attributes:
        section: of the configs of a way in: "ddp", "optimizer", other sections of a recipe, "run"
            for Megatron-LM's arguments.
        option: its name.
        value: what it is set to.
        reason: what the table says.
        ways: the ways in that set it.
        when: whether all configs, as one, ask for it.
        is_void: what it asks for does not exist here, and nothing is lost without it: it is set
            even where it is written on the command line.
        written_as: its flag there; by default its name with dashes.
    """

    section: str
    option: str
    value: Any
    reason: str
    ways: tuple[str, ...]
    when: Callable[[Any], Any] = lambda config: True
    is_void: bool = False
    written_as: str = ""

    @property
    def flag(self) -> str:
        return self.written_as or f"--{self.option.replace('_', '-')}"

    def named(self, way: str) -> str:
        """The option's name in one way in."""
        return {RUNNER: self.flag, RECIPE: f"{self.section}.{self.option}"}.get(way, self.option)


def _shards(what: str) -> Callable[[Any], bool]:
    return lambda config: bool(getattr(strategy_of(config), what, False))


def is_narrow(config: Any) -> bool:
    """Whether gradients are not communicated in float32."""
    return getattr(config, GRAD_COMM, None) not in (None, torch.float32)


def _has_bf16_gradients(args: Any) -> bool:
    """Megatron-LM asks for float32 gradients with --bf16 unless other flags contradict. From 0.17
    on dtypes are names until arguments are validated."""
    chosen = [getattr(args, option, None) for option in (MAIN_GRADS, GRAD_COMM)]
    return is_on(args, "bf16") and any(one in (torch.bfloat16, "bf16") for one in chosen)


def _saves_asynchronously(args: Any) -> bool:
    """In a release that can save `fsdp_dtensor` so; of others the flag is refused."""
    return is_on(args, "async_save") and hasattr(args, "async_strategy")


_NO_BUFFER = "bytes are gathered, and no weights are put where gradients are"
_NONE_ON_CPU = "megatron-core would make an optimizer that updates on the CPU"

SETTINGS: tuple[Setting, ...] = (
    Setting("dist", "use_megatron_fsdp", True,
            "one of the two switches: Megatron-Bridge's launch reads this one", (RECIPE,)),
    Setting("ddp", "use_megatron_fsdp", True,
            "the other: the wrapper, optimizer and checkpoints read this one", (RECIPE,)),
    Setting("ddp", "use_distributed_optimizer", True,
            "the optimizer is Megatron's DistributedOptimizer", (WRAPPER, RUNNER, RECIPE)),
    Setting("optimizer", "use_distributed_optimizer", True,
            "the same, as the optimizer reads it", (OPTIMIZER, RECIPE)),
    Setting("checkpoint", "ckpt_format", CKPT_FORMAT,
            "the format of sharded weights; Megatron asks for it even without --save",
            (RUNNER, RECIPE)),
    Setting("ddp", STRATEGY, "optim_grads_params",
            "the default of Megatron-LM main; 0.16.1's, no_shard, shards nothing", (RUNNER,)),
    Setting("ddp", "overlap_grad_reduce", True,
            "sharded gradients are reduced as each unit's backward ends",
            (WRAPPER, RUNNER, RECIPE), _shards("shard_grads")),
    Setting("ddp", "overlap_param_gather", True,
            "sharded weights are gathered under the forward of the unit in front",
            (WRAPPER, RUNNER, RECIPE), _shards("shard_weights")),
    Setting("ddp", "average_in_collective", False,
            "Megatron-Bridge refuses it; sums are scaled after the reduction", (RECIPE,)),
    Setting("ddp", FP8_PARAM_GATHER, True, "the model has quantized weights", (WRAPPER,),
            lambda config: is_on(config, FP8_PARAM)),
    Setting("ddp", MXFP8_BUFFER, False, _NO_BUFFER, (WRAPPER, RUNNER, RECIPE), is_void=True),
    Setting("optimizer", MXFP8_BUFFER, False, _NO_BUFFER, (OPTIMIZER, RECIPE)),
    Setting("ddp", TRANSPOSES, False, "weights are sharded, and transposes would be whole",
            (WRAPPER,), _shards("shard_weights")),
    Setting("ddp", GRAD_COMM, torch.bfloat16,
            "what --grad-reduce-in-bf16 asks for; gradients still accumulate in float32", (RUNNER,),
            lambda args: is_on(args, "grad_reduce_in_bf16")),
    Setting("run", "grad_reduce_in_bf16", True,
            "else --bf16 asks for float32 gradients, which other flags contradict", (RUNNER,),
            _has_bf16_gradients, written_as="--accumulate-allreduce-grads-in-fp32"),
    Setting("ddp", "grad_reduce_in_fp32", False,
            f"it asks for float32, and {GRAD_COMM} for another", (RECIPE,), is_narrow),
    Setting("mixed_precision", "grad_reduce_in_fp32", False, "from there it would be set again",
            (RECIPE,), is_narrow),
    Setting("ddp", OFFLOAD, True,
            f"what {CORES_OFFLOAD} asks for: main weights and moments in host memory, streamed "
            "through the GPU, which updates them", (RUNNER, RECIPE), streams_all),
    Setting("optimizer", OFFLOAD, False, "it is the DDP config's here", (OPTIMIZER,)),
    Setting("run", "overlap_cpu_optimizer_d2h_h2d", False,
            "copies overlap with updates and the next forward", (RUNNER,),
            streams_all, is_void=True),
    Setting("run", "use_torch_optimizer_for_cpu_offload", False,
            "nothing is updated on the CPU", (RUNNER,), streams_all, is_void=True),
    Setting("optimizer", CORES_OFFLOAD, False, _NONE_ON_CPU, (RUNNER, RECIPE),
            streams_all, is_void=True),
    Setting("optimizer", CORES_OFFLOAD, False, "it is the DDP config's here", (OPTIMIZER,)),
    Setting("optimizer", CORES_LATE_STEP, False,
            "one optimizer has all parameters here, and gathers overlap with the forward",
            (RUNNER,), is_void=True),
    Setting("run", "use_persistent_ckpt_worker", True,
            "else 0.19 drops --async-save; a thread of the trainer writes, and no worker is "
            "started", (RUNNER,), _saves_asynchronously),
    Setting("run", "async_strategy", "mcore",
            "else a package is asked for that is not needed: either strategy's writer is replaced",
            (RUNNER,), _saves_asynchronously),
)  # fmt: skip
"""In this order: later ones read what earlier ones set."""


def settle(
    way: str,
    configs: Mapping[str, Any],
    settings: Iterable[Setting] = SETTINGS,
    is_written: Callable[[str], bool] = lambda flag: False,
) -> list[Change]:
    """Sets in the configs what follows, and is not so. configs: by section; is_written: whether
    the user wrote a flag. What was written is not overwritten."""
    changes = []
    for one in settings:
        config = configs.get(one.section)
        if way not in one.ways or config is None or not one.when(Joined(*configs.values())):
            continue
        before = getattr(config, one.option, None)
        if (before or False) == one.value or (is_written(one.flag) and not one.is_void):
            continue
        setattr(config, one.option, one.value)
        changes.append(Change(one.named(way), before, one.value, one.reason))
    return changes


def format_changes(title: str, changes: Iterable[Change]) -> str:
    """A title line and one aligned line for each change; "nothing to set" if there is none."""
    rows = [
        (change.option, f"{_shown(change.before)} -> {_shown(change.after)}", change.reason)
        for change in changes
    ]
    if not rows:
        return f"{title}: nothing to set"
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [
        f"  {option:<{widths[0]}}  {values:<{widths[1]}}  {reason}"
        for option, values, reason in rows
    ]
    return "\n".join([title, *lines])


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
