"""The checkpoint from which a command line would resume, and its schedule beside the run's.

A run compares them when it loads, after the model is built. `doctor` does it before the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoint import folders
from ...checkpoint.convert.dcp_files import FSDP_DTENSOR, DcpFolder, detect_format
from ..optimizer.group_options import NEITHER, differences, schedule_remarks
from ..optimizer.param_scheduler import flag_of
from ..options.load_folders import source_of, source_problems
from ..options.rules import is_on

ARGUMENTS = "args"
"""The key under which Megatron-LM saves its arguments, and asks for them."""
LACKS_ARGUMENTS = (
    "has no arguments of Megatron-LM, as if it was saved by another program. Resume it with that "
    "program, as scripts/pretrain_gpt.py"
)
STORED = "opt_param_scheduler."
"""Prefix of the keys of a checkpoint's schedule."""
AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
WITHOUT_SCHEDULE = (
    "finetune",
    "no_load_optim",
    # Megatron-LM's validation sets one of the two above for these.
    "skip_train",
    "moe_use_upcycling",
    "freeze_all_layers",
    # Its values are not those of the command line.
    "yaml_cfg",
)
"""Arguments with which a run loads no schedule, or none that is known here."""


@dataclass(frozen=True)
class Loaded:
    """The checkpoint that a run of Megatron-LM would load.

    Attributes:
        line: about it; "" without `--load`, and if weights of another checkpoint are loaded.
        problems: of its folder.
        schedule: the plain values of its schedule; empty if the run would load none, or if they
            cannot be read.
    """

    line: str = ""
    problems: tuple[str, ...] = ()
    schedule: Mapping[str, Any] = field(default_factory=dict)


def loaded_by(args: Any) -> Loaded:
    """The checkpoint that a run with these arguments would load."""
    option, root, step = source_of(args)
    if not root or option == "pretrained_checkpoint":
        return Loaded()
    if "://" in root:
        return Loaded(f"{root}, which is an address and not looked at")
    if not step and not (Path(root) / folders.TRACKER).is_file():
        return _nothing(args, root)
    if source_problems(args):  # which are listed with those of the other arguments
        return Loaded(f"a checkpoint of {root} that is refused")
    try:
        folder = DcpFolder.open_to_read(Path(root), step)
    except (ValueError, OSError) as error:
        problem = f"load={root!r}: {error}"
        return Loaded(f"a checkpoint of {root} that cannot be read", (problem,))
    schedule = _schedule_in(folder, args)
    if ARGUMENTS not in folder.object_keys and is_on(args, "strict_fsdp_dtensor_load"):
        problem = f"load={root!r}: {folder.folder.name} {LACKS_ARGUMENTS}"
        return Loaded(f"a checkpoint of {root} that is refused", (problem,), schedule)
    line = (
        f"iteration {folder.iteration} of {root}. Its model, parameter groups and data files are "
        "compared when it is loaded"
    )
    return Loaded(line, (), schedule)


def _nothing(args: Any, root: str) -> Loaded:
    """For a root without a newest checkpoint."""
    lacks = f"has no {folders.TRACKER}" if Path(root).is_dir() else "does not exist"
    if is_on(args, "exit_on_missing_checkpoint"):
        problem = (
            f"exit_on_missing_checkpoint=True: {root} {lacks}. Name a folder of checkpoints, or "
            "leave it out"
        )
        return Loaded("nothing", (problem,))
    return Loaded(f"nothing, because {root} {lacks}: the run starts at its beginning")


def _schedule_in(folder: DcpFolder, args: Any) -> dict[str, Any]:
    """`Loaded.schedule`."""
    if any(getattr(args, name, None) for name in WITHOUT_SCHEDULE):
        return {}
    saved = {}
    for key in folder.object_keys:
        if not key.startswith(STORED):
            continue
        try:
            value = folder.object(key)
        except (ValueError, OSError):
            return {}  # the load says what is wrong
        if isinstance(value, (int, float, str)):
            saved[key.removeprefix(STORED)] = value
    return saved


def loaded_by_ddp(args: Any) -> str:
    """A remark if a run of Megatron's DDP would load a checkpoint that only this wrapper reads."""
    _, root, step = source_of(args)
    try:
        is_ours = bool(root) and detect_format(Path(str(root)), step) == FSDP_DTENSOR
    except (ValueError, OSError):
        return ""
    if not is_ours:
        return ""
    return (
        f". But --load {root} is in the format {FSDP_DTENSOR}, which it does not read: convert it "
        "with `megatron-fsdp-adapter convert --to torch_dist`"
    )


def schedule_problems(args: Any, ranks: int | None, saved: Mapping[str, Any]) -> list[str]:
    """Values of the schedule that a checkpoint has otherwise, if no flag says which schedule a
    resumed run takes. saved: the checkpoint's; ranks: of the run. Without these and
    `--global-batch-size`, lengths in samples are not compared."""
    if flag_of(args) != NEITHER:
        return []
    return differences(schedule_of(args, ranks), saved)


def remarks(args: Any, ranks: int | None, saved: Mapping[str, Any]) -> list[str]:
    """Lines about such values if a flag says whose are taken, each with the one that is."""
    flag = flag_of(args)
    if flag == NEITHER:
        return []
    return schedule_remarks(schedule_of(args, ranks), saved, flag)


def schedule_of(args: Any, ranks: int | None) -> dict[str, Any]:
    """The values that Megatron-LM gives its scheduler, as far as they are known before its own
    validation of arguments. As `get_optimizer_param_scheduler` of core_v0.19.0 computes them."""
    decay = args.weight_decay
    schedule: dict[str, Any] = {
        "lr_decay_style": args.lr_decay_style,
        "wd_incr_style": args.weight_decay_incr_style,
        "start_wd": decay if args.start_weight_decay is None else args.start_weight_decay,
        "end_wd": decay if args.end_weight_decay is None else args.end_weight_decay,
    }
    for name, value in (("max_lr", args.lr), ("min_lr", args.min_lr)):
        if value is not None:  # or the script sets it
            schedule[name] = value
    if args.train_samples:
        factor = 1
        training = args.train_samples
        decay_length = args.lr_decay_samples or training
        warmup = args.lr_warmup_samples
    else:
        factor = global_batch(args, ranks)
        training = args.train_iters
        decay_length = args.lr_decay_iters or training
        warmup = args.lr_warmup_iters
    if training and factor:
        decay_steps = decay_length * factor
        schedule["wd_incr_steps"] = training * factor
        schedule["lr_decay_steps"] = decay_steps
        if args.lr_warmup_fraction is None:
            schedule["lr_warmup_steps"] = warmup * factor
        else:
            schedule["lr_warmup_steps"] = args.lr_warmup_fraction * decay_steps
    return schedule


def global_batch(args: Any, ranks: int | None) -> int:
    """Sequences of a step; 0 if they are not known."""
    if args.global_batch_size:
        return int(args.global_batch_size)
    takes_axes_of_checkpoint = getattr(args, "use_mp_args_from_checkpoint_args", False)
    if not ranks or not args.micro_batch_size or takes_axes_of_checkpoint:
        return 0
    replicas = ranks
    for axis in AXES:
        replicas //= getattr(args, axis)
    return int(args.micro_batch_size) * replicas
