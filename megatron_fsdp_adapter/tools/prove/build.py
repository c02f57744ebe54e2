"""Builds a small GPT on megatron-core from Megatron's options, and trains it.

It is wrapped by ours or by stock DDP. A step returns loss, norm, whole gradients and whole weights.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron.compat.core_api import batch_of_context_rank
from megatron_fsdp_adapter.megatron.options.ddp_config import (
    DistributedDataParallelConfig as FsdpConfig,
)
from megatron_fsdp_adapter.megatron.options.option import DTYPES
from megatron_fsdp_adapter.megatron.wrapper.adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.megatron.wrapper.gpt_model import gpt_model, in_compute_dtype
from megatron_fsdp_adapter.megatron.wrapper.process_groups import create_all_gather_groups
from megatron_fsdp_adapter.state.module_weights import gather_rows
from megatron_fsdp_adapter.state.names import split_depth
from megatron_fsdp_adapter.tools.models.local_spec import local_block_spec

Options = Mapping[str, Any]
SEED = 1234

NOT_COPIED = frozenset(
    {
        "activation_func", "init_method", "output_layer_init_method", "embedding_init_method",
        "timers", "cuda_graph_scope", "enable_cuda_graph", "external_cuda_graph", "quant_recipe",
        "params_dtype", "config_logger_dir", "microbatch_group_size_per_vp_stage", "fp8_param",
        "moe_extended_tp", "inference_sampling_seed", "no_sync_func", "grad_sync_func",
        "param_sync_func", "finalize_model_grads_func", "grad_scale_func", "bucket_size",
        "num_buckets", "preserve_fp32_weights", "mrope_section", "hybrid_context_parallel",
        "cuda_graph_modules", "inference_cuda_graph_scope", "mtp_grad_scale_func",
        "moe_grad_scale_func", "experimental_attention_variant_loss_scale_func",
    }
)  # fmt: skip
"""Fields of Megatron's configs that are set here, or that no small model has."""


Values = dict[str, torch.Tensor]
"""Whole tensors by name, float32 on the CPU."""


def params_dtype(options: Options) -> torch.dtype:
    """The compute dtype."""
    if options.get("bf16"):
        return torch.bfloat16
    return torch.float16 if options.get("fp16") else torch.float32


def start(options: Options) -> torch.device:
    """Makes Megatron's process groups by the options, in place of any earlier ones, and the
    calculator of microbatches; returns the device. Collective."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        cpu_mode.enable_cpu_mode()
        device = torch.device("cpu")
    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
    ps.initialize_model_parallel(
        tensor_model_parallel_size=options.get("tensor_model_parallel_size") or 1,
        pipeline_model_parallel_size=options.get("pipeline_model_parallel_size") or 1,
        virtual_pipeline_model_parallel_size=options.get("virtual_pipeline_model_parallel_size"),
        context_parallel_size=options.get("context_parallel_size") or 1,
        expert_model_parallel_size=options.get("expert_model_parallel_size") or 1,
        expert_tensor_parallel_size=options.get("expert_tensor_parallel_size"),
        num_distributed_optimizer_instances=options.get("num_distributed_optimizer_instances") or 1,
        create_gloo_process_groups=False,
    )
    unset_num_microbatches_calculator()
    data = ps.get_data_parallel_world_size()
    micro = options["micro_batch_size"]
    total = options["microbatches"] * micro * data
    init_num_microbatches_calculator(dist.get_rank(), None, total, micro, data)
    return device


def _fields(kind: type, options: Options) -> dict[str, Any]:
    """The options that are fields of a config, with dtypes in place of their names."""
    names = {item.name for item in dataclasses.fields(kind) if item.init} - NOT_COPIED
    found = {}
    for name in names & options.keys():
        value = options[name]
        if name.endswith("_dtype") and name != "moe_router_dtype" and isinstance(value, str):
            value = DTYPES.get(value, value)
        # None is a value of this field: main weights have the compute dtype.
        if value is not None or name.startswith("megatron_fsdp_main_p"):
            found[name] = value
    return found


def model_config(options: Options) -> TransformerConfig:
    """Core's model configuration."""
    o = options
    dtype = params_dtype(o)
    kind = MLATransformerConfig if o.get("multi_latent_attention") else TransformerConfig
    fields = _fields(kind, o)
    virtual = bool(o.get("virtual_pipeline_model_parallel_size"))
    on_gpu = torch.cuda.is_available()
    fields |= {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "overlap_p2p_comm": virtual,
        "batch_p2p_comm": not virtual,
        # gloo reads an output after its send was launched, when the overlapped schedule frees it.
        "deallocate_pipeline_outputs": on_gpu or not virtual,
        "microbatch_group_size_per_vp_stage": None,
        "num_query_groups": None,
        "use_cpu_initialization": not on_gpu,
        **_activation(o),
    }
    if virtual:
        stages = o.get("pipeline_model_parallel_size") or 1
        fields["microbatch_group_size_per_vp_stage"] = stages
    if o.get("group_query_attention"):
        fields["num_query_groups"] = o.get("num_query_groups")
    cp_kinds = o.get("cp_comm_type")
    if isinstance(cp_kinds, list) and len(cp_kinds) == 1:
        cp_kinds = cp_kinds[0]
    fields["cp_comm_type"] = cp_kinds
    if o.get("squared_relu") or o.get("quick_geglu"):
        raise ValueError("squared_relu, quick_geglu: not supported by a proof. Leave them out")
    if not o.get("num_moe_experts"):
        fields = {n: v for n, v in fields.items() if not n.startswith(("moe_", "num_moe"))}
        fields["expert_model_parallel_size"] = 1
        fields.pop("expert_tensor_parallel_size", None)
    return kind(**fields)


