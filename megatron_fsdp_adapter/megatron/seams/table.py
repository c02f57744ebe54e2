"""Every name of Megatron-Core, -LM and -Bridge that the package replaces, by purpose.

Data only: ours is named "module:name" and looked up when it is put in place (`patches.py`). CPU
mode has a table of its own (`launch/cpu_mode.py`), and so have the hooks of Megatron-LM's arguments
(`launch/megatron_lm.py`), which know a command line.
"""

from __future__ import annotations

from .patches import Patch

_CORE = "megatron.core"
_OPTIMIZER = f"{_CORE}.optimizer"
_DISTRIBUTED = f"{_OPTIMIZER}.distrib_optimizer"


def _step(name: str, ours: str, *parameters: str) -> Patch:
    return Patch(
        _DISTRIBUTED, f"DistributedOptimizer.{name}", f"megatron.{ours}",
        parameters=parameters or ("self",),
    )  # fmt: skip


OPTIMIZER: tuple[Patch, ...] = (
    Patch(
        _OPTIMIZER, "_get_param_groups", "megatron.optimizer:_param_groups",
        parameters=("model_chunks, config, ...",),
    ),
    Patch(  # 0.18 asks for the groups of all optimizers above
        f"{_OPTIMIZER}.muon", "_get_param_groups", "megatron.optimizer:_refuse_whole_matrices",
        parameters=("...",), required=False,
    ),
    Patch(
        f"{_CORE}.process_groups_config",
        "ProcessGroupCollection.setup_process_groups_for_optimizer",
        "megatron.optimizer:_remember_groups", parameters=("pg_collection, model_chunks, ...",),
    ),
    _step("offload_to_cpu", "optimizer:_offload_state"),
    _step("restore_from_cpu", "optimizer:_restore_state"),
    _step("__init__", "optimizer:_init", "self, optimizer, config, ..."),
    _step("get_grad_stats_parallel_group", "optimizer:_grad_stats_group"),
    _step(
        "get_grads_for_grad_norm or get_main_grads_for_grad_norm", "optimizer:_norm_grads",
        "self", "self, grad_norm_group",
    ),
    _step("clip_grad_norm", "clipping:clip", "self, clip_grad"),
    _step("step", "clipping:step"),
    _step("step_with_ready_grads", "optimizer:_step_unless_large"),
    _step("count_zeros", "optimizer:_count_zeros"),
    _step("_init_optimizer_states_with_dummy_values", "optimizer:_init_states"),
    _step("_collect_main_grad_data_for_unscaling", "optimizer:_unscaling_data"),
    _step("_copy_model_params_to_main_params", "optimizer:_reload", "self, ..."),
    _step("_param_name", "optimizer:_param_name", "self, param"),
    _step("sharded_state_dict", "optimizer:_sharded_state", "self, ..."),
    _step("sharded_param_state_fsdp_dtensor", "optimizer:_save_state", "self, is_loading"),
    _step("load_state_dict", "optimizer:_load_state", "self, state_dict"),
    Patch(
        f"{_OPTIMIZER}.cpu_offloading", "HybridDeviceOptimizer.__init__",
        "megatron.hybrid_optimizer:make_on_locals", parameters=("self, params, ...",),
    ),
    *(
        Patch(
            f"{_CORE}.transformer.{module}", f"{owner}.clip_qk", "megatron.qk_clip:clip_sharded",
            parameters=("self",),
        )
        for module, owner in (
            ("attention", "SelfAttention"), ("multi_latent_attention", "MLASelfAttention")
        )
    ),
    Patch(
        f"{_CORE}.pipeline_parallel.fine_grained_activation_offload",
        "ChunkOffloadHandler.tensor_need_offloading_checker",
        "megatron.activation_offload:_is_to_be_offloaded", parameters=("self, tensor",),
    ),
    Patch(
        _OPTIMIZER, "_get_megatron_optimizer_based_on_param_groups",
        "megatron.emerging:_make_as_adam", parameters=("config, model_chunks, ...",),
    ),
    Patch(  # before 0.18 no optimizer takes another way
        _OPTIMIZER, "_get_megatron_emerging_optimizer", "megatron.emerging:_make_emerging",
        parameters=("config, model_chunks, config_overrides, pg_collection",), required=False,
    ),
    Patch(
        f"{_OPTIMIZER}.optimizer_cuda_graph", "OptimizerCudaGraphWrapper.__call__",
        "megatron.step_graphs:_step", parameters=("self, args, kwargs",), required=False,
    ),
    Patch(
        f"{_CORE}.full_cuda_graph", "FullCudaGraphWrapper.__call__", "megatron.captures:_call",
        parameters=("self, args, kwargs",),
    ),
)  # fmt: skip
"""Of core's optimizers and what is around their steps: for as long as a wrapper needs them."""
