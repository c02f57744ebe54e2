"""Saving and resuming a run: `fsdp_dtensor` for the FSDP wrapper, `torch_dist` for stock DDP.

What a checkpoint holds beside weights and optimizer is one plain dictionary (`_plain`), so
that a resumed run takes the same steps as one that was never interrupted.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.utils import unwrap_model

from lib.data import vocabulary
from lib.model import Trainee
from lib.options import Options


@dataclass(frozen=True)
class Progress:
    """How far a run is: steps done, training and validation samples consumed."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0


def random_states() -> dict[str, Any]:
    """The states of every generator of this process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Puts back what `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


def _plain(trainee: Trainee, progress: Progress, options: Options) -> dict[str, Any]:
    return {
        "opt_param_scheduler": trainee.scheduler.state_dict(),
        "world_size": dist.get_world_size(),
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
        "args": options.as_dict(),
    }


def _restore_plain(state: dict[str, Any], trainee: Trainee) -> Progress:
    trainee.scheduler.load_state_dict(state["opt_param_scheduler"])
    return Progress(
        iteration=int(state["iteration"]),
        consumed_samples=int(state["consumed_samples"]),
        consumed_valid_samples=int(state["consumed_valid_samples"]),
    )


# --------------------------------------------------------------------------------------------
# fsdp_dtensor


# What the states of random generators are of: as many as there are ranks, and dropout under tensor
# parallelism draws other numbers on each.
_PLACES = (
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def _fsdp_state(
    trainee: Trainee, progress: Progress, options: Options, is_loading: bool = False
) -> dict[str, Any]:
    from megatron_fsdp_adapter.checkpoint import PerRank, training_state

    return {
        **training_state([trainee.model], trainee.optimizer, is_loading),
        "rng_state": PerRank(random_states()),
        **_plain(trainee, progress, options),
    }


def _save_fsdp(
    saver: Any, root: str, trainee: Trainee, progress: Progress, options: Options
) -> None:
    from megatron_fsdp_adapter.checkpoint import save_checkpoint
    from megatron_fsdp_adapter.checkpoint.record import topology_of

    state = _fsdp_state(trainee, progress, options)
    save = save_checkpoint if saver is None else saver.save
    save(
        root,
        progress.iteration,
        state,
        keep_last=options.most_recent_k,
        topology=topology_of(options),
    )


def _load_fsdp(root: str, trainee: Trainee, options: Options) -> Progress:
    """Of any number of ranks and any split of the model. Random generators are restored where
    both are those of this run, and stay as they were seeded otherwise."""
    from megatron_fsdp_adapter.checkpoint import load_checkpoint, load_training_state

    state = _fsdp_state(trainee, Progress(), options, is_loading=True)
    asked = {"world_size": 0, "args": dict.fromkeys(_PLACES)}
    _, saved = load_checkpoint(root, asked, ignore_unexpected=("",))
    same = saved["world_size"] == dist.get_world_size() and all(
        saved["args"][name] == getattr(options, name) for name in _PLACES
    )
    if not same:
        del state["rng_state"]
        if dist.get_rank() == 0:
            print(f"{root} was saved by {saved['world_size']} processes with {saved['args']}: the "
                  "random generators stay as this run seeded them", flush=True)  # fmt: skip
    _, state = load_checkpoint(
        root,
        state,
        ignore_unexpected=() if same else ("rng_state.",),
        vocab_size=vocabulary(options).vocab_size,
        check_digests=options.check_digests,
    )
    load_training_state([trainee.model], state, trainee.optimizer)
    if same:
        set_random_states(state["rng_state"])
    return _restore_plain(state, trainee)


# --------------------------------------------------------------------------------------------
# torch_dist

_TRACKER = "latest_checkpointed_iteration.txt"


def _folder(root: str, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def _torch_dist_state(trainee: Trainee, is_loading: bool) -> dict[str, Any]:
    """Core's sharded state dictionary: unwrapped model, optimizer, this rank's generators."""
    from megatron.core.dist_checkpointing import ShardedObject

    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = unwrap_model(trainee.model).sharded_state_dict(metadata=metadata)
    state: dict[str, Any] = {"model": model}
    state["optimizer"] = trainee.optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=metadata
    )
    ranks, rank = (dist.get_world_size(),), (dist.get_rank(),)
    state["rng_state"] = ShardedObject("rng_state", random_states(), ranks, rank, replica_id=0)
    return state


def _save_torch_dist(
    saver: Any, root: str, trainee: Trainee, progress: Progress, options: Options
) -> None:
    del saver  # --async-save is refused for this format
    from megatron.core import dist_checkpointing

    folder = _folder(root, progress.iteration)
    unfinished = folder.with_name(folder.name + ".unfinished")
    plain = _plain(trainee, progress, options)
    if trainee.model.ddp_config.overlap_param_gather:
        # The weights of other ranks' shards are gathered as late as the next forward.
        trainee.model.start_param_sync(force_sync=True)
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    state = {**_torch_dist_state(trainee, is_loading=False), "run": plain}
    dist_checkpointing.save(state, str(unfinished))
    dist.barrier()
    if first:
        # The folder gets its name when it is whole, then the tracker points to it: a crash in
        # between leaves the checkpoint before this one in use.
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        _write_atomically(Path(root) / _TRACKER, str(progress.iteration))
        _delete_older(root, options.most_recent_k)
    dist.barrier()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def _delete_older(root: str, keep_last: int | None) -> None:
    if keep_last is None:
        return
    folders = sorted(path for path in Path(root).glob("iter_*") if not path.suffix)
    for path in folders[:-keep_last]:
        shutil.rmtree(path)


def _latest_torch_dist(root: str) -> Path:
    tracker = Path(root) / _TRACKER
    if not tracker.is_file():
        raise FileNotFoundError(
            f"--load {root}: no {_TRACKER} in it, so no checkpoint was finished there; correct "
            "the folder, or leave --load out to start from the beginning"
        )
    folder = _folder(root, int(tracker.read_text()))
    if not (folder / "metadata.json").is_file():
        raise FileNotFoundError(
            f"--load {root}: {_TRACKER} names {folder.name}, which is missing or not complete; "
            "write the number of a complete iter_* folder into that file"
        )
    return folder


# Core 0.16.1's distributed optimizer is written for TE's or Apex's Adam. With torch's AdamW, which
# it uses where neither is installed, loading needs the two functions below.


def _torch_adams(optimizer: Any) -> list[torch.optim.AdamW]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if isinstance(part.optimizer, torch.optim.AdamW)]


def _make_adam_state(optimizer: Any) -> None:
    """Zero moments where there are none yet.

    Core describes the state that it is about to load by the state that exists, and fails when
    there is none (distrib_optimizer.py:642).
    """
    for adam in _torch_adams(optimizer):
        for param in (param for group in adam.param_groups for param in group["params"]):
            if param not in adam.state:
                adam.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }


def _restore_adam_steps(optimizer: Any) -> None:
    """The step counters that were saved, one tensor for each parameter.

    Core saves them in the parameter groups. Loading, it leaves the counters of `_make_adam_state`
    in the state, all of them one tensor (distrib_optimizer.py:825), which every step would advance
    once per parameter: the bias correction of a resumed run would be wrong twice.
    """
    for adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for param in group["params"]:
                adam.state[param]["step"] = torch.tensor(float(group["step"]))


def _load_torch_dist(root: str, trainee: Trainee, options: Options) -> Progress:
    from megatron.core import dist_checkpointing

    folder = _latest_torch_dist(root)
    _require_same_ranks(folder, dist_checkpointing.load_common_state_dict(str(folder))["run"])
    if options.use_distributed_optimizer:
        _make_adam_state(trainee.optimizer)
    state = dist_checkpointing.load(_torch_dist_state(trainee, is_loading=True), str(folder))
    unwrap_model(trainee.model).load_state_dict(state["model"])
    # Core copies into views of leaf parameters when the model is fp32.
    with torch.no_grad():
        trainee.optimizer.load_state_dict(state["optimizer"])
    if options.use_distributed_optimizer:
        _restore_adam_steps(trainee.optimizer)
    set_random_states(state["rng_state"])
    return _restore_plain(state["run"], trainee)


def _require_same_ranks(folder: Path, run: dict[str, Any]) -> None:
    if run["world_size"] != dist.get_world_size():
        raise ValueError(
            f"{folder} was saved by {run['world_size']} processes, this run has "
            f"{dist.get_world_size()}: resume with the same number"
        )


# --------------------------------------------------------------------------------------------

_SAVE: dict[str, Callable[[Any, str, Trainee, Progress, Options], None]] = {
    "fsdp_dtensor": _save_fsdp,
    "torch_dist": _save_torch_dist,
}
_LOAD: dict[str, Callable[[str, Trainee, Options], Progress]] = {
    "fsdp_dtensor": _load_fsdp,
    "torch_dist": _load_torch_dist,
}


class Saver:
    """Saves to --save, in the background with --async-save.

    All but `remark` is collective. For a `with` block: leaving it waits for what is under way.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._background: Any = None
        if options.async_save:
            from megatron_fsdp_adapter.checkpoint import AsyncSaver

            self._background = AsyncSaver()

    def save(self, trainee: Trainee, progress: Progress) -> None:
        """Saves, or begins to. Raises what the save before this one failed with, if in the
        background."""
        root, kind = self._options.save, self._options.ckpt_format
        assert root is not None and kind is not None
        _SAVE[kind](self._background, root, trainee, progress, self._options)

    @property
    def remark(self) -> str:
        """What `save` did, for the log."""
        return "saved to" if self._background is None else "being saved to"

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._background is not None:
            self._background.__exit__(*error)


def load(trainee: Trainee, options: Options) -> Progress:
    """Restores model, optimizer, schedule and generators from --load. Collective.

    Raises FileNotFoundError if there is no complete checkpoint, ValueError if it is of another
    number of processes.
    """
    assert options.load is not None and options.ckpt_format is not None
    return _LOAD[options.ckpt_format](options.load, trainee, options)
