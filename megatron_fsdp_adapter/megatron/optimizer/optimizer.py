"""The seam to Megatron's optimizer: the one place that adapts it, while no file of it is edited.

`install()` replaces a few methods of core's `DistributedOptimizer` by versions that act only when
the model chunks are ours, and hand over to the original otherwise. The inner optimizer (torch
AdamW, TE or apex FusedAdam) is made to step on local tensors (`optim/step.py`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer

from ...core.engine.engine import FsdpEngine
from ...core.problems import raise_problems
from ...optim.residency import Residency
from ...optim.step import adopt, initialize_state
from ...rollout.release import local_shards, park_state, take_state, trim
from ...state.module_weights import copy_from_first_stage, shared_embeddings
from ..compat.patches import Original
from ..inner_module import ModelChunks, for_ours, our_chunks, ours_among
from ..options.rules import Joined, is_on, problems
from ..options.settings import OPTIMIZER, settle
from ..options.support import CORES_OFFLOAD, LION, OPTIMIZER_CONFIG_RULES
from ..options.table import OFFLOAD
from . import emerging, lion, optimizer_state

# In the place of core's functions (`compat/table.py`).


def _param_groups(
    original: Original, model_chunks: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """The first thing that core does for an optimizer of any kind. An unsupported option is refused
    here: the inner optimizer is made next, and some options fail there, in ways that do not name
    them."""
    ours = ours_among(model_chunks)
    if not ours:
        return original(model_chunks, *args, **kwargs)
    config = kwargs["config"] if "config" in kwargs else args[0]
    asked = emerging.asked_for(config)
    raise_problems(
        "Megatron's optimizer with FullyShardedDataParallel",
        _problems(emerging.given(config), ours),
    )
    _complete(config)
    # Overrides go by names. Those under DDP are the inner wrapper's, one "module." shorter.
    named = [chunk.module if chunk in ours else chunk for chunk in model_chunks]
    groups = original(named, *args, **kwargs)
    if asked is None:
        return groups
    return emerging.prepared(groups, ours, asked)


def _problems(config: Any, ours: ModelChunks) -> list[str]:
    """Problems of an optimizer's config, with each of the model chunks."""
    found: list[str] = []
    for chunk in ours:
        found += problems(Joined(chunk.ddp_config, config), OPTIMIZER_CONFIG_RULES)
    found = list(dict.fromkeys(found))  # chunks share most of them
    if config.optimizer == LION:
        found += lion.problems(config)
    found += _precision_problems(config, ours)
    found += _offload_problems(config, [chunk.engine for chunk in ours])
    return found


def _complete(config: Any) -> None:
    """Sets in an optimizer config what must be so and is not, and prints it."""
    changes = settle(OPTIMIZER, {"optimizer": config})
    if changes and dist.get_rank() == 0:
        text = ", ".join(f"{change.option}={change.after}" for change in changes)
        print(
            f"Megatron's optimizer with FullyShardedDataParallel: enabled automatically: {text}",
            flush=True,
        )


def _offload_problems(config: Any, engines: Sequence[FsdpEngine]) -> list[str]:
    """Problems of offload: the place of main weights is decided when a model is wrapped."""
    if not is_on(config, CORES_OFFLOAD) or all(engine.config.offload for engine in engines):
        return []
    return [
        f"{CORES_OFFLOAD}=True: the model was wrapped with main weights and optimizer state on the "
        f"device. Set {OFFLOAD}=True in the DDP config, and {CORES_OFFLOAD} to False."
    ]


def _precision_problems(config: Any, chunks: ModelChunks) -> list[str]:
    """Conflicts between the wrapper's dtypes and the optimizer's options."""
    policy = chunks[0].engine.config.policy
    trained = [g for chunk in chunks for g in chunk.engine.groups if g.key.requires_grad]
    dtypes = {policy.grads_dtype, *(group.main_dtype for group in trained)}
    is_aware = config.optimizer == "adam" and config.use_precision_aware_optimizer
    if not is_aware:
        if dtypes == {torch.float32}:
            return []
        names = sorted(map(str, dtypes))
        unset = "leave megatron_fsdp_main_params_dtype and megatron_fsdp_main_grads_dtype unset"
        if config.optimizer != "adam":
            return [
                f"optimizer={config.optimizer!r}: main weights and gradients are in {names}, but "
                f"it supports only float32. {unset}"
            ]
        return [
            f"use_precision_aware_optimizer=False: main weights and gradients are in {names}, but "
            "Adam without it supports only float32. Set it to True (needs Transformer Engine), or "
            f"{unset}"
        ]
    found = []
    configured = {
        "main_grads_dtype": policy.grads_dtype,
        "main_params_dtype": policy.main_params_dtype,
    }
    for option, dtype in configured.items():
        chosen = getattr(config, option)
        if chosen not in (torch.float32, dtype):
            found.append(
                f"{option}={chosen}: megatron_fsdp_{option} of the DDP config is {dtype}. Set them "
                f"alike, or leave {option} at torch.float32"
            )
    if core_optimizer.USING_PYTORCH_OPTIMIZER:
        found.append(
            "use_precision_aware_optimizer=True: it needs Transformer Engine's FusedAdam, which "
            "cannot be imported. Install Transformer Engine, or set it to False"
        )
    return found