def _activation(options: Options) -> dict[str, Any]:
    """Fields of the MLP's activation. Its fusion with biases is used where there are biases."""
    gated = bool(options.get("swiglu"))
    if gated:
        function: Any = torch.nn.functional.silu
        fused = options.get("bias_swiglu_fusion")
    else:
        function = torch.nn.functional.gelu
        fused = options.get("bias_gelu_fusion") and options.get("add_bias_linear", True)
    return {
        "gated_linear_unit": gated,
        "activation_func": function,
        "bias_activation_fusion": bool(fused),
    }


def _layers(config: TransformerConfig, options: Options, chunk: int | None) -> Any:
    """The layer spec of a model chunk. chunk: None without virtual pipeline stages."""
    specs: Any = gpt_layer_specs
    if options.get("transformer_impl") == "local":
        return local_block_spec(config, chunk)
    if config.num_moe_experts:
        return specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=True,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=chunk,
        )
    return specs.get_gpt_layer_with_transformer_engine_spec(
        None,
        False,
        config.qk_layernorm,
        config.multi_latent_attention,
        qk_l2_norm=config.qk_l2_norm,
    )


def build_chunk(
    options: Options, config: TransformerConfig, chunk: int, device: torch.device
) -> torch.nn.Module:
    """A model chunk whose weights depend only on their names and coordinates, not on the wrapper:
    our model and the reference begin with equal ones."""
    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)
    stage = chunk if config.virtual_pipeline_model_parallel_size else None
    layers = _layers(config, options, stage)
    mtp = None
    if options.get("mtp_num_layers"):
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
            config,
            layers,
            use_transformer_engine=options.get("transformer_impl") != "local",
            vp_stage=stage,
        )
    model = gpt_model(config, layers, options, stage, mtp).to(device)
    for name, param in model.named_parameters():
        _set_weight(param, coordinates(param, name, chunk))
    return in_compute_dtype(config, model)


def coordinates(param: torch.nn.Parameter, name: str, chunk: int) -> tuple[Any, ...]:
    """Name and model-parallel coordinates that identify a parameter in the whole model."""
    # The first and the last pipeline stage have a copy of it, whose names differ.
    if getattr(param, "shared_embedding", False):
        return ("embedding", ps.get_tensor_model_parallel_rank())
    stage = (ps.get_pipeline_model_parallel_rank(), chunk)
    if not getattr(param, "allreduce", True):
        expert = (ps.get_expert_model_parallel_rank(), ps.get_expert_tensor_parallel_rank())
        return (name, *stage, *expert)
    if getattr(param, "tensor_model_parallel", False):
        return (name, *stage, ps.get_tensor_model_parallel_rank())
    return (name, *stage)


