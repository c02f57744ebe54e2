"""Names of Megatron-Core, Megatron-LM, Megatron-Bridge and verl that the package replaces, in one
table for each purpose.

Replacements are named "module:name" and looked up when they are put in place (`patches.py`). CPU
mode has a table of its own (`launch/cpu_mode.py`), and so have the hooks into Megatron-LM's
arguments (`launch/megatron_lm.py`), which need a command line.
"""

from __future__ import annotations

import builtins
import shutil
from collections.abc import Callable
from typing import Any

from . import patches
from .patches import Patch, makes, stands

FSDP = "megatron.core.distributed.fsdp"
WRAPPER = f"{FSDP}.mcore_fsdp_adapter"
"""The module in which core defines its FSDP wrapper."""
LM = "megatron.training.checkpointing"
BRIDGE = "megatron.bridge.training.checkpointing"
CONVERSION = "megatron.bridge.models.conversion.model_bridge"

_CORE = "megatron.core"
_OPTIMIZER = f"{_CORE}.optimizer"
_DISTRIBUTED = f"{_OPTIMIZER}.distrib_optimizer"
_SCHEDULER = f"{_CORE}.optimizer_param_scheduler"


def _method(name: str, ours: str, *parameters: str) -> Patch:
    """A method of core's `DistributedOptimizer`. parameters: by default only `self`."""
    return Patch(
        _DISTRIBUTED,
        f"DistributedOptimizer.{name}",
        f"megatron.optimizer.{ours}",
        parameters=parameters or ("self",),
    )


OPTIMIZER: tuple[Patch, ...] = (
    Patch(
        _OPTIMIZER, "_get_param_groups", "megatron.optimizer.optimizer:_param_groups",
        parameters=("model_chunks, config, ...",),
    ),
    Patch(  # 0.18 asks for the groups of all optimizers above
        f"{_OPTIMIZER}.muon", "_get_param_groups",
        "megatron.optimizer.optimizer:_refuse_whole_matrices",
        parameters=("...",), required=False,
    ),
    Patch(
        f"{_CORE}.process_groups_config",
        "ProcessGroupCollection.setup_process_groups_for_optimizer",
        "megatron.optimizer.optimizer:_remember_groups",
        parameters=("pg_collection, model_chunks, ...",),
    ),
    _method("offload_to_cpu", "optimizer:_offload_state"),
    _method("restore_from_cpu", "optimizer:_restore_state"),
    _method("__init__", "optimizer:_init", "self, optimizer, config, ..."),
    _method("get_grad_stats_parallel_group", "clipping:grad_stats_group"),
    _method(
        "get_grads_for_grad_norm or get_main_grads_for_grad_norm", "clipping:norm_grads",
        "self", "self, grad_norm_group",
    ),
    _method("clip_grad_norm", "clipping:clip", "self, clip_grad"),
    _method("step", "clipping:step"),
    _method("step_with_ready_grads", "clipping:step_with_norm"),
    _method("count_zeros", "clipping:count_zeros"),
    _method("_init_optimizer_states_with_dummy_values", "optimizer:_init_states"),
    _method("_collect_main_grad_data_for_unscaling", "optimizer:_unscaling_data"),
    _method("_copy_model_params_to_main_params", "optimizer:_reload", "self, ..."),
    _method("_param_name", "optimizer:_param_name", "self, param"),
    _method("sharded_state_dict", "optimizer:_sharded_state", "self, ..."),
    _method("sharded_param_state_fsdp_dtensor", "optimizer:_save_state", "self, is_loading"),
    _method("load_state_dict", "optimizer:_load_state", "self, state_dict"),
    Patch(
        _SCHEDULER, "OptimizerParamScheduler.__init__",
        "megatron.optimizer.param_scheduler:_init", parameters=("self, optimizer, ...",),
    ),
    Patch(
        _SCHEDULER, "OptimizerParamScheduler.load_state_dict",
        "megatron.optimizer.param_scheduler:_load", parameters=("self, state_dict",),
    ),
    Patch(
        f"{_CORE}.pipeline_parallel.fine_grained_activation_offload",
        "ChunkOffloadHandler.tensor_need_offloading_checker",
        "megatron.layers.activation_offload:_is_to_be_offloaded", parameters=("self, tensor",),
    ),
    Patch(
        _OPTIMIZER, "_get_megatron_optimizer_based_on_param_groups",
        "megatron.optimizer.emerging:_make_as_adam", parameters=("config, model_chunks, ...",),
    ),
    Patch(  # before 0.18 no optimizer takes another way
        _OPTIMIZER, "_get_megatron_emerging_optimizer",
        "megatron.optimizer.emerging:_make_emerging",
        parameters=("config, model_chunks, config_overrides, pg_collection",), required=False,
    ),
)  # fmt: skip
"""Patches of core's optimizers and of functions around their steps. Every wrapper needs them."""

