"""Wraps Megatron-LM's and Megatron-Bridge's checkpoint code where its `fsdp_dtensor` path stops.

That code saves and loads the state dicts of the wrapper and the optimizer as they are. Functions of
it are wrapped for what it does not do:

- Several model chunks of a rank (interleaved pipelines). It looks for one chunk. Here chunks are
  merged before a save and a load, which their global keys allow, and taken apart after a load.
- Parameters of another engine than the bundled one. From 0.20 on it splits and renames some of
  these, and a model with multi-token prediction could not be loaded again.
- Generator states under another split. It stores one for each pipeline and tensor-parallel rank,
  and with `data_parallel_random_init` one for each data-parallel rank too; under expert parallelism
  `generators.py` stores one for each of those, too. If the checkpoint was saved by other numbers of
  ranks, this run's generators stay as they were seeded, and that is printed.
- Another padded vocabulary. Rows that are not padding are read.
- An evaluation alone (`--skip-train`). The model is wrapped for it too.
- One error for all keys that the checkpoint lacks or has in another shape, and for layers that no
  rank has (`strictness.py`). Torch's names only the first key, and nothing that no rank has.
- A resume with `--no-save-optim`, or from a checkpoint that was saved with it. The error says so.
- Another schedule without a flag that says which one is taken. One error lists all differences. The
  optimizer, which is loaded before the scheduler, refuses another learning rate by itself.

Nothing is imported: Megatron-LM and Megatron-Bridge are used if they are loaded.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ...checkpoint import folders
from ...checkpoint.coordination import coordination
from ...checkpoint.dcp import OPTIONAL, digest_of, keys_of_ranks
from ...checkpoint.fitting import fit, renamed_like, taken_over
from ...checkpoint.state import (
    Mismatch,
    StateDict,
    StateMapping,
    compare,
    entries,
    flatten,
    from_stored,
    merge,
    to_stored,
)
from ...checkpoint.training import OPTIMIZER, merged
from ...core.problems import RefusedByAllRanks
from ...state.names import MODEL
from ...state.sharded_state_dict import ShardedStateDict
from ..compat.patches import Original
from ..compat.table import BRIDGE, LM
from ..optimizer.param_scheduler import flag_of, require_same_values
from ..options.load_folders import RELEASE
from ..options.rules import is_on
from . import generators
from .load_paths import redirect, without_training_state
from .megatron_names import preprocess_state_dict_for_uneven_dtensor
from .strictness import (
    LENIENT,
    OPTION,
    Strictness,
    advice,
    printed,
    refused,
    strictness_of,
    unexpected_keys,
)

_CHUNK = re.compile(r"model\d+")
_RNG = "rng_state"
_SCHEDULE = "opt_param_scheduler"


@dataclass(frozen=True)
class Asked:
    """A request to read a checkpoint.

    folder: of the checkpoint; is_strict: missing keys are an error; strictness: of
    `dist_ckpt_strictness`; vocab_size: tokens without padding, None where it is not known;
    schedule: the scheduler's flag, as of `flag_of`, None where it is not known.
    """

    folder: Path
    is_strict: bool
    strictness: Strictness
    vocab_size: int | None
    schedule: str | None


@dataclass(frozen=True)
class _Found:
    """A rank's message to the others.

    has_generators: all generator states that it asks for are stored; split: their places, without
    data-parallel ranks; mismatch: differences of its state from the checkpoint; digest: of the keys
    that it asks for.
    """

    has_generators: bool
    split: frozenset[str]
    mismatch: Mismatch
    digest: str


def _of_megatron_lm(call: Mapping[str, Any]) -> Asked:
    """The folder and options of a call of Megatron-LM's reader, from its arguments."""
    module: Any = sys.modules[LM]
    args = call["args"]
    wanted = SimpleNamespace(load=call["load_dir"], ckpt_step=getattr(args, "ckpt_step", None))
    tokenizer = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_TOKENIZER", None)
    return Asked(
        Path(module.get_load_checkpoint_path_by_args(wanted)),
        is_on(args, LENIENT),
        strictness_of(getattr(args, OPTION, None)),
        getattr(tokenizer, "vocab_size", None),
        flag_of(args),
    )


