"""The arguments of Megatron-LM: main's flags for a parser that lacks them, and what follows from
`--use-megatron-fsdp`.

The hook is at `megatron.training.arguments`: `add_megatron_arguments` gets the missing flags, and
what `parse_args` returns is completed and checked before Megatron validates it. Rewriting the
command line was turned down: it knows neither defaults nor types, and what was set would not be
among the arguments that Megatron prints and saves.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..core.config import STRATEGIES
from ..megatron.compat import patches, releases
from ..megatron.compat.patches import Patch
from ..megatron.options import capability, cuda_graphs, layer_graphs
from ..megatron.options.ddp_options import MXFP8_BUFFER, OFFLOAD
from ..megatron.options.settings import Change, format_changes
from ..megatron.options.support import CORES_OFFLOAD, EMERGING, MODEL_CONFIG_RULES, streams_all
from ..megatron.options.validation import (
    CKPT_FORMAT,
    CONNECTIONS,
    DTYPES,
    launch_options,
    launch_problems,
)

CORES_LATE_STEP = "overlap_param_gather_with_optimizer_step"
FSDP_FLAG = "--use-megatron-fsdp"
ARGUMENTS = "megatron.training.arguments"
GPU = torch.device("cuda")
SECONDS_FOR_RANK_0 = 60.0
REPORT = "TORCHELASTIC_ERROR_FILE"
"""Names the file that torchrun reads a rank's error from, to print it last."""
NO_GPU = (
    "there is no CUDA device, and Megatron-LM's own arguments ask one for its capability; without "
    "a GPU, train with scripts/pretrain_gpt.py, or prove this command line with `python -m "
    "megatron_fsdp_adapter doctor --prove`"
)


@dataclass(frozen=True)
class Flag:
    """A flag of Megatron-LM main, as `argparse` takes it."""

    name: str
    default: Any
    help: str
    type: Callable[[str], Any] = str
    is_switch: bool = False

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        if self.is_switch:
            parser.add_argument(self.name, action="store_true", help=self.help)
        else:
            parser.add_argument(self.name, type=self.type, default=self.default, help=self.help)


def _dtype(name: str) -> torch.dtype | None:
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]


MAIN_FLAGS: tuple[Flag, ...] = (
    Flag("--megatron-fsdp-version", 1, "generation of wrappers; only 1 is supported", type=int),
    Flag(
        "--megatron-fsdp-main-params-dtype", torch.float32,
        "dtype of the weights that the optimizer updates", type=_dtype,
    ),
    Flag(
        "--megatron-fsdp-main-grads-dtype", None, "dtype in which gradients accumulate",
        type=_dtype,
    ),
    Flag(
        "--megatron-fsdp-grad-comm-dtype", None, "dtype of gradients on the wire", type=_dtype
    ),
    Flag(
        "--megatron-fsdp-enable-fine-grained-param-gather", False,
        "parts of a layer's experts are gathered by themselves", is_switch=True,
    ),
    Flag(
        "--megatron-fsdp-max-pool-double-buffer", False,
        "nothing to do: slots are sized by the largest unit", is_switch=True,
    ),
    Flag(
        "--fsdp-db-use-persist-buf-on-alloc-fail", False,
        "nothing to do: slots are sized by the largest unit", is_switch=True,
    ),
    Flag(
        "--fsdp-copy-engine-all-gather", False,
        "weights are gathered by the GPUs' copy engines (docs/performance.md)", is_switch=True,
    ),
    Flag(
        "--fsdp-unsharded-budget-gib", 0.0,
        "GiB of each GPU for weights and gradients that stay whole over the microbatches of a step "
        "(docs/design.md)", type=float,
    ),
    Flag(
        "--fsdp-grad-comm-fp8-blocks", False,
        "refused: --grad-reduce-in-bf16 makes gradients smaller on the wire", is_switch=True,
    ),
    Flag(
        "--chunked-optimizer-state-offload", False,
        "main weights and moments in host memory, updated on the GPU unit by unit "
        "(docs/optimizer_offload.md)", is_switch=True,
    ),
    Flag(
        "--outer-dp-sharding-strategy", "no_shard",
        "no_shard or optim: how optimizer instances share main weights and optimizer state",
    ),
    Flag(
        "--create-all-gather-group", False, "communicators of their own for gathers",
        is_switch=True,
    ),
)  # fmt: skip
"""Flags that some release of Megatron-LM lacks, and some of our own: added where they are missing.
Their fields of the DDP config are in `ddp_config.py`."""