_LAYERS = f"{_CORE}.tensor_parallel.layers"
FUSED_WGRAD = (
    Patch(
        _LAYERS,
        "fused_weight_gradient_mlp_cuda",
        "megatron.layers.fused_wgrad:products",
        makes,
        default=None,
    ),
    Patch(_LAYERS, "_grad_accum_fusion_available", True, stands),
)
"""Patches by which Megatron's linear layers fuse weight gradients without apex. With apex they keep
its functions."""


def _conversion(name: str, ours: str, required: bool = True) -> Patch:
    return Patch(
        CONVERSION,
        f"MegatronModelBridge.{name}",
        f"megatron.frameworks.bridge_weights:{ours}",
        required=required,
    )


BRIDGE_WEIGHTS = (
    _conversion("load_weights_hf_to_megatron", "_load"),
    _conversion("build_conversion_tasks", "_tasks"),
    _conversion("stream_weights_megatron_to_hf", "_stream"),
    _conversion("materialize_adapter_weights", "_adapters"),
    _conversion("_broadcast_shared_embeddings", "_tied"),
    _conversion("stream_weights_megatron_to_hf_quant", "_stream", required=False),  # from 0.4 on
    _conversion("build_export_fp8_tasks", "_fp8_tasks", required=False),  # likewise
)
"""Patches of Megatron-Bridge's conversion of a live model from and to Hugging Face."""

BASE_WEIGHTS = (
    Patch(BRIDGE, "_load_base_checkpoint", "megatron.frameworks.peft_base_weights:load"),
)
"""Patches of the reader of base weights, which Megatron-Bridge puts adapters on."""

_DRIVERS = "megatron.checkpoint.checkpoint_drivers"
_PATHS = "megatron.checkpoint.load_paths"


def _makes_models(module: str, name: str) -> Patch:
    ours = f"{_DRIVERS}:wrapped_to_evaluate"
    return Patch(module, name, ours, required=False, everywhere=True)


_GENERATORS = "megatron.checkpoint.generators:of_each_rank"

DRIVERS = (
    Patch(LM, "preprocess_fsdp_dtensor_state_dict", f"{_DRIVERS}:_preprocess"),
    Patch(BRIDGE, "preprocess_fsdp_dtensor_state_dict", f"{_DRIVERS}:_preprocess"),
    Patch(LM, "get_rng_state", _GENERATORS),
    Patch(BRIDGE, "get_rng_state", _GENERATORS),
    Patch(LM, "_load_base_checkpoint", "megatron.checkpoint.gpt_into_hybrid:load"),
    Patch(LM, "get_load_checkpoint_path_by_args", f"{_PATHS}:path_to_load"),
    Patch(LM, "cleanup_old_non_persistent_checkpoint", f"{_PATHS}:keep_newest"),
    Patch(
        BRIDGE,
        "load_fsdp_dtensor_checkpoint or _load_fsdp_dtensor_base_checkpoint",  # from 0.6 on; before
        f"{_DRIVERS}:load_of_bridge",
    ),
    _makes_models("megatron.training.training", "get_model"),
    _makes_models("megatron.training.models.dist_utils", "unimodal_build_distributed_models"),
)
"""Patches of Megatron-LM's and Megatron-Bridge's checkpoint code, where its own path stops."""


def _norm_of(module: str) -> Patch:
    return Patch(
        module,
        "calc_params_l2_norm",
        "megatron.optimizer.clipping:params_norm",
        parameters=("model, ...",),
        required=False,
        everywhere=True,
    )


NORMS = (
    _norm_of("megatron.training.utils"),
    _norm_of("megatron.bridge.training.utils.train_utils"),
)
"""Patches of the norm that `--log-params-norm` logs."""

_ENGINE = f"{FSDP}.src.megatron_fsdp"


def _helper(module: str, name: str) -> Patch:
    return Patch(
        f"{_ENGINE}.{module}",
        name,
        f"megatron.checkpoint.megatron_names:{name}",
        stands,
        required=False,
        everywhere=True,
    )