def _set_weight(param: torch.nn.Parameter, place: tuple[Any, ...]) -> None:
    """Sets random values that are the same in every process.

    A matrix is scaled to preserve the size of its input. Biases and norms stay near their initial
    values, but are not zero, which would hide errors."""
    seed = zlib.crc32(repr((SEED, *place)).encode())
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(param.shape, generator=generator)
    with torch.no_grad():
        if param.ndim == 1:
            base = float(param.float().mean().round())
            param.copy_(base + 0.05 * noise)
        else:
            param.copy_(noise * param.shape[-1] ** -0.5)


@dataclass
class Trainer:
    """Model chunks with one optimizer. ours: True for our wrapper, False for stock DDP."""

    options: Options
    device: torch.device
    chunks: list[Any]
    optimizer: Any
    ours: bool

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole main weights of this rank's model chunks, by name; collective."""
        if not self.ours:
            return {name: _host(getattr(p, "main_param", p)) for name, p in self._named()}
        for chunk in self.chunks:
            chunk.stop_communication()
        return {name: _whole(pair, pair.sharded) for name, pair in self._pairs()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole reduced gradients, by name; collective. Call it between the backwards and the
        optimizer's step."""
        if not self.ours:
            return {name: _host(p.main_grad) for name, p in self._named() if p.requires_grad}
        found = {}
        for name, pair in self._pairs():
            grad = pair.sharded.grad
            if grad is not None:
                found[name] = _whole(pair, grad)
        return found

    def _named(self) -> Iterator[tuple[str, Any]]:
        for number, chunk in enumerate(self.chunks):
            for name, param in chunk.named_parameters():
                yield _label(self.chunks, number, name), param

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        for number, chunk in enumerate(self.chunks):
            for pair in chunk.engine.pairs:
                yield _label(self.chunks, number, pair.managed.fqns[0]), pair


def _label(chunks: list[Any], number: int, name: str) -> str:
    """The name of a parameter of chunk `number`, unique among the chunks, without the wrapper's
    prefix."""
    name = split_depth(name)[1]
    if len(chunks) == 1:
        return name
    return f"chunk {number}: {name}"


def _host(value: torch.Tensor) -> torch.Tensor:
    return value.detach().float().cpu().clone()


def _whole(pair: Any, value: Any) -> torch.Tensor:
    """The whole of a DTensor that is sharded as the pair; collective."""
    return _host(gather_rows(pair, value._local_tensor, torch.float32))


def build_trainer(options: Options, device: torch.device, ours: bool) -> Trainer:
    """A trainer with our wrapper, or with stock DDP without sharding, fusion or overlap."""
    if not ours:
        options = {**options, "gradient_accumulation_fusion": False}
    config = model_config(options)
    number = config.virtual_pipeline_model_parallel_size or 1
    models = [build_chunk(options, config, i, device) for i in range(number)]
    chunks = [_wrap(options, config, model, ours, i) for i, model in enumerate(models)]
    optimizer = _optimizer(options, chunks, ours)
    # With several chunks the interleaved schedule starts reductions and gathers itself.
    wire_schedule(config, chunks, optimizer, aligned=len(chunks) > 1)
    return Trainer(options, device, chunks, optimizer, ours)


def _wrap(options: Options, config: Any, model: Any, ours: bool, number: int) -> Any:
    if not ours:
        plain = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        return DistributedDataParallel(config, plain, model, disable_bucketing=number > 0)
    fields = {**_fields(FsdpConfig, options), "check_for_nan_in_grad": False}
    arguments: dict[str, Any] = {}
    if options.get("create_all_gather_group") or options.get("separate_all_gather_groups"):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        arguments["pg_collection"] = create_all_gather_groups(groups)
    return FullyShardedDataParallel(
        config, FsdpConfig(**fields), model, disable_bucketing=number > 0, **arguments
    )


def _optimizer(options: Options, chunks: list[Any], ours: bool) -> Any:
    fields = {**_fields(OptimizerConfig, options), "params_dtype": params_dtype(options)}
    if not ours:
        fields |= {
            "use_distributed_optimizer": False,
            "overlap_param_gather": False,
            "use_precision_aware_optimizer": False,
            "main_grads_dtype": torch.float32,
            "main_params_dtype": torch.float32,
            "exp_avg_dtype": torch.float32,
            "exp_avg_sq_dtype": torch.float32,
        }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**fields), chunks, use_gloo_process_groups=False
    )
    set_rate(optimizer, options)
    return optimizer