@dataclass(frozen=True)
class Setting:
    """An argument that follows from `--use-megatron-fsdp` and others.

    Attributes:
        option: its name among the parsed arguments.
        flag: how it is written on the command line. What the user wrote is never overwritten,
            unless it asks for what there is not.
        value: what it is set to, from the arguments.
        when: whether there is need.
        reason: what the table says.
        is_void: what it asks for does not exist here, and nothing is lost without it.
    """

    option: str
    flag: str
    value: Callable[[Any], Any]
    when: Callable[[Any], bool]
    reason: str
    is_void: bool = False


def _always(args: Any) -> bool:
    return True


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda args: value


def _strategy_has(what: str) -> Callable[[Any], bool]:
    """Whether the strategy's row of `STRATEGIES` says so; False for a name that is unknown."""
    return lambda args: bool(
        getattr(STRATEGIES.get(args.data_parallel_sharding_strategy), what, False)
    )


def _fusion_is_refused(args: Any) -> bool:
    """It is on by default in Megatron-LM: whoever did not switch it off did not ask for it."""
    return any(rule.option == "gradient_accumulation_fusion" for rule in MODEL_CONFIG_RULES)


def _offloads_by(option: str) -> Callable[[Any], bool]:
    return lambda args: streams_all(args) and bool(getattr(args, option, False))


def _reduces_in_bf16(args: Any) -> bool:
    return bool(getattr(args, "grad_reduce_in_bf16", False))


def _has_bf16_gradients(args: Any) -> bool:
    """Megatron-LM asks for float32 gradients with --bf16 unless it is told otherwise."""
    options = launch_options(args)  # from 0.17 on dtypes are names until arguments are validated
    chosen = [
        getattr(options, f"megatron_fsdp_{name}_dtype", None)
        for name in ("main_grads", "grad_comm")
    ]
    return bool(getattr(args, "bf16", False)) and torch.bfloat16 in chosen