NAMES = (
    Patch(
        WRAPPER, "FullyShardedDataParallel",
        "megatron.wrapper.adapter:FullyShardedDataParallel", stands,
        everywhere=True,
    ),
    # 0.20 has two wrappers, and FullyShardedDataParallel is a function that makes one of them. The
    # name of its V2 stays: core's optimizer asks whether a model is one, and ours is none.
    Patch(
        WRAPPER, "FullyShardedDataParallelV1",
        "megatron.wrapper.adapter:FullyShardedDataParallel", stands,
        required=False, everywhere=True,
    ),
    # Megatron-Bridge unwraps models down to this class before it converts their weights. Core's own
    # fully_shard() keeps the original: it makes one, and the error is that of `CONSTRUCTORS`.
    Patch(
        f"{_ENGINE}.megatron_fsdp", "MegatronFSDP", "megatron.inner_module:ShardedModule", stands,
        required=False, everywhere=True, but_in=(f"{_ENGINE}.fully_shard",),
    ),
    Patch(
        "megatron.core.distributed.distributed_data_parallel_config",
        "DistributedDataParallelConfig",
        "megatron.options.ddp_config:DistributedDataParallelConfig", stands,
        required=False, everywhere=True,
    ),
    _helper("uneven_dtensor", "preprocess_state_dict_for_uneven_dtensor"),
    _helper("uneven_dtensor", "gather_uneven_dtensor_to_full_tensor"),
    _helper("uneven_dtensor", "redistribute_uneven_dtensor_to_replicated"),  # from 0.18
    _helper("uneven_dtensor", "uneven_dtensor_to_full_tensor"),  # likewise
    _helper("param_and_grad_buffer", "make_fsdp_dtensor"),
)  # fmt: skip
"""Patches of names that others import from core and from its bundled engine: the wrapper, for which
models are tested with isinstance, and helpers of checkpoint code. While they are in place the
bundled engine cannot be used."""

CONSTRUCTORS = tuple(
    Patch(
        module,
        f"{name}.__init__",
        "megatron.wrapper.no_sync_check:refusing",
        makes,
        required=False,
    )
    for module, name in (
        *((row.module, row.name) for row in NAMES[:3]),
        (WRAPPER, "FullyShardedDataParallelV2"),
    )
)
"""Patches of the constructors of the replaced classes, and of that of 0.20's other wrapper: code
that kept a reference to such a class, or to the function that makes one, cannot make a model with
it."""

_SAVES = "megatron.checkpoint.megatron_saves"
_BACKGROUND = "megatron.checkpoint.background_saves"
_OF_BRIDGE = f"{_SAVES}:bridge_saves_asynchronously"


def _saves(module: str, name: str, ours: str, why: str, **more: Any) -> Patch:
    return Patch(module, name, f"{_SAVES}:{ours}", makes, why=why, **more)


def _saves_asynchronously(module: str) -> Patch:
    return _saves(
        module,
        "get_async_strategy",
        "strategy",
        "saves asynchronously",
        required=f"{_SAVES}:saves_asynchronously",
    )


def _keeps_newest(module: str) -> Patch:
    return Patch(
        module,
        "cleanup_old_non_persistent_checkpoint",
        f"{_SAVES}:keep_newest",
        parameters=(
            "save_dir, leave_ckpt_num, do_async",
            "save_dir, leave_ckpt_num, do_async, max_iteration",  # Megatron-Bridge from 0.6.2 on
        ),
        required=False,
    )


def _of_bridge(name: str, ours: str, how: Callable[..., Any], does: str) -> Patch:
    why = f"{does} asynchronous saves"
    return Patch(BRIDGE, name, ours, how, required=_OF_BRIDGE, why=why)


