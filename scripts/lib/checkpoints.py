"""Saves and resumes runs of the FSDP wrapper: a resumed run takes the same steps as an
uninterrupted one."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from lib.data import vocabulary
from lib.model import Trainee
from lib.options import Options
from megatron_fsdp_adapter.checkpoint import (
    PerRank,
    folders,
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)
from megatron_fsdp_adapter.checkpoint.coordination import coordination
from megatron_fsdp_adapter.checkpoint.folders import TEMPORARY
from megatron_fsdp_adapter.checkpoint.record import topology_of
from megatron_fsdp_adapter.core.problems import RefusedByAllRanks
from megatron_fsdp_adapter.megatron.optimizer.param_scheduler import require_same_schedule


@dataclass(frozen=True)
class Progress:
    """Progress of a run: steps done, training and validation samples consumed."""

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
    """Restores the result of `random_states`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


# Options that a rank's RNG state depends on. Each rank has its own, because under tensor
# parallelism ranks drop out different elements.
_PLACES = (
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def _state(
    trainee: Trainee, progress: Progress, options: Options, is_loading: bool = False
) -> dict[str, Any]:
    """The state of a run, to be saved, or to be filled by a load."""
    return {
        **training_state([trainee.model], trainee.optimizer, is_loading),
        "rng_state": PerRank(random_states()),
        "opt_param_scheduler": trainee.scheduler.state_dict(),
        "world_size": dist.get_world_size(),
        **asdict(progress),
        "args": asdict(options),
    }


def save(trainee: Trainee, progress: Progress, options: Options) -> None:
    """Saves to --save. Collective."""
    assert options.save is not None
    state = _state(trainee, progress, options)
    save_checkpoint(options.save, progress.iteration, state, topology=topology_of(options))


def begins(options: Options) -> bool:
    """True if the run starts from its beginning: without --load, or if --load is the folder of
    --save and nothing was saved there yet. So a launcher can start the same command again after a
    failure. Collective: nodes may see files of a shared folder at different times."""
    if options.load is None:
        return True
    if options.load != options.save:
        return False
    files = Path(options.load).glob("*iter*")
    decided = [all(file.name.startswith(TEMPORARY) for file in files)]
    dist.broadcast_object_list(decided)
    return decided[0]


def require_own(root: str) -> None:
    """Raises RefusedByAllRanks if there is no checkpoint to load, or if the newest was saved by
    another program: this script reads values that only its own checkpoints have.

    Collective: an error of one rank is raised on all."""
    with coordination() as ranks:
        ranks.run("opening the checkpoint", lambda: _require_own(Path(root)))


def _require_own(root: Path) -> None:
    is_newest = (root / folders.TRACKER).is_file()
    if folders.iteration_of(root) is not None and not is_newest:
        raise RefusedByAllRanks(f"--load {root}: is one iteration. Name the folder that it is in")
    try:
        path, number = folders.locate(root)
        folder, metadata = folders.open_checkpoint(path, number)
    except FileNotFoundError as error:
        raise RefusedByAllRanks(f"--load {root}: {error}") from error
    if "world_size" not in metadata.state_dict_metadata:
        raise RefusedByAllRanks(
            f"--load {root}: {folder.name} was not saved by scripts/pretrain_gpt.py, or only its "
            "weights were converted. Resume it with the program that saved it"
        )


def load(trainee: Trainee, options: Options) -> Progress:
    """Restores model, optimizer and schedule from --load; returns the progress. Collective.

    The checkpoint may be of any number of ranks and any split of the model. Random generators are
    restored if both are those of this run; else they keep this run's seeds.

    Raises RefusedByAllRanks if there is no complete checkpoint, for one of another program, and for
    another schedule without a flag that says which one is taken.
    """
    root = options.load
    assert root is not None
    state = _state(trainee, Progress(), options, is_loading=True)
    require_own(root)
    asked = {"world_size": 0, "args": dict.fromkeys(_PLACES)}
    _, saved = load_checkpoint(root, asked, ignore_unexpected=("",))
    places = {name: getattr(options, name) for name in _PLACES}
    same_places = all(saved["args"][name] == value for name, value in places.items())
    same = same_places and saved["world_size"] == dist.get_world_size()
    # For readers of the checkpoint. Other versions of this script have other options.
    del state["args"]
    ignored = ["args."]
    if not same:
        del state["rng_state"]
        ignored.append("rng_state.")
        if dist.get_rank() == 0:
            print(
                f"{root} was saved by {saved['world_size']} processes with {saved['args']}. The "
                "random generators keep this run's seeds",
                flush=True,
            )
    rows = vocabulary(options).vocab_size
    _, state = load_checkpoint(root, state, ignore_unexpected=ignored, vocab_size=rows)
    # Before the optimizer's load, which refuses another learning rate: one error lists all.
    require_same_schedule(trainee.scheduler, state["opt_param_scheduler"])
    load_training_state([trainee.model], state, trainee.optimizer)
    if same:
        set_random_states(state["rng_state"])
    trainee.scheduler.load_state_dict(state["opt_param_scheduler"])
    return Progress(**{item.name: int(state[item.name]) for item in fields(Progress)})