def _saves_asynchronously(args: Any) -> bool:
    """In a release that can save `fsdp_dtensor` so; of others the flag is refused."""
    return bool(getattr(args, "async_save", False)) and hasattr(args, "async_strategy")


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "use_distributed_optimizer", "--use-distributed-optimizer", _constant(True), _always,
        "the optimizer is Megatron's DistributedOptimizer",
    ),
    Setting(
        "ckpt_format", "--ckpt-format", _constant(CKPT_FORMAT), _always,
        "the format of sharded weights; Megatron asks for it even without --save",
    ),
    Setting(
        "data_parallel_sharding_strategy", "--data-parallel-sharding-strategy",
        _constant("optim_grads_params"), _always,
        "the default of Megatron-LM main; 0.16.1's, no_shard, shards nothing",
    ),
    Setting(
        "overlap_grad_reduce", "--overlap-grad-reduce", _constant(True),
        _strategy_has("shard_grads"),
        "sharded gradients are reduced as each unit's backward ends",
    ),
    Setting(
        "overlap_param_gather", "--overlap-param-gather", _constant(True),
        _strategy_has("shard_weights"),
        "sharded weights are gathered under the forward of the unit in front",
    ),
    Setting(
        "megatron_fsdp_grad_comm_dtype", "--megatron-fsdp-grad-comm-dtype",
        _constant(torch.bfloat16), _reduces_in_bf16,
        "what --grad-reduce-in-bf16 asks for; gradients still accumulate in float32",
    ),
    Setting(
        "grad_reduce_in_bf16", "--accumulate-allreduce-grads-in-fp32", _constant(True),
        _has_bf16_gradients,
        "else --bf16 asks for float32 gradients, which other flags contradict",
    ),
    Setting(
        "gradient_accumulation_fusion", "--no-gradient-accumulation-fusion", _constant(False),
        _fusion_is_refused,
        "the wrapper does not support the fusion, which Megatron-LM has on by default",
    ),
    Setting(
        MXFP8_BUFFER, "--reuse-grad-buf-for-mxfp8-param-ag", _constant(False),
        lambda args: bool(getattr(args, MXFP8_BUFFER, False)),
        "bytes are gathered, and no weights are put where gradients are", is_void=True,
    ),
    Setting(
        OFFLOAD, f"--{OFFLOAD.replace('_', '-')}", _constant(True), streams_all,
        "what --optimizer-cpu-offload asks for: main weights and moments in host memory, streamed "
        "through the GPU, which updates them",
    ),
    *(
        Setting(
            option, f"--{option.replace('_', '-')}", _constant(False), _offloads_by(option),
            reason, is_void=True,
        )
        for option, reason in (
            ("overlap_cpu_optimizer_d2h_h2d", "copies overlap with updates and the next forward"),
            ("use_torch_optimizer_for_cpu_offload", "nothing is updated on the CPU"),
            (CORES_OFFLOAD, "megatron-core would make an optimizer that updates on the CPU"),
        )
    ),
    Setting(
        CORES_LATE_STEP, f"--{CORES_LATE_STEP.replace('_', '-')}", _constant(False),
        lambda args: bool(getattr(args, CORES_LATE_STEP, False)),
        "one optimizer has all parameters here, and gathers overlap with the forward",
        is_void=True,
    ),
    Setting(
        "use_persistent_ckpt_worker", "--use-persistent-ckpt-worker", _constant(True),
        _saves_asynchronously,
        "else 0.19 drops --async-save; a thread of the trainer writes, and no worker is started",
    ),
    Setting(
        "async_strategy", "--async-strategy", _constant("mcore"), _saves_asynchronously,
        "else a package is asked for that is not needed: either strategy's writer is replaced",
    ),
)  # fmt: skip
"""In this order: later ones read what earlier ones set."""


def was_given(flag: str, argv: Sequence[str]) -> bool:
    """Whether the command line has the flag, as `--flag`, `--flag value` or `--flag=value`."""
    return any(word == flag or word.startswith(f"{flag}=") for word in argv)


def complete(args: Any, argv: Sequence[str]) -> list[Change]:
    """Sets on the parsed arguments what follows from `--use-megatron-fsdp` and was left out."""
    changes = []
    for setting in SETTINGS:
        before, after = getattr(args, setting.option, None), setting.value(args)
        if was_given(setting.flag, argv) and not setting.is_void:
            continue
        if before == after or not setting.when(args):
            continue
        setattr(args, setting.option, after)
        changes.append(Change(setting.flag, before, after, setting.reason))
    return changes


def complete_environment(environment: MutableMapping[str, str]) -> list[Change]:
    """Sets environment variables that CUDA reads when it starts, if they are not set."""
    if CONNECTIONS in environment:
        return []
    environment[CONNECTIONS] = "8"
    return [Change(CONNECTIONS, None, "8", "hardware queues: communication runs beside compute")]