def _refuse_whole_matrices(
    original: Original, model_chunks: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Core's Muon asks for parameter groups by a name of its own, and would be made on shards."""
    if ours_among(model_chunks):
        raise ValueError(
            "optimizer='muon' with FullyShardedDataParallel: get_megatron_muon_optimizer needs "
            "whole matrices, but weights are sharded. Call get_megatron_optimizer"
        )
    return original(model_chunks, *args, **kwargs)


@for_ours
def _offload_state(ours: ModelChunks, self: Any) -> None:
    """Main weights, which core moves as well, stay: gathers read them, also for generation."""
    runtime = ours[0].engine.runtime
    for shards in local_shards(self):
        park_state(shards, runtime)
    trim(runtime)


@for_ours
def _restore_state(ours: ModelChunks, self: Any) -> None:
    for shards in local_shards(self):
        take_state(shards)


def _init(
    original: Original,
    self: Any,
    optimizer: Any,
    config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    self.model_chunks = kwargs.get("model_chunks", [])
    ours = our_chunks(self)
    if not ours or optimizer is None or config.optimizer == "adam":
        original(self, optimizer, config, *args, **kwargs)
    else:
        # Core asserts that it is Adam, for checkpoints of its own buffers, and does nothing more
        # with it when weights are sharded.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*there is no optimizer")
            original(self, None, config, *args, **kwargs)
        self.optimizer = optimizer
        self.is_stub_optimizer = False
    if not ours or optimizer is None:
        return
    engines = [chunk.engine for chunk in ours]
    asked = emerging.asked_for(config)
    begin = functools.partial(_begin_step, engines)
    if asked is None:
        adopt(optimizer, begin, residency=Residency(engines, optimizer))
    else:
        adopt(optimizer, begin, emerging.rule_of(ours, asked))


def _begin_step(engines: Sequence[FsdpEngine], optimizer: Any) -> None:
    for engine in engines:
        engine.gather.begin_step()


def _remember_groups(
    original: Original,
    pg_collection: Any,
    model_chunks: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Core is about to make an optimizer, and has looked up the groups for it. All chunks are there
    now, so that copies of an embedding on other pipeline stages can get its values: core copies
    none that starts on the meta device."""
    groups = original(pg_collection, model_chunks, *args, **kwargs)
    for chunk in ours_among(model_chunks):
        chunk.optimizer_groups = groups
        shared = shared_embeddings([chunk.engine])
        if shared and chunk.config.init_model_with_meta_device:
            stages = (own.embd_group for own in chunk.modules() if hasattr(own, "embd_group"))
            copy_from_first_stage(shared, next(stages))
            chunk.engine.main_weights_changed(loaded=True)
    return groups


@for_ours
def _init_states(ours: ModelChunks, self: Any) -> None:
    """0.16.1 takes a step with zero gradients, which decays weights and advances Adam's count."""
    initialize_state(self.optimizer)


@for_ours
def _unscaling_data(ours: ModelChunks, self: Any) -> Any:
    """Local tensors: the inf check is one fused kernel over plain tensors. It writes them."""
    for chunk in ours:
        chunk.engine.gather.updates.order_compute()
    return [
        param.grad._local_tensor
        for group in self.optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    ]


@for_ours
def _param_name(ours: ModelChunks, self: Any, param: Any) -> Any:
    """Names of the whole model; 0.16.1 numbers layers from the stage's first, and fails where two
    model chunks of a rank have the same names."""
    _look_up_names(ours, self)
    return self.param_to_name[param]


def _look_up_names(ours: ModelChunks, self: Any) -> None:
    if not hasattr(self, "param_to_name"):
        self.param_to_name, self.halved_names = optimizer_state.parameter_names(ours)


def _params_by_name(self: Any) -> dict[str, Any]:
    _look_up_names(our_chunks(self), self)  # core asks for no name on a stage that is frozen
    params = [param for group in self.optimizer.param_groups for param in group["params"]]
    return {self._param_name(param): param for param in params}


def _sharded_state(
    original: Original, self: Any, *args: Any, metadata: Any = None, **kwargs: Any
) -> Any:
    """The sharded state, in the one form that there is for sharded weights. Megatron-LM names it
    only if its argument `use_distributed_optimizer` is set, which a script that wraps the model
    itself may leave out."""
    if our_chunks(self):
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor", **(metadata or {})}
    return original(self, *args, metadata=metadata, **kwargs)


def _save_state(original: Original, self: Any, is_loading: bool = False) -> Any:
    """Every rank emits the same keys for the same parameters: state exists for each of them, steps
    or no steps."""
    if not our_chunks(self):
        return original(self, is_loading)
    initialize_state(self.optimizer)
    for chunk in self.model_chunks:
        chunk.engine.to_sharded()
    params = _params_by_name(self)
    state = original(self, is_loading)
    cut = optimizer_state.in_pieces(state[optimizer_state.STATE], params, self.halved_names)
    return {**state, optimizer_state.STATE: cut}


def _load_state(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Loads what `_save_state` returned, or a load of it, with values sharded as they are here."""
    if not our_chunks(self) or optimizer_state.META not in state_dict:
        original(self, state_dict)
        return
    initialize_state(self.optimizer)
    params = _params_by_name(self)
    own = {name: self.optimizer.state[param] for name, param in params.items()}
    state = optimizer_state.joined(
        state_dict[optimizer_state.STATE], own, params, self.halved_names
    )
    meta = optimizer_state.with_own_split(
        optimizer_state.with_one_count(state_dict[optimizer_state.META]),
        self.optimizer.param_groups,
        self.param_to_name,
    )
    original(self, {optimizer_state.STATE: state, optimizer_state.META: meta})


@for_ours
def _reload(ours: ModelChunks, self: Any, *args: Any, **kwargs: Any) -> None:
    """Main weights should follow the model's, which were loaded without the optimizer. Here a load
    writes the main weights themselves; 0.18 refuses to reload under FSDP."""
