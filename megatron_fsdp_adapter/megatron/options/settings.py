"""Options that follow from others, one row for each, for every entry point, and the printed table
of changes with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .rules import Joined, is_on
from .support import CORES_OFFLOAD, streams_all
from .table import (
    ELASTIC,
    GRAD_COMM,
    MAIN_GRADS,
    OFFLOAD,
    STRATEGY,
    TRANSPOSES,
    VERSION,
    strategies_of,
)

WRAPPER = "wrapper"
OPTIMIZER = "optimizer"
RUNNER = "runner"
RECIPE = "recipe"
"""Entry points: configs passed to the wrapper, the config passed to core's optimizer, a command
line of Megatron-LM, a recipe of Megatron-Bridge."""

CKPT_FORMAT = "fsdp_dtensor"
FP8_PARAM = "fp8_param"
FP8_PARAM_GATHER = "fp8_param_gather"
"""The model config's option for quantized weights, and the DDP config's option to gather them
quantized. Core 0.19 and later reads the second in its DDP: without it quantized weights are never
updated. Here the model's weights decide."""
MXFP8_BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
"""Core's DDP gathers bf16 weights into the memory of gradients before it makes MXFP8 weights. Here
bytes are gathered. With this option core's optimizer would not notify this wrapper of a step."""
CORES_LATE_STEP = "overlap_param_gather_with_optimizer_step"


@dataclass(frozen=True)
class Change:
    """An option or environment variable that was set, its old and new value, and the reason."""

    option: str
    before: Any
    after: Any
    reason: str


@dataclass(frozen=True)
class Setting:
    """An option that follows from others.

    Attributes:
        section: the config that has it: "ddp", "optimizer", another section of a recipe, or "run"
            for arguments of Megatron-LM.
        option: its name.
        value: the value to set.
        reason: text for the table.
        ways: the entry points that set it.
        when: a predicate of all joined configs: whether to set it.
        is_void: the option has no meaning here. So it is set even if the command line has it.
        written_as: its flag; empty: its name with dashes.
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
        """The option's name at one entry point."""
        if way == RUNNER:
            return self.flag
        if way == RECIPE:
            return f"{self.section}.{self.option}"
        return self.option


def _shards(field: str) -> Callable[[Any], bool]:
    """A predicate of configs: `field` (`shard_grads`, for example) of any strategy is True."""

    def shards(config: Any) -> bool:
        return any(getattr(row, field) for row in strategies_of(config))

    return shards


def is_narrow(config: Any) -> bool:
    """True if gradients are not communicated in float32."""
    return getattr(config, GRAD_COMM, None) not in (None, torch.float32)


def _has_bf16_gradients(args: Any) -> bool:
    """True if --bf16 is set with a bf16 gradient dtype. From 0.17 on dtypes are names until
    arguments are validated."""
    chosen = [getattr(args, option, None) for option in (MAIN_GRADS, GRAD_COMM)]
    return is_on(args, "bf16") and any(one in (torch.bfloat16, "bf16") for one in chosen)


def _saves_asynchronously(args: Any) -> bool:
    """True if --async-save is set in a release that supports it with `fsdp_dtensor`; others are
    rejected elsewhere."""
    return is_on(args, "async_save") and hasattr(args, "async_strategy")


_NO_BUFFER = "quantized bytes are gathered, not weights in gradient memory"
_NONE_ON_CPU = "megatron-core would create an optimizer that updates on the CPU"