def _of_bridge(call: Mapping[str, Any]) -> Asked:
    """The folder and options of a call of Megatron-Bridge's reader, from its arguments."""
    module: Any = sys.modules[BRIDGE]
    folder = call.get("checkpoint_path_override")  # from 0.4 on; there is no iteration then
    if folder is None:
        folder = module.get_checkpoint_name(call["load_dir"], call["iteration"], call["release"])
    config = call.get("cfg")
    model_config = getattr(config, "model", None)
    scheduler_config = getattr(config, "scheduler", None)
    return Asked(
        Path(folder),
        is_on(call["ckpt_cfg"], LENIENT),
        strictness_of(getattr(call["ckpt_cfg"], OPTION, None)),
        getattr(model_config, "vocab_size", None),
        None if scheduler_config is None else flag_of(scheduler_config),
    )


def merged_chunks(state: StateMapping) -> StateDict:
    """`state` with the chunks "model0", "model1", ... merged into one "model".

    ValueError if two chunks have a key in common: they were not made by our wrapper.
    """
    chunks = [key for key in state if _CHUNK.fullmatch(key)]
    result = {key: value for key, value in state.items() if key not in chunks}
    if chunks:
        result[MODEL] = merged(state[key] for key in chunks)
    return result


def _preprocess(original: Original, *args: Any, **kwargs: Any) -> StateDict:
    """The state dict that Megatron saves, or loads into: its model chunks merged.

    The original is not called. It renames, splits and numbers the parameters of the bundled engine,
    with attributes of these. Ours have a checkpoint's names and parts already, and a load has the
    names of its checkpoint (`renamed_like`)."""
    call = inspect.signature(original).bind(*args, **kwargs)
    state = merged_chunks(call.arguments["raw_state_dict"])
    return preprocess_state_dict_for_uneven_dtensor(state)


