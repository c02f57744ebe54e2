"""Builds model, wrapper, optimizer and learning-rate schedule from the options."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from lib.data import padded_vocab_size
from lib.distributed import Place, side_stream
from lib.options import DDP, EXPERTS, FP8, FSDP, MODEL, OPTIMIZER, Options, chosen
from megatron_fsdp_adapter.megatron.options.ddp_config import (
    DistributedDataParallelConfig as FsdpConfig,
)
from megatron_fsdp_adapter.megatron.wrapper.gpt_model import gpt_model, in_compute_dtype
from megatron_fsdp_adapter.megatron.wrapper.process_groups import create_all_gather_groups
from megatron_fsdp_adapter.tools.models.local_spec import local_block_spec


@dataclass(frozen=True)
class Trainee:
    """The training objects: the wrapped model, its config, optimizer and schedule, and the number
    of parameters on this rank before it was wrapped."""

    model: Any
    config: TransformerConfig
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    parameters: int


def params_dtype(options: Options) -> torch.dtype:
    """The compute dtype."""
    return torch.bfloat16 if options.bf16 else torch.float32


def transformer_config(options: Options) -> TransformerConfig:
    """Core's model configuration."""
    dtype = params_dtype(options)
    fields = chosen(options, MODEL)
    if options.num_experts is not None:
        # Without experts core warns about, or rejects, some of them.
        fields |= {"num_moe_experts": options.num_experts, **chosen(options, EXPERTS)}
    if options.fp8_format is not None:
        fields |= {"fp8": options.fp8_format, "fp8_param": options.fp8_param_gather}
        fields |= chosen(options, FP8)
    if options.swiglu:
        activation: Any = torch.nn.functional.silu
        fused = options.bias_swiglu_fusion
    else:
        activation = torch.nn.functional.gelu
        fused = options.bias_gelu_fusion
    has_bias = not options.disable_bias_linear
    return TransformerConfig(
        **fields,
        num_query_groups=options.num_query_groups if options.group_query_attention else None,
        add_bias_linear=has_bias,
        gated_linear_unit=options.swiglu,
        activation_func=activation,
        # Without a bias core has a fused kernel for SwiGLU only.
        bias_activation_fusion=fused and (has_bias or options.swiglu),
        apply_rope_fusion=options.rope_fusion and options.position_embedding_type == "rope",
        masked_softmax_fusion=False,
        deterministic_mode=options.deterministic,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )


def layer_spec(config: TransformerConfig, options: Options) -> Any:
    """The layer spec of GPTModel: Transformer Engine's layers, or local ones."""
    if options.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    return local_block_spec(config)


def build_model(options: Options, config: TransformerConfig, place: Place) -> torch.nn.Module:
    """A GPTModel on the device, or, as far as core allows, on the meta device. With bf16 it is
    inside core's Float16Module."""
    on_meta = options.init_model_with_meta_device
    named = {**vars(options), "padded_vocab_size": padded_vocab_size(options)}
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = gpt_model(config, layer_spec(config, options), named)
    if not on_meta:
        model.to(place.device)
    return in_compute_dtype(config, model)


def ddp_config(options: Options) -> DistributedDataParallelConfig:
    """Core's configuration of the data-parallel wrapper, as Megatron's training script makes it."""
    bucket = options.ddp_bucket_size
    if bucket is None:
        # Chunks of a ring collective shrink with the number of ranks and must stay large.
        bucket = max(40_000_000, 1_000_000 * parallel_state.get_data_parallel_world_size())
    common: dict[str, Any] = dict(
        **chosen(options, DDP),
        bucket_size=bucket if options.overlap_grad_reduce else None,
        check_for_nan_in_grad=options.check_for_nan_in_loss_and_grad,
    )
    if not options.use_megatron_fsdp:
        return DistributedDataParallelConfig(
            **common, grad_reduce_in_fp32=not options.grad_reduce_in_bf16
        )
    return FsdpConfig(
        **common,
        megatron_fsdp_grad_comm_dtype=torch.bfloat16 if options.grad_reduce_in_bf16 else None,
        **chosen(options, FSDP),
    )


def wrap(
    options: Options, config: TransformerConfig, module: torch.nn.Module, place: Place
) -> torch.nn.Module:
    """The model in this package's FullyShardedDataParallel or in core's DDP. Collective."""
    wrapper: Any = DistributedDataParallel
    arguments: dict[str, Any] = {}
    if options.use_megatron_fsdp:
        from megatron_fsdp_adapter import FullyShardedDataParallel

        wrapper = FullyShardedDataParallel
    if options.separate_all_gather_groups:
        groups = create_all_gather_groups(ProcessGroupCollection.use_mpu_process_groups())
        arguments["pg_collection"] = groups
    with side_stream(place):
        return wrapper(
            config=config,
            ddp_config=ddp_config(options),
            module=module,
            disable_bucketing=False,
            **arguments,
        )


def _muon_fields(options: Options) -> dict[str, Any]:
    """Fields of the optimizer config for Muon; none for another optimizer."""
    if options.optimizer != "muon":
        return {}
    # Updates become as large as Adam's, so that both use one learning rate.
    fields: dict[str, Any] = {"muon_extra_scale_factor": 0.2}
    if not options.use_megatron_fsdp:  # core's Muon, which assigns whole matrices to ranks
        fields["use_distributed_optimizer"] = False
        fields["use_layer_wise_distributed_optimizer"] = True
    return fields


def build_optimizer(options: Options, model: torch.nn.Module) -> MegatronOptimizer:
    """Core's optimizer for the wrapped model."""
    config = OptimizerConfig(
        **{**chosen(options, OPTIMIZER), **_muon_fields(options)},
        params_dtype=params_dtype(options),
        fp8_recipe=options.fp8_recipe if options.fp8_format is not None else None,
    )
    return get_megatron_optimizer(
        config, [model], config_overrides=get_standard_config_overrides(config)
    )


def build_scheduler(options: Options, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule of the learning rate, by samples consumed."""
    batch = options.global_batch_size
    assert batch is not None and options.lr_decay_iters is not None  # by check.resolve
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iters * batch,
        lr_decay_steps=options.lr_decay_iters * batch,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=options.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=options.override_opt_param_scheduler,
    )


def connect(config: TransformerConfig, model: Any, optimizer: MegatronOptimizer) -> None:
    """Sets the config's callbacks for loss scaling, delayed reduction and gradient finalization.

    Reads the wrapper's ddp_config, because FSDP switches on overlaps that its strategy needs.
    """
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if model.ddp_config.overlap_grad_reduce:
        config.no_sync_func = model.no_sync
        config.grad_sync_func = model.start_grad_sync


def build(options: Options, place: Place) -> Trainee:
    """The training objects, wired to core's schedules."""
    unset_num_microbatches_calculator()
    init_num_microbatches_calculator(
        place.rank,
        None,
        options.global_batch_size,
        options.micro_batch_size,
        place.data_parallel_size,
    )
    config = transformer_config(options)
    module = build_model(options, config, place)
    parameters = sum(param.numel() for param in module.parameters())
    model = wrap(options, config, module, place)
    model.train()
    optimizer = build_optimizer(options, model)
    scheduler = build_scheduler(options, optimizer)
    connect(config, model, optimizer)
    return Trainee(model, config, optimizer, scheduler, parameters)
