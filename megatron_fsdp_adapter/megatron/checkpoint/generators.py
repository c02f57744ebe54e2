"""Generator states in `fsdp_dtensor` checkpoints, of each rank under expert parallelism.

Megatron stores one list of generator states for each pipeline and tensor-parallel rank, at the
place "(pp, tp)". One data-parallel rank writes it and all of them read it. With expert parallelism
these ranks draw different random numbers (dropout in experts, jitter of the router). So here each
has a place of its own, "(pp, tp, dp)", as in the `torch_dist` checkpoints of core 0.16 and of
Megatron-Bridge.

dp is the rank among data and context-parallel ranks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron.core import parallel_state

from ..compat.patches import Original

_PLACE = re.compile(r"\((\d+), (\d+)(?:, \d+)?\)")
_STORED = re.compile(r"rng_state\.(\([^)]*\))\.")


def of_each_rank(original: Original, *args: Any, **kwargs: Any) -> Any:
    """This rank's generator states for a checkpoint. With expert parallelism, those for
    `fsdp_dtensor` have a place for each rank."""
    states = original(*args, **kwargs)
    if not isinstance(states, dict):
        return states  # another format
    call = inspect.signature(original).bind(*args, **kwargs)
    states = _at_own_place(states, call)
    expert_ranks, dp_rank = _expert_ranks(call)
    if expert_ranks == 1 or any(len(found) > 1 for found in states.values()):
        return states  # with `data_parallel_random_init` the list has the states of all ranks
    return {f"{place[:-1]}, {dp_rank})": found for place, found in states.items()}


def _at_own_place(states: dict[str, Any], call: inspect.BoundArguments) -> dict[str, Any]:
    """The states at the place of this pipeline and tensor-parallel rank.

    Megatron-LM's load passes no groups, and then every rank asks for the states of place "(0, 0)"
    (0.16.1 to main of August 2026). Its save passes them.
    """
    names = ("pp_group", "tp_group")
    if not all(name in call.signature.parameters for name in names):
        return states  # Megatron-Bridge always passes a collection of groups
    if all(call.arguments.get(name) is not None for name in names):
        return states
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    return {f"({pp_rank}, {tp_rank})": found for found in states.values()}


def _expert_ranks(call: inspect.BoundArguments) -> tuple[int, int]:
    """The number of expert-parallel ranks, and this rank's number among data and context-parallel
    ranks, from the call's groups if it has them."""
    groups = call.arguments.get("pg_collection")
    if groups is not None:  # Megatron-Bridge
        return groups.ep.size(), groups.dp_cp.rank()
    group = call.arguments.get("dp_cp_group")  # Megatron-LM from 0.19 on
    if group is not None:
        dp_rank = group.rank()
    else:
        dp_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return parallel_state.get_expert_model_parallel_world_size(), dp_rank


def _shared(place: str) -> str:
    """The place that data-parallel ranks share, of the place of one of them; `place` itself if it
    has another form."""
    match = _PLACE.fullmatch(place)
    return f"({match[1]}, {match[2]})" if match else place


def split_of(places: Iterable[str]) -> frozenset[str]:
    """The pipeline and tensor-parallel ranks of `places`, as the places that data-parallel ranks
    share."""
    return frozenset(_shared(place) for place in places)


def stored_split(keys: Iterable[str]) -> frozenset[str]:
    """The pipeline and tensor-parallel ranks that a checkpoint with these keys has states of."""
    found = (_STORED.match(key) for key in keys)
    return split_of(match[1] for match in found if match)


def stored_place(place: str, is_stored: Callable[[str], bool]) -> str | None:
    """The place to read in a checkpoint for the states that are asked for at `place`; None if it
    has none.

    A run with expert parallelism also reads the one list of a checkpoint that was saved without
    places for each rank. A run without reads the list of the first rank, as Megatron does.
    """
    shared = _shared(place)
    candidates = [place]
    if place != shared:
        candidates.append(shared)
    elif _PLACE.fullmatch(place):
        candidates.append(f"{place[:-1]}, 0)")
    for candidate in candidates:
        if is_stored(candidate):
            return candidate
    return None


def at_shared_places(states: Mapping[str, Any]) -> Mapping[str, Any]:
    """The states of this rank at the places where Megatron looks for them after a load; `states`
    itself if they are there."""
    if all(place == _shared(place) for place in states):
        return states
    return {_shared(place): found for place, found in states.items()}
