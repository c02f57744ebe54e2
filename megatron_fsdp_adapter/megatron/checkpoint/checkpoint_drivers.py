"""Megatron-LM's and Megatron-Bridge's own checkpoint code, where its `fsdp_dtensor` path stops.

It saves and loads what the wrapper and the optimizer give it, which needs no help. Four things it
does not do, and functions of it are wrapped for them:

- several model chunks of a rank (interleaved pipelines): it looks for one. They are merged, which
  their global keys allow, before a save and a load, and taken apart again after a load;
- the state of random generators, which it stores for each pipeline and tensor-parallel rank (with
  `data_parallel_random_init` as many as there are data-parallel ranks), when there was no such rank
  or another number of them: the generators of this run stay as they were seeded, and that is
  printed;
- another padded vocabulary: rows that are not padding are read;
- an evaluation alone (`--skip-train`): the model is wrapped for it too.

And what a load asks for and the checkpoint does not have, or has in another shape, is one error
that lists everything, where torch's names the first. Nothing is imported: a driver that is not
loaded is not used.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...checkpoint import folders
from ...checkpoint.coordination import coordination
from ...checkpoint.fitting import fit, taken_over
from ...checkpoint.state import (
    StateDict,
    StateMapping,
    compare,
    flatten,
    from_stored,
    to_stored,
)
from ...checkpoint.training import OPTIMIZER, merged
from ...state.names import MODEL
from ...state.sharded_state_dict import ShardedStateDict
from ..compat.patches import Original
from ..compat.table import BRIDGE, LM
from ..options.rules import is_on

_CHUNK = re.compile(r"model\d+")
_RNG = "rng_state"


_Asked = tuple[str, bool, int | None]
"""Arguments of a call that reads a checkpoint: the folder, whether missing keys are an error, and
the number of real tokens, None where it is not known."""


_Found = tuple[bool, tuple[str, ...]]
"""A rank's message to the others: whether the generator states that it asks for are stored, and the
keys that are not, if that is allowed."""


def _of_megatron_lm(call: Mapping[str, Any]) -> _Asked:
    module: Any = sys.modules[LM]
    args = call["args"]
    wanted = SimpleNamespace(load=call["load_dir"], ckpt_step=getattr(args, "ckpt_step", None))
    tokenizer = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_TOKENIZER", None)
    return (
        module.get_load_checkpoint_path_by_args(wanted),
        is_on(args, "strict_fsdp_dtensor_load"),
        getattr(tokenizer, "vocab_size", None),
    )


def _of_bridge(call: Mapping[str, Any]) -> _Asked:
    module: Any = sys.modules[BRIDGE]
    folder = call.get("checkpoint_path_override")  # from 0.4 on; there is no iteration then
    if folder is None:
        folder = module.get_checkpoint_name(call["load_dir"], call["iteration"], call["release"])
    model_config = getattr(call.get("cfg"), "model", None)
    return (
        folder,
        is_on(call["ckpt_cfg"], "strict_fsdp_dtensor_load"),
        getattr(model_config, "vocab_size", None),
    )


def merged_chunks(state: StateMapping) -> StateDict:
    """`state` with what it has under "model0", "model1", ... under "model" instead.

    Raises ValueError if two chunks have a key in common: they were not made by our wrapper.
    """
    chunks = [key for key in state if _CHUNK.fullmatch(key)]
    result = {key: value for key, value in state.items() if key not in chunks}
    if chunks:
        result[MODEL] = merged(state[key] for key in chunks)
    return result


def _preprocess(original: Original, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    call.arguments["raw_state_dict"] = merged_chunks(call.arguments["raw_state_dict"])
    return original(*call.args, **call.kwargs)


def _load(
    asked_of: Callable[[Mapping[str, Any]], _Asked],
    original: Original,
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    wanted = call.arguments["sharded_state_dict"]
    models = () if wanted is None else wanted.get("_model", ())
    if not any(isinstance(model, ShardedStateDict) for model in models):
        return original(*args, **kwargs)
    name, strict, vocab_size = asked_of(call.arguments)
    folder = Path(name)
    if not (folder / ".metadata").is_file():
        return original(*args, **kwargs)  # it reports what is missing
    with coordination() as ranks:
        rank = ranks.rank
        (prepared, _), every = ranks.run(
            "comparing the checkpoint with the model",
            lambda: _prepared(wanted, folder, strict, vocab_size, rank),
            share=lambda result: result[1],
        )
    seen = [found for found in every if found is not None]
    has_generators = all(is_stored for is_stored, _ in seen)
    if not has_generators:
        prepared.pop(_RNG, None)
    if rank == 0:
        missing = sorted({key for _, keys in seen for key in keys})
        for line in _remarks(folder, has_generators, missing):
            print(line, flush=True)
    call.arguments["sharded_state_dict"] = prepared
    state, *others = original(*call.args, **call.kwargs)
    if state is not None:
        state = _as_asked(state, wanted, rank)
    return (state, *others)


def _remarks(folder: Path, has_generators: bool, missing: Sequence[str]) -> Iterator[str]:
    """Lines about state that keeps its initial value, one for each kind."""
    if not has_generators:
        yield (
            f"{folder} has RNG states of another split of the model. This run's generators keep "
            "their seeds"
        )
    if missing:
        yield (
            f"{len(missing)} keys are not in {folder} and keep their initial values, because "
            f"strict_fsdp_dtensor_load is off: {', '.join(missing)}"
        )


def wrapped_to_evaluate(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wraps the model for `--skip-train` too. Megatron-LM leaves the wrapper out then, and the
    names and shapes of an unwrapped model are not those of an `fsdp_dtensor` checkpoint."""
    run = sys.modules["megatron.training.global_vars"].get_args()
    call = inspect.signature(original).bind(*args, **kwargs)
    if run.use_megatron_fsdp and run.skip_train and run.ckpt_format == "fsdp_dtensor":
        call.arguments["wrap_with_ddp"] = True
    return original(*call.args, **call.kwargs)


