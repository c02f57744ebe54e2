"""Replacements for methods of core's `DistributedOptimizer` and for functions that make optimizers.

`compat/table.py` lists them; `install()`, or a wrapper's constructor, puts them in place. They act
only when the model chunks are ours, and otherwise call the original. The inner optimizer (torch
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

from ...build.shard_attributes import params_of
from ...checkpoint.coordination import coordination
from ...core.engine.engine import FsdpEngine
from ...core.problems import RefusedByAllRanks, raise_problems
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
from . import emerging, group_options, lion, optimizer_state
from .param_scheduler import schedule_of

# In the place of core's functions (`compat/table.py`).


def _param_groups(
    original: Original, model_chunks: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Core's parameter groups, after the config was checked and completed. For Muon and Lion each
    group is split in two.

    Core calls this first for every kind of optimizer. ValueError lists unsupported options. The
    inner optimizer is made next: there some of them would fail with errors that do not name
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
    # Core matches overrides against parameter names. Those of the inner wrapper are the same as
    # under Megatron's DDP; those of the outer one have one "module." more.
    named = [chunk.module if chunk in ours else chunk for chunk in model_chunks]
    groups = original(named, *args, **kwargs)
    if asked is None:
        return groups
    return emerging.prepared(groups, ours, asked)


def _problems(config: Any, ours: ModelChunks) -> list[str]:
    """Problems of an optimizer's config with any of the model chunks."""
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
    """Sets options of an optimizer config that must have a certain value; rank 0 prints them."""
    changes = settle(OPTIMIZER, {"optimizer": config})
    if changes and dist.get_rank() == 0:
        text = ", ".join(f"{change.option}={change.after}" for change in changes)
        print(
            f"Megatron's optimizer with FullyShardedDataParallel: enabled automatically: {text}",
            flush=True,
        )


def _offload_problems(config: Any, engines: Sequence[FsdpEngine]) -> list[str]:
    """A problem if core's offload is on, but a model chunk was wrapped without offload. The place
    of main weights is decided when a model is wrapped."""
    if not is_on(config, CORES_OFFLOAD) or all(engine.config.offload for engine in engines):
        return []
    return [
        f"{CORES_OFFLOAD}=True: the model was wrapped with main weights and optimizer state on the "
        f"device. Set {OFFLOAD}=True in the DDP config, or {CORES_OFFLOAD}=False for no offload"
    ]


def _precision_problems(config: Any, chunks: ModelChunks) -> list[str]:
    """Conflicts between the wrapper's dtypes and the optimizer's options."""
    policy = chunks[0].engine.config.policy
    trained = [g for chunk in chunks for g in chunk.engine.groups if g.key.requires_grad]
    dtypes = {policy.grads_dtype, *(group.main.dtype for group in trained)}
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
    """ValueError for sharded models. Before 0.18 core's own function for Muon asks for parameter
    groups under this name; it would then make Muon of shards."""
    if ours_among(model_chunks):
        raise ValueError(
            "optimizer='muon' with FullyShardedDataParallel: get_megatron_muon_optimizer needs "
            "whole matrices, but weights are sharded. Call get_megatron_optimizer"
        )
    return original(model_chunks, *args, **kwargs)


@for_ours
def _offload_state(ours: ModelChunks, self: Any) -> None:
    """Moves the optimizer's state to the host.

    Core moves main weights as well. Here they stay: gathers read them, also for generation."""
    runtime = ours[0].engine.runtime
    for shards in local_shards(self):
        park_state(shards, runtime)
    trim(runtime)


@for_ours
def _restore_state(ours: ModelChunks, self: Any) -> None:
    """Moves the optimizer's state back to the device."""
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
        # Core asserts that the inner optimizer is Adam, for checkpoints of core's own buffers. When
        # weights are sharded, the constructor does nothing else with it: so it is set afterwards.
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
    """Looks up core's process groups for an optimizer, and remembers them in the chunks.

    It also gives copies of an embedding on other pipeline stages the first stage's values, because
    core does not copy an embedding that starts on the meta device. Core calls this just before it
    makes the optimizer: no earlier call sees all model chunks."""
    groups = original(pg_collection, model_chunks, *args, **kwargs)
    for chunk in ours_among(model_chunks):
        chunk.optimizer_groups = groups
        shared = shared_embeddings([chunk.engine])
        if shared and chunk.config.init_model_with_meta_device:
            groups_of_stages = (m.embd_group for m in chunk.modules() if hasattr(m, "embd_group"))
            copy_from_first_stage(shared, next(groups_of_stages))
            chunk.engine.main_weights_changed(loaded=True)
    return groups


