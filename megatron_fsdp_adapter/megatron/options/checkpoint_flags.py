"""Every flag of Megatron-LM's group "checkpointing", 0.16.1 to main, in one table: it works, has
no effect, or is refused. `docs/options.md` shows it.

Rules about the folders that a run loads are in `load_folders.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .rules import Rule, Rules, is_on, off, unset
from .settings import CKPT_FORMAT

WORKS = "works"
NO_EFFECT = "no effect"
REFUSED = "refused"
NOT_RUN = "not run"


@dataclass(frozen=True)
class CheckpointFlag:
    """A flag, or several of one meaning.

    Attributes:
        flags: as they are written on the command line.
        state: `WORKS`, `NO_EFFECT`, `REFUSED`, or `NOT_RUN`: accepted, and not tested.
        effect: what it does with this wrapper; empty if it is refused.
        rules: its refused values, and what it is refused with.
    """

    flags: tuple[str, ...]
    state: str
    effect: str = ""
    rules: Rules = ()


def _works(flags: str, effect: str, *rules: Rule) -> CheckpointFlag:
    return CheckpointFlag(tuple(flags.split()), WORKS, effect, rules)


def _none(flags: str, effect: str) -> CheckpointFlag:
    return CheckpointFlag(tuple(flags.split()), NO_EFFECT, effect)


def _no(flags: str, *rules: Rule) -> CheckpointFlag:
    return CheckpointFlag(tuple(flags.split()), REFUSED, rules=rules)


def async_save_lacks_strategy(options: Any) -> bool:
    """True if a release saves asynchronously only in other formats, and is asked to."""
    return is_on(options, "async_save") and not hasattr(options, "async_strategy")


def async_save_at_address(options: Any) -> bool:
    """True if an asynchronous save goes to an address, for which there is no rename."""
    return is_on(options, "async_save") and "://" in str(options.save)


def _among(option: str, *values: str) -> Callable[[Any], bool]:
    return lambda args: getattr(args, option, None) in values


def _has_interval_without_type(args: Any) -> bool:
    interval = getattr(args, "non_persistent_save_interval", None)
    return bool(interval) and getattr(args, "non_persistent_ckpt_type", None) is None


_CONVERT = "`megatron-fsdp-adapter convert`"
_OF_TORCH_DIST = "only `torch_dist` has it"
_OF_LOCAL = "of local checkpoints, which are refused"
_OF_PROCESS = "a thread of the trainer writes, no process of Megatron's"
_DEPRECATED = "deprecated; Megatron-LM prints that"

CHECKPOINT_FLAGS: tuple[CheckpointFlag, ...] = (
    _works(
        "--save", "the folder of all checkpoints",
        Rule(
            "save", async_save_at_address,
            "storage at an address cannot rename a folder, which asynchronous saves need. Leave "
            "out --async-save, or save to a folder",
        ),
    ),
    _works("--save-interval --persistent-save-interval", "iterations between saves"),
    _works(
        "--save-retain-interval",
        "after a save, the one before is deleted unless its iteration is a multiple of this",
    ),
    _works("--no-save-optim", "a resume then needs `--no-load-optim` or `--finetune`"),
    _works("--no-save-rng", "a resume takes the states that the checkpoint has"),
    _works("--load", "the newest checkpoint of a folder; of a `release` folder the weights"),
    _works("--ckpt-step", "loads this iteration, which the tracker need not name"),
    _works("--no-load-optim", "the optimizer starts without state, which need not be stored"),
    _works("--no-load-rng", "generators keep the run's seeds"),
    _works("--finetune", "loads weights alone; iterations start at 0"),
    _works(
        "--pretrained-checkpoint",
        "as `--finetune`, if `--load` has no checkpoint or is left out",
    ),
    _works("--exit-on-missing-checkpoint", "ends the run if `--load` has no checkpoint"),
    _works("--override-ckpt-iteration", "the iteration at which the run goes on"),
    _works("--use-checkpoint-args", "the model's arguments come from the checkpoint"),
    _works("--use-mp-args-from-checkpoint-args", "parallel sizes come from the checkpoint too"),
    _works(
        "--no-use-tokenizer-model-from-checkpoint-args "
        "--disable-use-tokenizer-model-from-checkpoint-args",
        "the tokenizer stays the command line's",
    ),
    _works(
        "--ckpt-format", f"{CKPT_FORMAT}, which is set by itself",
        Rule(
            "ckpt_format",
            lambda args: args.ckpt_format != CKPT_FORMAT,
            f"sharded weights are saved as {CKPT_FORMAT!r}; Megatron-LM rejects other formats with "
            f"use_megatron_fsdp too. Leave it out, and convert a saved checkpoint with {_CONVERT}",
        ),
    ),
    _none("--auto-detect-ckpt-format", "the format of a folder is always looked at"),
    _no(
        "--ckpt-convert-format",
        unset(
            "ckpt_convert_format",
            "Megatron-LM would write the rows of one rank under the names of whole weights. Leave "
            f"it out, and use {_CONVERT}",
        ),
    ),
    _none("--ckpt-convert-save", "it belongs to `--ckpt-convert-format`"),
    _no(
        "--ckpt-convert-update-legacy-dist-opt-format",
        off(
            "ckpt_convert_update_legacy_dist_opt_format",
            "of a checkpoint in the legacy format only weights are loaded. Load it with Megatron's "
            f"DDP, save it with --ckpt-format torch_dist, and use {_CONVERT}",
        ),
    ),
    _works("--non-persistent-save-interval", "iterations between non-persistent saves",
        Rule(
            "non_persistent_save_interval", _has_interval_without_type,
            "without a type, Megatron-LM stops at the first such save. Set "
            "non_persistent_ckpt_type='global'",
        ),
    ),
    _works(
        "--non-persistent-ckpt-type",
        "`global`: the newest two are kept, and the newest of all checkpoints is loaded",
        Rule(
            "non_persistent_ckpt_type", _among("non_persistent_ckpt_type", "local", "in_memory"),
            f"such checkpoints do not support {CKPT_FORMAT!r}. Use 'global', or leave it out",
        ),
    ),
    _works("--non-persistent-global-ckpt-dir", "their folder; by default in that of `--load`"),
    _none("--non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo", _OF_LOCAL),
    _no(
        "--replication",
        off("replication", "it copies local checkpoints, which are refused. Leave it out"),
    ),
    _none("--replication-jump --replication-factor", _OF_LOCAL),
    _works(
        "--async-save", "a thread writes while training goes on",
        Rule(
            "async_save", async_save_lacks_strategy,
            "this Megatron-LM saves asynchronously only in the torch_dist format. Leave it out, or "
            "use a release from 0.17 on",
        ),
    ),
    _none(
        "--async-strategy --use-persistent-ckpt-worker", f"set with `--async-save`; {_OF_PROCESS}"
    ),
    _none(
        "--async-ckpt-cpu-priority --async-ckpt-io-priority --async-ckpt-use-cpu-shm "
        "--dist-ckpt-workers",
        _OF_PROCESS,
    ),
    _none("--ckpt-assume-constant-structure", "only Megatron's own writers keep plans of saves"),
    _none(
        "--no-ckpt-fully-parallel-save --ckpt-fully-parallel-load "
        "--ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-save-process-group "
        "--ckpt-fully-parallel-load-process-group --ckpt-fully-parallel-load-per-rank-objects "
        "--ckpt-pg-tensors-cache-path --ckpt-pg-tensors-cache-create",
        "each rank always writes its own rows, and reads those that it needs",
    ),
    _works(
        "--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load",
        "what a checkpoint lacks is printed and keeps its initial values",
    ),
    _works(
        "--dist-ckpt-strictness",
        "[below](#what-only-one-side-has)",
        Rule(
            "dist_ckpt_strictness",
            _among("dist_ckpt_strictness", "return_unexpected", "return_all"),
            "Megatron-LM's own loop fails on what a load then returns. Use 'log_all'",
        ),
    ),
    _none(
        "--no-ckpt-load-validate-sharding-integrity "
        "--disable-ckpt-load-validate-sharding-integrity",
        "blocks are always checked for overlaps and gaps",
    ),
    _none("--load-main-params-from-ckpt", "main weights are always what a load reads"),
    _none(
        "--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient",
        "checkpoints always load under another split",
    ),
    _none("--dist-ckpt-save-pre-mcore-014", _OF_TORCH_DIST),
    _none("--no-stream-ckpt-dequant --disable-stream-ckpt-dequant", _OF_TORCH_DIST),
    _none("--no-save-tokenizer-assets --disable-save-tokenizer-assets", _OF_TORCH_DIST),
    _none("--ckpt-drop-redundant-extra-state", "extra states are never stored"),
    _no(
        "--verify-integrity",
        off(
            "verify_integrity",
            "Megatron-LM hashes only torch_dist; here digests are always written. Leave it out, "
            "and check a checkpoint with `megatron-fsdp-adapter verify`",
        ),
    ),
    CheckpointFlag(
        (
            "--save-activations-interval",
            "--save-tokens-per-expert-interval",
            "--save-dgrads-interval",
        ),
        NOT_RUN,
        "save what hooks on layers of Transformer Engine see, beside checkpoints",
    ),
    _no(
        "--save-wgrads-interval",
        unset(
            "save_wgrads_interval",
            "it saves whole gradients from main_grad, which sharded parameters do not have. Leave "
            "it out, or run with Megatron's DDP",
        ),
    ),
    _no(
        "--save-params-interval",
        unset(
            "save_params_interval",
            "it saves whole weights after the optimizer's step, when they are sharded or stale. "
            "Leave it out, and save checkpoints",
        ),
    ),
    _none("--use-dist-ckpt --dist-ckpt-format --ckpt-fully-parallel-save", _DEPRECATED),
)  # fmt: skip
"""In the order of the page: saves, loads, formats, kinds of checkpoints, ways to write and read,
checks, other files."""


def _rules() -> Iterator[Rule]:
    for row in CHECKPOINT_FLAGS:
        yield from row.rules


CHECKPOINT_RULES: Rules = tuple(_rules())
"""The rules of all rows, for the arguments of a run of Megatron-LM."""