load_of_megatron_lm = functools.partial(_load, _of_megatron_lm)
load_of_bridge = functools.partial(_load, _of_bridge)


def _as_asked(state: StateMapping, wanted: StateMapping, rank: int) -> StateDict:
    """The values that were read, with the model's dicts and the tensors that the caller gave."""
    result = {key: value for key, value in state.items() if key != MODEL}
    for key in wanted:
        if key == MODEL or _CHUNK.fullmatch(key):
            result[key] = taken_over(wanted[key], state[MODEL])
    if OPTIMIZER in wanted:
        result[OPTIMIZER] = from_stored(state[OPTIMIZER], wanted[OPTIMIZER], rank)
    if _RNG in wanted:
        result.setdefault(_RNG, wanted[_RNG])
    return result


def _prepared(
    wanted: StateMapping, folder: Path, strict: bool, vocab_size: int | None, rank: int
) -> tuple[StateDict, _Found]:
    """The state to read in place of `wanted`, with containers of its own. ValueError lists what
    does not fit."""
    metadata = folders.read_metadata(folder.parent, folder)
    asked = merged_chunks(wanted)
    if asked.get(_RNG, {}) is None:  # Megatron-Bridge from 0.6 on, under another split
        del asked[_RNG]
    asked_parts = {key: asked[key] for key in (MODEL, OPTIMIZER) if key in asked}
    parts = to_stored(asked_parts, rank, is_loading=True)
    fit(parts, metadata, vocab_size)
    mismatch = compare(flatten(parts), metadata)
    if (strict and mismatch.missing) or mismatch.different:
        raise ValueError(f"the model does not fit {folder}:\n{mismatch.describe()}")
    stored = metadata.state_dict_metadata
    generators = asked.get(_RNG, {})
    placed = all(_stored_entries(stored, at) == len(found) for at, found in generators.items())
    return {**asked, **parts}, (placed, mismatch.missing)


def _stored_entries(stored: Iterable[str], place: str) -> int:
    """Number of generator states that are stored for a place: a list, by number."""
    start = f"{_RNG}.{place}."
    numbers = {key.removeprefix(start).split(".")[0] for key in stored if key.startswith(start)}
    return len(numbers)