SAVES = (
    _saves(LM, "torch", "torch_view", "writes checkpoints"),
    _saves(LM, "open_file or maybe_msc", "opens", "opens the tracker"),  # until 0.18; after
    _saves(LM, "shutil", "shutil_view", "deletes checkpoints", default=shutil),
    _keeps_newest(LM),
    _saves_asynchronously(LM),
    _saves_asynchronously("megatron.training.async_utils"),
    _saves(
        "megatron.bridge.training.state",
        "get_async_strategy",
        "strategy",
        "queues asynchronous saves",
        required=_OF_BRIDGE,
    ),
    _saves(BRIDGE, "torch", "torch_view", "writes checkpoints"),
    # From 0.6 on it takes these by name, and only the queue from a table.
    _of_bridge("FileSystemWriterAsync", f"{_BACKGROUND}:Target", stands, "writes"),
    _of_bridge("save_state_dict_async_plan", f"{_SAVES}:plan", makes, "plans"),
    _of_bridge(
        "save_state_dict_async_finalize", f"{_BACKGROUND}:Writing.finish", stands, "finishes"
    ),
    _saves(BRIDGE, "open", "opens", "opens the tracker", default=builtins.open),
    _saves(BRIDGE, "shutil", "shutil_view", "replaces its train state", default=shutil),
    _keeps_newest(BRIDGE),
)
"""Patches of globals by which Megatron-LM and Megatron-Bridge save. Where a row has two names, a
release has one of them."""

_RL = "megatron.frameworks.rl_frameworks"
VERL = "verl.utils.megatron_utils"
_VERL_ENGINE = "verl.workers.engine.megatron.transformer_impl"


def _moves(name: str, ours: str, first: str) -> Patch:
    return Patch(
        VERL,
        name,
        f"{_RL}:{ours}",
        parameters=(f"{first}, ...",),
        everywhere=True,
        why="moves memory to the host and back",
    )


def _exports(name: str, ours: str, parameters: str) -> Patch:
    """A method of verl's export of changed weights, which begins with release 0.9."""
    name = f"MegatronEngine.{name}"
    ours = f"{_RL}:{ours}"
    return Patch(_VERL_ENGINE, name, ours, parameters=(parameters,), required=False)


FRAMEWORKS = (
    _moves("offload_megatron_model_to_cpu", "offload_model", "models"),
    _moves("load_megatron_model_to_gpu", "load_model", "models"),
    _moves("offload_megatron_optimizer", "offload_optimizer", "optimizers"),
    _moves("load_megatron_optimizer", "load_optimizer", "optimizers"),
    Patch(
        VERL,
        "get_megatron_module_device",
        f"{_RL}:device_of_model",
        parameters=("models",),
        required=False,
        everywhere=True,
    ),
    _exports("_mcore_export_index", "export_index", "self"),
    _exports("get_per_tensor_param_delta_shard", "export_changes", "self, kwargs"),
    _exports("_hf_delta_entry", "export_entry", "self, name, spec, place, lidx, lval"),
    Patch(
        "nemo_rl.models.policy.workers.megatron_policy_worker",
        "MegatronPolicyWorkerImpl.move_optimizer",
        f"{_RL}:move_optimizer",
        parameters=("self, device",),
        required=False,
    ),
)
"""Patches of frameworks of reinforcement learning: memory while another engine generates, and the
weights that are sent to it."""


def _loop(name: str, does: str) -> Patch:
    return Patch(
        "megatron.training.training",
        name,
        f"megatron.elastic.loop:{name}",
        required="megatron.elastic.manager:is_asked",
        why=f"{does} with --fsdp-elastic",
    )


ELASTIC_LOOP = (
    _loop("get_train_valid_test_num_samples", "sizes datasets"),
    _loop("build_train_valid_test_data_loaders", "loads data"),
    _loop("setup_model_and_optimizer", "makes the optimizer"),
    _loop("train", "trains"),
    _loop("train_step", "takes a step"),
    _loop("save_checkpoint_and_time", "saves"),
)
"""Patches of Megatron-LM's loop, for replicas that may die and come back."""

LATE = (
    *BRIDGE_WEIGHTS,
    *BASE_WEIGHTS,
    *DRIVERS,
    *NORMS,
    *SAVES,
    *FRAMEWORKS,
    *ELASTIC_LOOP,
)
"""Patches of modules that are not imported for it: they may be loaded after `install()`."""
ALL = (*OPTIMIZER, *FUSED_WGRAD, *CONSTRUCTORS, *NAMES, *LATE)
"""All patches that `install()` puts in place."""


def installed() -> bool:
    """True if core's wrapper is ours: between `install()` and `uninstall()`."""
    return patches.is_installed(NAMES[0])


def install_beside_a_wrapper() -> bool:
    """Puts in place what a wrapper needs: the optimizer's patches, which leave other models alone;
    and if `install()` was called, also patches of modules that were imported since.

    Returns whether `install()` was called. The patches stay until `uninstall()`."""
    is_installed = installed()
    patches.install((*OPTIMIZER, *LATE) if is_installed else OPTIMIZER)
    return is_installed
