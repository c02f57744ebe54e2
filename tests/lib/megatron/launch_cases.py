"""Arguments of Megatron-LM and a recipe of Megatron-Bridge, as plain values with nothing wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def parsed_arguments(**changed: Any) -> SimpleNamespace:
    """What 0.16.1's parser makes of `--use-megatron-fsdp` alone: its own defaults."""
    options = {
        "use_megatron_fsdp": True,
        "use_distributed_optimizer": False,
        "use_torch_fsdp2": False,
        "ckpt_format": "torch_dist",
        "data_parallel_sharding_strategy": "no_shard",
        "outer_dp_sharding_strategy": "no_shard",
        "num_distributed_optimizer_instances": 1,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "grad_reduce_in_bf16": False,
        "accumulate_allreduce_grads_in_fp32": False,
        "bf16": False,
        "gradient_accumulation_fusion": True,
        "check_for_nan_in_loss_and_grad": True,
        "ddp_average_in_collective": False,
        "ddp_reduce_scatter_with_fp32_accumulation": False,
        "check_weight_hash_across_dp_replicas_interval": None,
        "enable_full_sharding_in_hsdp": False,
        "use_legacy_models": False,
        "async_save": None,
        "optimizer": "adam",
        "exp_avg_dtype": "fp32",
        "exp_avg_sq_dtype": "bf16",
        "num_experts": None,
        "expert_tensor_parallel_size": None,
        "tensor_model_parallel_size": 1,
        "save": None,
        "load": None,
    }
    options.update(changed)
    return SimpleNamespace(**options)


def recipe(**changed: Any) -> SimpleNamespace:
    """What a recipe of Megatron-Bridge says of what is read here. `changed` are options by
    path, with "__" for the dot."""
    dist = SimpleNamespace(
        use_megatron_fsdp=False,
        use_torch_fsdp2=False,
        use_tp_pp_dp_mapping=False,
        use_decentralized_pg=False,
    )
    ddp = SimpleNamespace(
        use_megatron_fsdp=False,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        average_in_collective=True,
        grad_reduce_in_fp32=True,
        reduce_scatter_with_fp32_accumulation=False,
        data_parallel_sharding_strategy="no_shard",
        outer_dp_sharding_strategy="no_shard",
        num_distributed_optimizer_instances=1,
        reuse_grad_buf_for_mxfp8_param_ag=False,
    )
    optimizer = SimpleNamespace(
        optimizer="adam",
        use_distributed_optimizer=True,
        reuse_grad_buf_for_mxfp8_param_ag=False,
    )
    model = SimpleNamespace(
        gradient_accumulation_fusion=True,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        num_moe_experts=None,
        expert_tensor_parallel_size=None,
        expert_model_parallel_size=1,
        recompute_granularity=None,
        cpu_offloading=False,
    )
    checkpoint = SimpleNamespace(
        ckpt_format="torch_dist",
        save=None,
        load=None,
        async_save=False,
        pretrained_checkpoint=None,
    )
    cfg = SimpleNamespace(
        dist=dist,
        ddp=ddp,
        optimizer=optimizer,
        model=model,
        checkpoint=checkpoint,
        train=SimpleNamespace(),
        comm_overlap=None,
        mixed_precision=SimpleNamespace(grad_reduce_in_fp32=True),
    )
    for path, value in changed.items():
        section, _, name = path.partition("__")
        if name:
            setattr(getattr(cfg, section), name, value)
        else:
            setattr(cfg, section, value)
    return cfg