def hook_arguments(
    argv: Sequence[str],
    environment_changes: Sequence[Change],
    on_fsdp: Callable[[], None],
    on_other: Callable[[], None],
) -> None:
    """Makes `megatron.training.arguments` accept main's flags and complete what it parses.

    argv: the script's command line; environment_changes: rows for the table; on_fsdp, on_other:
    called once the arguments are known to ask for FSDP, or not to.

    Raises:
        RuntimeError: this Megatron-LM lacks a name that is hooked.
    """
    reported: list[bool] = []

    def add(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
        if was_given(FSDP_FLAG, argv):
            said_alone = functools.partial(_refuse_word, parser.prog)
            parser.error = said_alone  # type: ignore[method-assign]
        return add_missing_flags(original(parser))

    def parse(original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        args = original(*positional, **named)
        if getattr(args, "use_megatron_fsdp", False):
            # Megatron-LM parses several times; the first time says it all.
            finish(args, argv, environment_changes, finds_gpu(), silent=reported)
            reported.append(True)
            on_fsdp()
        else:
            on_other()
        return args

    hooks = {"add_megatron_arguments": add, "parse_args": parse, "validate_args": validate}
    rows = [Patch(ARGUMENTS, name, ours, everywhere=True) for name, ours in hooks.items()]
    missing = patches.missing(rows)
    if missing:
        raise RuntimeError(
            f"this Megatron-LM has no {', '.join(missing)}: {FSDP_FLAG} cannot be completed; "
            f"{releases.remedy()}, or call megatron_fsdp_adapter.install() in the script"
        )
    patches.install(rows)


def validate(original: Callable[..., Any], args: Any, *positional: Any, **named: Any) -> Any:
    """Megatron-LM's validation of arguments, which asserts that optimizers other than Adam and SGD
    have no sharded weights, and another format of checkpoints: it is shown Adam in the place of
    those that are supported here."""
    asked = args.optimizer
    if not (getattr(args, "use_megatron_fsdp", False) and asked in EMERGING):
        return original(args, *positional, **named)
    args.optimizer = "adam"
    try:
        return original(args, *positional, **named)
    finally:
        args.optimizer = asked


def add_missing_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of `MAIN_FLAGS` that the parser does not know; returns it."""
    for flag in MAIN_FLAGS:
        if flag.name not in parser._option_string_actions:
            flag.add_to(parser)
    return parser


def finds_gpu() -> bool:
    """Whether `megatron.training.arguments` finds the GPU whose capability it asks torch for, or
    has no torch to ask."""
    seen = getattr(sys.modules[ARGUMENTS], "torch", None)
    return seen is None or bool(seen.cuda.is_available())


def problems_of_run(
    args: Any, environment: Mapping[str, str], device: torch.device | None
) -> list[str]:
    """Everything wrong with parsed arguments and the environment, also what `device` cannot
    compute, unless it is None, and what CUDA graphs exclude on the GPUs of the run, if it asks for
    any. What depends on the release of megatron-core is told by the wrapper."""
    options = launch_options(args)
    return [
        *launch_problems(args, environment),
        *([] if device is None else capability.device_problems(options, device)),
        *cuda_graphs.problems(options, options, GPU, asks_tokens=False),
        *layer_graphs.problems(options, options, GPU),
    ]


def finish(
    args: Any, argv: Sequence[str], environment_changes: Sequence[Change], has_gpu: bool = True,
    silent: object = False,
) -> None:
    """Completes parsed arguments and prints, on rank 0, what was set. If they contradict each
    other, or there is no GPU, ends the process with status 2 and one message: a traceback would say
    nothing more."""
    changes = [*complete(args, argv), *environment_changes]
    # What a GPU can compute is asked when the rank has chosen its own: to ask starts CUDA on it.
    found = problems_of_run(args, os.environ, None if has_gpu else torch.device("cpu"))
    found += [] if has_gpu else [NO_GPU]
    if is_first_rank() and not silent:
        print(format_changes(f"{FSDP_FLAG} sets", changes), flush=True)
    if found:
        refuse(error_message(found))


def is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def refuse(message: str) -> NoReturn:
    """Ends the process with status 2, after rank 0 has printed `message`, and left it for the
    report that torchrun ends with. Other ranks of torchrun, which ends all when one has ended,
    leave it the time to do so."""
    if is_first_rank():
        print(message, file=sys.stderr, flush=True)
        if REPORT in os.environ:
            extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
            report = {"message": {"message": message, "extraInfo": extra}}
            Path(os.environ[REPORT]).write_text(json.dumps(report))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(SECONDS_FOR_RANK_0)
    raise SystemExit(2)


def _refuse_word(program: str, message: str) -> NoReturn:
    """In the place of argparse's error, which prints the usage of hundreds of arguments first."""
    refuse(f"{program}: {message}")


def error_message(found: Sequence[str]) -> str:
    """All problems of the command line as one message."""
    lines = "\n".join(f"  - {line}" for line in found)
    return f"{FSDP_FLAG} cannot be used with this configuration:\n{lines}"