@for_ours
def _init_states(ours: ModelChunks, self: Any) -> None:
    """Makes the optimizer's state without a step. Core of 0.16.1 takes a step with zero gradients,
    which decays weights and advances Adam's count."""
    initialize_state(self.optimizer)


@for_ours
def _unscaling_data(ours: ModelChunks, self: Any) -> Any:
    """The gradients' local tensors. Core's check for inf is one fused kernel over plain tensors,
    and unscales them in place."""
    for chunk in ours:
        chunk.engine.gather.updates.order_compute()  # behind updates of an earlier step
    return [
        param.grad._local_tensor
        for group in self.optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    ]


@for_ours
def _param_name(ours: ModelChunks, self: Any, param: Any) -> Any:
    """The parameter's name in the whole model. Core of 0.16.1 numbers layers from the stage's
    first, and fails where two model chunks of a rank have the same names."""
    _look_up_names(ours, self)
    return self.param_to_name[param]


def _look_up_names(ours: ModelChunks, self: Any) -> None:
    if not hasattr(self, "param_to_name"):
        self.param_to_name, self.halved_names = optimizer_state.parameter_names(ours)


def _params_by_name(self: Any) -> dict[str, Any]:
    _look_up_names(our_chunks(self), self)  # core asks for no name on a frozen stage
    params = params_of(self.optimizer)
    return {self._param_name(param): param for param in params}


def _sharded_state(
    original: Original, self: Any, *args: Any, metadata: Any = None, **kwargs: Any
) -> Any:
    """The sharded state in the form `fsdp_dtensor`, the only one for sharded weights.

    Megatron-LM asks for this form only if `use_distributed_optimizer` is set, which a script that
    wraps the model itself may leave out."""
    if our_chunks(self):
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor", **(metadata or {})}
    return original(self, *args, metadata=metadata, **kwargs)


def _save_state(original: Original, self: Any, is_loading: bool = False) -> Any:
    """The optimizer's state and group options by parameter name, with halves split.

    State is made for every parameter, also before the first step, so that all ranks emit the same
    keys for the same parameters."""
    if not our_chunks(self):
        return original(self, is_loading)
    initialize_state(self.optimizer)
    for chunk in self.model_chunks:
        chunk.engine.to_sharded()
    params = _params_by_name(self)
    state = original(self, is_loading)
    cut = optimizer_state.split_halves(state[optimizer_state.STATE], params, self.halved_names)
    return {**state, optimizer_state.STATE: cut}


def _load_state(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Loads what `_save_state` returned, or what was read into it: values sharded as they are here.
    A dict without group options goes to core's method unchanged. Collective over all ranks."""
    if not our_chunks(self) or optimizer_state.META not in state_dict:
        original(self, state_dict)
        return
    initialize_state(self.optimizer)
    params = _params_by_name(self)
    own = {name: self.optimizer.state[param] for name, param in params.items()}
    state = optimizer_state.join_halves(
        state_dict[optimizer_state.STATE], own, params, self.halved_names
    )
    meta = optimizer_state.with_one_count(state_dict[optimizer_state.META])
    options = _resumed_options(self, meta)
    groups = []
    for group, chosen in zip(self.optimizer.param_groups, options, strict=True):
        groups.append({**chosen, "params": [self.param_to_name[p] for p in group["params"]]})
    original(self, {optimizer_state.STATE: state, "param_groups": groups})


def _resumed_options(self: Any, meta: optimizer_state.ByName) -> list[dict[str, Any]]:
    """The options of the optimizer's groups after a load. Collective over all ranks.

    All ranks have the same groups, but a group may have parameters on some of them only. So ranks
    exchange what the checkpoint has of their parameters, and decide alike. Rank 0 prints what
    changes; ValueError on all ranks if the checkpoint's groups do not fit."""
    groups = self.optimizer.param_groups
    with coordination() as ranks:
        _, every = ranks.run(
            "reading the options of parameter groups",
            lambda: group_options.stored(groups, self.param_to_name, meta),
            share=lambda found: found,
        )
    stored = group_options.merged(one for found in every for one in found or ())
    resumed = group_options.resumed(groups, stored, emerging.given(self.config), schedule_of(self))
    raise_problems("The checkpoint's optimizer state", resumed.problems, RefusedByAllRanks)
    if dist.get_rank() == 0:
        for line in resumed.remarks:
            print(f"optimizer state: {line}", flush=True)
    return resumed.options


@for_ours
def _reload(ours: ModelChunks, self: Any, *args: Any, **kwargs: Any) -> None:
    """Does nothing. Core copies model weights to main weights after a load without the optimizer;
    here a load writes the main weights themselves. Core of 0.18 refuses to reload under FSDP."""