def load_of_megatron_lm(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Reads a checkpoint by Megatron-LM's function, the newest of `--load` and its non-persistent
    ones."""
    call = _bound(original, args, kwargs)
    redirect(call.arguments)
    return _load(_of_megatron_lm, original, call)


def load_of_bridge(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Reads a checkpoint by Megatron-Bridge's function."""
    return _load(_of_bridge, original, _bound(original, args, kwargs))


def _bound(function: Original, args: Any, kwargs: Any) -> inspect.BoundArguments:
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call


def _load(
    asked_of: Callable[[Mapping[str, Any]], Asked],
    original: Original,
    call: inspect.BoundArguments,
) -> Any:
    """Reads a checkpoint by Megatron's function. Before, all ranks compare it with the model, and
    the state that is read replaces the one that was asked for; see the module's docstring.

    asked_of: `_of_megatron_lm` or `_of_bridge`."""
    wanted = call.arguments["sharded_state_dict"]
    models = () if wanted is None else wanted.get("_model", ())
    if not any(isinstance(model, ShardedStateDict) for model in models):
        return original(*call.args, **call.kwargs)
    asked = asked_of(call.arguments)
    _require_optimizer(call.arguments, asked.folder)
    if not (asked.folder / ".metadata").is_file():
        return original(*call.args, **call.kwargs)  # it reports what is missing
    if asked.folder.name == RELEASE:
        wanted = without_training_state(wanted)
    elif _leaves_out_generators(call.arguments, wanted):
        # Megatron leaves out of a load what the run does not save, and then stops without it.
        module: Any = sys.modules[LM]
        states = module.get_rng_state(call.arguments["args"].ckpt_format, None, None)
        wanted = {**wanted, _RNG: states}
    own_schedule = dict(wanted.get(_SCHEDULE, {}))  # the read puts the saved values into it
    prepared, rank = agreed(wanted, asked)
    call.arguments["sharded_state_dict"] = prepared
    state, *others = original(*call.args, **call.kwargs)
    if state is not None:
        if asked.schedule is not None:
            require_same_values(own_schedule, state.get(_SCHEDULE, {}), asked.schedule)
        state = _as_asked(state, wanted, rank)
    return (state, *others)


def _leaves_out_generators(call: Mapping[str, Any], wanted: StateMapping) -> bool:
    """True if a run of Megatron-LM goes on with generator states, but has not asked for any, as it
    saves none (`--no-save-rng`)."""
    args = call.get("args")
    if args is None or _RNG in wanted or not is_on(args, "no_save_rng"):
        return False
    return not is_on(args, "no_load_rng") and not is_on(args, "finetune")


def _require_optimizer(call: Mapping[str, Any], folder: Path) -> None:
    """ValueError if the optimizer is left out of what is asked for, but will be loaded."""
    if OPTIMIZER in call["sharded_state_dict"] or folder.name == RELEASE:
        return
    args = call.get("args")
    if args is not None:  # Megatron-LM
        leaves_out = is_on(args, "no_save_optim")
        begins_anew = is_on(args, "no_load_optim") or is_on(args, "skip_train")
        option, remedy = "no_save_optim=True (--no-save-optim)", "--no-load-optim"
    else:
        args = call["ckpt_cfg"]
        leaves_out = not getattr(args, "save_optim", True)
        begins_anew = not getattr(args, "load_optim", True)
        option, remedy = "checkpoint.save_optim=False", "checkpoint.load_optim=False"
    if is_on(args, "finetune") and call.get("gpt_compat_layer_maps") is None:
        begins_anew = True
    if leaves_out and not begins_anew:
        raise RefusedByAllRanks(
            f"{option}: with it Megatron asks a checkpoint for no optimizer state either, and then "
            f"fails without it. Leave it out, or add {remedy} to begin with a new optimizer"
        )


def agreed(wanted: StateMapping, asked: Asked) -> tuple[StateDict, int]:
    """The state to read in place of `wanted`, and this rank. All ranks compare theirs with the
    checkpoint first: ValueError on all of them lists everything that does not fit on any, and rank
    0 prints what is left out."""
    with coordination() as ranks:
        (prepared, metadata, keys, _), every = ranks.run(
            "comparing the checkpoint with the model",
            lambda: _prepared(wanted, asked, ranks.rank),
            share=lambda result: result[-1],
        )
        seen = [message for message in every if message is not None]
        all_keys = keys_of_ranks(ranks, keys, [message.digest for message in seen])
    own = merge(message.mismatch for message in seen)
    unexpected = unexpected_keys(metadata.state_dict_metadata, all_keys, OPTIONAL)
    found = replace(own, unexpected=unexpected)
    errors = refused(found, all_keys, asked.is_strict, asked.strictness)
    if errors:
        lines = (f"the model does not fit {asked.folder}:", errors.describe(), *advice(errors))
        raise RefusedByAllRanks("\n".join(lines))
    split = frozenset[str]().union(*(message.split for message in seen))
    stored = generators.stored_split(metadata.state_dict_metadata)
    is_same_split = not split or split == stored
    has_generators = is_same_split and all(message.has_generators for message in seen)
    if not has_generators:
        prepared.pop(_RNG, None)
    if ranks.rank == 0:
        for line in (
            *_remarks(asked.folder, has_generators, stored),
            *printed(found, asked.folder, asked.strictness),
        ):
            print(line, flush=True)
    return prepared, ranks.rank


def _remarks(folder: Path, has_generators: bool, stored: frozenset[str]) -> Iterator[str]:
    """A line about generators that keep their seeds. stored: as of `generators.stored_split`."""
    if not has_generators:
        what = "RNG states of another split of the model" if stored else "no RNG states"
        yield f"{folder} has {what}. This run's generators keep their seeds"


def wrapped_to_evaluate(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wraps the model for `--skip-train` too. Megatron-LM leaves the wrapper out then, and the
    names and shapes of an unwrapped model are not those of an `fsdp_dtensor` checkpoint."""
    run = sys.modules["megatron.training.global_vars"].get_args()
    call = inspect.signature(original).bind(*args, **kwargs)
    if run.use_megatron_fsdp and run.skip_train and run.ckpt_format == "fsdp_dtensor":
        call.arguments["wrap_with_ddp"] = True
    return original(*call.args, **call.kwargs)


def _as_asked(state: StateMapping, wanted: StateMapping, rank: int) -> StateDict:
    """The state that was read, in the form of `wanted`: with its model chunks, and in its tensors.
    Generator states that were not read are those of `wanted`."""
    read = {key: state[key] for key in (MODEL, OPTIMIZER) if key in state}
    own = renamed_like(read, (key for _, _, key in entries(wanted)))
    state = {**state, **own}
    result = {key: value for key, value in state.items() if key != MODEL}
    for key in wanted:
        if key == MODEL or _CHUNK.fullmatch(key):
            result[key] = taken_over(wanted[key], state[MODEL])
    if OPTIMIZER in wanted:
        result[OPTIMIZER] = from_stored(state[OPTIMIZER], wanted[OPTIMIZER], rank)
    if _RNG in wanted:
        states = result.get(_RNG, wanted[_RNG])
        result[_RNG] = None if states is None else generators.at_shared_places(states)
    return result


def _prepared(
    wanted: StateMapping, asked: Asked, rank: int
) -> tuple[StateDict, Metadata, tuple[str, ...], _Found]:
    """The state to read in place of `wanted`, in new containers; the checkpoint's metadata; the
    keys that this rank asks for; and its message to the others."""
    metadata = folders.read_metadata(asked.folder.parent, asked.folder)
    state = merged_chunks(wanted)
    if state.get(_RNG, {}) is None:  # Megatron-Bridge from 0.6 on, under another split
        del state[_RNG]
    parts = to_stored(
        {key: state[key] for key in (MODEL, OPTIMIZER) if key in state}, rank, is_loading=True
    )
    parts = renamed_like(parts, metadata.state_dict_metadata)
    fit(parts, metadata, asked.vocab_size)
    if asked.is_strict and OPTIMIZER in parts and not _has_optimizer(metadata):
        raise RefusedByAllRanks(
            f"{asked.folder} has no optimizer state, as if it was saved with --no-save-optim. Add "
            "--no-load-optim (Megatron-Bridge: checkpoint.load_optim=False) to begin with a new "
            "optimizer and schedule"
        )
    leaves = flatten(parts)
    keys = tuple(sorted(leaves))
    stored = metadata.state_dict_metadata
    states = {}
    own_states = state.get(_RNG, {})
    for place, own in own_states.items():
        found = generators.stored_place(place, _stores(stored, len(own)))
        if found is not None:
            states[found] = own
    if states:
        state[_RNG] = states
    placed = len(states) == len(own_states)
    split = generators.split_of(own_states)
    message = _Found(placed, split, compare(leaves, metadata), digest_of(keys))
    return {**state, **parts}, metadata, keys, message


def _stores(stored: Iterable[str], count: int) -> Callable[[str], bool]:
    """A function of a place that returns True if `count` generator states are stored there."""
    return lambda place: _stored_entries(stored, place) == count


def _has_optimizer(metadata: Metadata) -> bool:
    return any(key.startswith(f"{OPTIMIZER}.") for key in metadata.state_dict_metadata)


def _stored_entries(stored: Iterable[str], place: str) -> int:
    """The number of generator states in the stored list of a place, a pipeline and tensor-parallel
    rank."""
    start = f"{_RNG}.{place}."
    numbers = {key.removeprefix(start).split(".")[0] for key in stored if key.startswith(start)}
    return len(numbers)