def set_rate(optimizer: Any, options: Options) -> None:
    """Sets learning rate and weight decay, as Megatron's scheduler does at every step."""
    decay = options.get("weight_decay")
    if decay is None:
        decay = 0.01
    for group in optimizer.param_groups:
        group["lr"] = options["lr"] * group.get("lr_mult", 1.0)
        group["weight_decay"] = decay * group.get("wd_mult", 1.0)


def wire_schedule(config: Any, chunks: list[Any], optimizer: Any, aligned: bool) -> None:
    """Sets the config's callbacks as Megatron-LM's training loop does. aligned: True if the
    schedule starts reductions and gathers of model chunks (`grad_sync_func`, `param_sync_func`)."""

    def each(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in chunks]
        return functions if len(functions) > 1 else functions[0]

    if chunks[0].ddp_config.overlap_grad_reduce:
        config.no_sync_func = each("no_sync")
        if aligned:
            config.grad_sync_func = each("start_grad_sync")
    if chunks[0].ddp_config.overlap_param_gather and aligned:
        config.param_sync_func = each("start_param_sync")
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss


def _batches(trainer: Trainer, step: int) -> list[torch.Tensor]:
    """Tokens (micro batch, seq + 1) of each microbatch, by step, microbatch and data-parallel
    rank."""
    options = trainer.options
    rank = ps.get_data_parallel_rank()
    found = []
    for micro in range(options["microbatches"]):
        seed = SEED + 7919 * step + 104729 * rank + 1299709 * micro
        generator = torch.Generator().manual_seed(seed)
        shape = (options["micro_batch_size"], options["seq_length"] + 1)
        tokens = torch.randint(0, options["padded_vocab_size"], shape, generator=generator)
        found.append(tokens.to(trainer.device))
    return found


def _forward_step(
    options: Options,
    iterator: Iterator[torch.Tensor],
    model: Any,
    return_schedule_plan: bool = False,
) -> Any:
    """Runs one forward for core's schedule, or returns the model's plan of it; and the function
    that computes the loss from its output."""
    tokens = next(iterator)
    positions = torch.arange(options["seq_length"], device=tokens.device)
    batch = batch_of_context_rank(
        {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": positions.expand(tokens.size(0), -1),
        }
    )
    run = model.build_schedule_plan if return_schedule_plan else model
    labels = batch["labels"]
    losses = run(batch["tokens"], batch["position_ids"], None, labels=labels)
    counted = labels % 3 != 0  # in place of a loss mask

    def loss_func(output: torch.Tensor) -> Any:
        report = {"loss": output.detach().float().mean()}
        if options.get("calculate_per_token_loss"):
            return (output.float() * counted).sum(), counted.sum().int(), report
        # The schedule multiplies by the number of context-parallel ranks.
        return output.float().mean() / ps.get_context_parallel_world_size(), report

    return losses, loss_func


def train_step(trainer: Trainer, step: int) -> tuple[float, float, Values, Values]:
    """A training step on core's schedule; collective.

    Returns loss, averaged over data-parallel ranks (0 except on the last pipeline stage), norm
    before clipping, gradients, and main weights after the step."""
    options = trainer.options
    data = _batches(trainer, step)
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    model: Any = trainer.chunks
    iterators: Any = [iter(data) for _ in model]
    if len(model) == 1:
        model = model[0]
        iterators = iter(data)
    reports = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward_step, options),
        data_iterator=iterators,
        model=model,
        num_microbatches=len(data),
        seq_length=options["seq_length"],
        micro_batch_size=options["micro_batch_size"],
        forward_only=False,
    )
    loss = torch.zeros((), device=trainer.device)
    if reports:
        loss = torch.stack([report["loss"] for report in reports]).mean()
    group = ps.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(loss, group=group)
    gradients = trainer.gradients()
    success, norm, _ = trainer.optimizer.step()
    if not success:
        raise RuntimeError(
            f"step {step}: the optimizer skipped it, because gradients are not finite"
        )
    mean = float(loss) / dist.get_world_size(group)
    return mean, float(norm or 0.0), gradients, trainer.weights()