SETTINGS: tuple[Setting, ...] = (
    Setting("dist", "use_megatron_fsdp", True,
            "read by the launch code of Megatron-Bridge", (RECIPE,)),
    Setting("ddp", "use_megatron_fsdp", True,
            "read by the wrapper, the optimizer and checkpoints", (RECIPE,)),
    # Before it, as both would be refused beside each other.
    Setting("ddp", VERSION, 1,
            "this package has one engine, and needs no --no-gradient-accumulation-fusion",
            (RUNNER, RECIPE), lambda config: getattr(config, VERSION, 1) != 1, is_void=True),
    Setting("ddp", "use_distributed_optimizer", True,
            "the optimizer is Megatron's DistributedOptimizer", (WRAPPER, RUNNER, RECIPE)),
    Setting("optimizer", "use_distributed_optimizer", True,
            "the optimizer is Megatron's DistributedOptimizer", (OPTIMIZER, RECIPE)),
    Setting("checkpoint", "ckpt_format", CKPT_FORMAT,
            "the format of sharded weights; Megatron requires it even without --save",
            (RUNNER, RECIPE)),
    Setting("ddp", STRATEGY, "optim_grads_params",
            "the default of Megatron-LM main", (RUNNER,)),
    Setting("ddp", "overlap_grad_reduce", True,
            "sharded gradients are reduced as each unit's backward ends",
            (WRAPPER, RUNNER, RECIPE), _shards("shard_grads")),
    Setting("ddp", "overlap_param_gather", True,
            "sharded weights are gathered during the forward of the previous unit",
            (WRAPPER, RUNNER, RECIPE), _shards("shard_weights")),
    Setting("ddp", "average_in_collective", False,
            "Megatron-Bridge rejects True; gradients are scaled after the reduction", (RECIPE,)),
    Setting("ddp", FP8_PARAM_GATHER, True, "the model has quantized weights", (WRAPPER,),
            lambda config: is_on(config, FP8_PARAM)),
    Setting("ddp", MXFP8_BUFFER, False, _NO_BUFFER, (WRAPPER, RUNNER, RECIPE), is_void=True),
    Setting("optimizer", MXFP8_BUFFER, False, _NO_BUFFER, (OPTIMIZER, RECIPE)),
    Setting("ddp", TRANSPOSES, False, "transposes would be an unsharded copy of the weights",
            (WRAPPER,), _shards("shard_weights")),
    Setting("ddp", GRAD_COMM, torch.bfloat16,
            "requested by --grad-reduce-in-bf16; gradients still accumulate in float32", (RUNNER,),
            lambda args: is_on(args, "grad_reduce_in_bf16")),
    Setting("run", "grad_reduce_in_bf16", True,
            "--bf16 alone implies float32 gradients, but other flags request bf16", (RUNNER,),
            _has_bf16_gradients, written_as="--accumulate-allreduce-grads-in-fp32"),
    Setting("ddp", "grad_reduce_in_fp32", False,
            f"True means float32, but {GRAD_COMM} is another dtype", (RECIPE,), is_narrow),
    Setting("mixed_precision", "grad_reduce_in_fp32", False,
            "True would overwrite ddp.grad_reduce_in_fp32", (RECIPE,), is_narrow),
    Setting("ddp", OFFLOAD, True,
            f"this wrapper's form of {CORES_OFFLOAD}: main weights and moments in host memory, "
            "updated on the GPU", (RUNNER, RECIPE), streams_all),
    Setting("optimizer", OFFLOAD, False, "the DDP config's field is used", (OPTIMIZER,)),
    Setting("run", "overlap_cpu_optimizer_d2h_h2d", False,
            "copies overlap with updates and the next forward", (RUNNER,),
            streams_all, is_void=True),
    Setting("run", "use_torch_optimizer_for_cpu_offload", False,
            "nothing is updated on the CPU", (RUNNER,), streams_all, is_void=True),
    Setting("optimizer", CORES_OFFLOAD, False, _NONE_ON_CPU, (RUNNER, RECIPE),
            streams_all, is_void=True),
    Setting("optimizer", CORES_OFFLOAD, False, f"the DDP config's {OFFLOAD} is used", (OPTIMIZER,)),
    Setting("optimizer", CORES_LATE_STEP, False,
            "one optimizer has all parameters, and gathers overlap with the forward",
            (RUNNER,), is_void=True),
    Setting("run", "use_persistent_ckpt_worker", True,
            "else Megatron-LM 0.19 ignores --async-save; no worker is started, a thread writes",
            (RUNNER,), _saves_asynchronously),
    Setting("run", "async_strategy", "mcore",
            "nvrx needs a package that is not used: this package's writer replaces that of both "
            "strategies",
            (RUNNER,), _saves_asynchronously),
    Setting("run", "rerun_mode", "disabled",
            f"with {ELASTIC} a step is repeated by all replicas or by none",
            (RUNNER,), lambda args: is_on(args, ELASTIC), is_void=True),
)  # fmt: skip
"""Settings in order: later ones read values set by earlier ones."""


def settle(
    way: str,
    configs: Mapping[str, Any],
    settings: Iterable[Setting] = SETTINGS,
    is_written: Callable[[str], bool] = lambda flag: False,
) -> list[Change]:
    """Sets the options that follow from others, in place; returns the changes.

    Args:
        way: the entry point.
        configs: the configs by section; one may be None or missing.
        is_written: whether the command line has a flag, whose value is kept then.
    """
    changes = []
    for one in settings:
        config = configs.get(one.section)
        if way not in one.ways or config is None:
            continue
        if not one.when(Joined(*configs.values())):
            continue
        before = getattr(config, one.option, None)
        # An unset option counts as False.
        if (before or False) == one.value:
            continue
        if is_written(one.flag) and not one.is_void:
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
    width = max(len(option) for option, _, _ in rows)
    values_width = max(len(values) for _, values, _ in rows)
    lines = [title]
    for option, values, reason in rows:
        lines.append(f"  {option:<{width}}  {values:<{values_width}}  {reason}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
