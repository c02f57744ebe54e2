"""The folder from which Megatron-LM loads, and the non-persistent checkpoints that it keeps.

Megatron-LM's `fsdp_dtensor` path knows `--load` alone. Functions of it are wrapped, so that it also
loads as its `torch_dist` path does:

- `--pretrained-checkpoint` without `--load`;
- `--non-persistent-ckpt-type global`: the newest of persistent and non-persistent checkpoints;
- a `release` folder: weights alone.

A save of a non-persistent checkpoint first deletes those before the newest. Megatron takes the
folder with the largest number for the newest, which may be one that a killed save left empty. Here
it is the one that the tracker names.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from ...checkpoint import folders, publishing
from ...checkpoint.training import OPTIMIZER
from ..compat.patches import Original
from ..compat.table import LM
from ..options.settings import CKPT_FORMAT

GLOBAL = "global"
"""The value of `--non-persistent-ckpt-type` for folders of the usual format."""
_BESIDE_WEIGHTS = (OPTIMIZER, "opt_param_scheduler", "rng_state", "rerun_state_machine")


def _newest_of(load_dir: str | None, args: Any) -> tuple[str | None, bool]:
    """The root that has the newest checkpoint, of `load_dir` and its non-persistent ones, and
    whether it is the second. Collective, as Megatron's reading of a tracker is."""
    module: Any = sys.modules[LM]
    if getattr(args, "non_persistent_ckpt_type", None) != GLOBAL:
        return load_dir, False
    root = args.non_persistent_global_ckpt_dir
    if not root and load_dir is not None:
        root = os.path.join(load_dir, module._NON_PERSISTENT_CKPT_SUBDIR)
    if not module.checkpoint_exists(root):
        return load_dir, False
    newest = module._get_non_persistent_iteration(root, args)
    persistent = -1
    if module.checkpoint_exists(load_dir):
        persistent, _ = module.read_metadata(module.get_checkpoint_tracker_filename(load_dir))
    if getattr(args, "ckpt_step", None):
        persistent = args.ckpt_step
    if newest < persistent:
        return load_dir, False
    return root, True


def path_to_load(original: Original, args: Any, load_arg: str = "load") -> Any:
    """The folder that will be loaded. Megatron's function looks at `--load` alone."""
    module: Any = sys.modules[LM]
    root = getattr(args, load_arg)
    pretrained = getattr(args, "pretrained_checkpoint", None)
    if pretrained is not None and not module.checkpoint_exists(root):
        root = pretrained
    root, is_non_persistent = _newest_of(root, args)
    step = None if is_non_persistent else getattr(args, "ckpt_step", None)
    return original(SimpleNamespace(load=root, ckpt_step=step))


def redirect(call: MutableMapping[str, Any]) -> None:
    """Changes the arguments of `_load_base_checkpoint` if the newest checkpoint is a non-persistent
    one: that is then read like any other, from a root of its own."""
    args = call["args"]
    if getattr(args, "ckpt_format", None) != CKPT_FORMAT:
        return
    root, is_non_persistent = _newest_of(call["load_dir"], args)
    if is_non_persistent:
        call["load_dir"] = root
        call["args"] = copy.copy(args)
        call["args"].non_persistent_ckpt_type = None
        call["args"].ckpt_step = None


def without_training_state(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The state to read from a `release` folder: Megatron then uses no optimizer, scheduler or
    random states, but its `fsdp_dtensor` path asks for them."""
    return {key: value for key, value in wanted.items() if key not in _BESIDE_WEIGHTS}


def keep_newest(
    original: Original, save_dir: Any, leave_ckpt_num: int = 1, do_async: bool = False
) -> Any:
    """Deletes non-persistent checkpoints older than the one that the tracker names."""
    args = sys.modules["megatron.training.global_vars"].get_args()
    if leave_ckpt_num != 1 or args.ckpt_format != CKPT_FORMAT:
        return original(save_dir, leave_ckpt_num, do_async)
    root = Path(save_dir)
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    if is_writer and (root / folders.TRACKER).is_file():
        newest = folders.read_tracker(root)
        older = [number for number in folders.complete_iterations(root) if number < newest]
        publishing.remove_or_warn(folders.final_folder(root, number) for number in older)
    return None
