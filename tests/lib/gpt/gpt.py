"""A small core GPT, the same model under stock DDP and under ours, and a training step of both.

The step is Megatron's own: core's schedule, `finalize_model_grads`, clipping and optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.core import config as engine_config
from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron.compat.core_api import batch_of_context_rank
from tests.lib.gpt.gather_full import (
    main_piece,
    optimizers_of,
    plain_name,
    put_together,
    whole_tensors,
)
from tests.lib.ranks.groups import use_groups

STRATEGIES = tuple(engine_config.STRATEGIES)


OptimizerOptions = Mapping[str, Any] | Callable[[OptimizerConfig], OptimizerConfig]


@dataclass(frozen=True)
class Case:
    """A model and a step. Sizes are chosen uneven on purpose; lengths in elements."""

    num_layers: int = 2
    hidden: int = 24
    heads: int = 3
    ffn: int = 40
    vocab: int = 53
    seq: int = 9
    batch: int = 2
    microbatches: int = 3
    tied: bool = False
    swiglu: bool = False
    bias: bool = True
    bf16: bool = False
    lr: float = 1e-2
    # Adam divides what is left of a gradient that cancels, rounding and all, by its eps: with 1e-5
    # one random case in twenty was over the bounds of steps that run free, up to 1.6e-4 relative.
    adam_eps: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    recompute: str | None = None  # "full-2": chunks of 2 layers; "selective-mlp": that module
    overlap: bool = True
    per_token_loss: bool = False
    seed: int = 1234
    positions: str = "rope"
    fp16: bool = False
    loss_scale: float = 1024.0  # at the start, with fp16
    fused: bool = False  # gradient_accumulation_fusion
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the model's config, beside these

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def dtype(self) -> torch.dtype:
        """Of the compute weights."""
        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32


def device_of_rank() -> torch.device:
    """This process's GPU; the CPU, in CPU mode, where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    cpu_mode.enable_cpu_mode()
    return torch.device("cpu")


def init_megatron(**sizes: int) -> torch.device:
    """Model-parallel state, by default of a purely data-parallel world; `sizes` are arguments of
    `initialize_model_parallel`. Returns the device."""
    device = device_of_rank()
    if not parallel_state.model_parallel_is_initialized():
        use_groups(**sizes)
    return device


def _recompute_options(recompute: str | None) -> dict[str, Any]:
    granularity, _, detail = (recompute or "").partition("-")
    if granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": int(detail),
        }
    if granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": [detail]}
    return {}


def model_config(case: Case) -> TransformerConfig:
    return TransformerConfig(
        num_layers=case.num_layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        ffn_hidden_size=case.ffn,
        gated_linear_unit=case.swiglu,
        add_bias_linear=case.bias,
        activation_func=torch.nn.functional.silu if case.swiglu else torch.nn.functional.gelu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=case.bf16,
        fp16=case.fp16,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        calculate_per_token_loss=case.per_token_loss,
        gradient_accumulation_fusion=case.fused,
        **_recompute_options(case.recompute),
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        **case.fields,
    )


def build_model(case: Case, device: torch.device) -> torch.nn.Module:
    """The same weights on every rank and in every process, from `case.seed`."""
    torch.manual_seed(case.seed)
    model_parallel_cuda_manual_seed(case.seed)
    config = model_config(case)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=case.vocab,
        max_sequence_length=case.seq,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.positions,
    ).to(device)
    with torch.no_grad():
        for param in model.parameters():  # biases start at zero otherwise, and hide mistakes
            param.add_(torch.randn_like(param) * 0.02)
    return Float16Module(config, model) if case.bf16 or case.fp16 else model


def ddp_config(
    case: Case, strategy: str | None, options: Mapping[str, Any] = MappingProxyType({})
) -> DistributedDataParallelConfig:
    """`options` may name fields that megatron-core 0.16.1 does not have yet."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=case.overlap,
        overlap_param_gather=case.overlap,
        use_distributed_optimizer=True,
        bucket_size=3000,
        use_megatron_fsdp=strategy is not None,
        data_parallel_sharding_strategy=strategy or "no_shard",
    )
    if any(name.endswith("_dtype") for name in options):
        config.grad_reduce_in_fp32 = False  # it would contradict them
    for name, value in options.items():
        setattr(config, name, value)
    return config


@dataclass
class Trainer:
    """A wrapped model with its optimizer. `strategy` None is stock DDP."""

    case: Case
    wrapper: Any
    optimizer: Any
    strategy: str | None

    @property
    def chunks(self) -> list[Any]:
        return [self.wrapper]

    def params(self) -> dict[str, torch.Tensor]:
        """Full float32 weights by name, the same on every rank; collective."""
        return full_weights(self)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sets the main weights of ours to full `weights`."""
        self.wrapper.load_state_dict(dict(weights))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full reduced float32 gradients by name, the same on every rank, zero where no rank of
        stock DDP holds the reduced value; collective. Valid between the end of the backwards and
        the optimizer's step."""
        named = named_parameters(self)
        if self.strategy is not None:
            return full_all({name: param.grad for name, param in named if param.requires_grad})
        found = put_together(named, self.optimizer, lambda p, rows: p.main_grad.reshape(-1)[rows])
        return {name: grad.cpu() for name, grad in found.items()}


def give_up(ddp: DistributedDataParallel) -> None:
    """Gives back the memory of a stock DDP model that is not needed any more. Its hooks on
    autograd's nodes are cycles that the collector cannot see, so deleting it frees nothing."""
    buffers = (*ddp.buffers, *ddp.expert_parallel_buffers)
    held = []
    for buffer in buffers:
        held.extend((buffer.param_data, buffer.grad_data))
    for tensor in (*held, *(getattr(param, "main_param", None) for param in ddp.parameters())):
        if tensor is not None:
            tensor.untyped_storage().resize_(0)


def optimizer_config(case: Case, **options: Any) -> OptimizerConfig:
    return OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": case.lr,
            "weight_decay": case.weight_decay,
            "adam_eps": case.adam_eps,
            "clip_grad": case.clip,
            "bf16": case.bf16,
            "fp16": case.fp16,
            "initial_loss_scale": case.loss_scale,
            "hysteresis": 1,
            "params_dtype": case.dtype,
            "use_distributed_optimizer": True,
            "overlap_param_gather": case.overlap,
            **options,
        }
    )


def build_trainer(
    case: Case,
    strategy: str | None,
    device: torch.device,
    change: Callable[[torch.nn.Module], None] = lambda model: None,
    ddp: Mapping[str, Any] = MappingProxyType({}),
    optimizer: OptimizerOptions = MappingProxyType({}),
    **wrapper_options: Any,
) -> Trainer:
    """`change` edits the bare model before it is wrapped (freezing, tying, ...). `ddp` sets fields
    of the DDP config, `optimizer` of the optimizer's, or changes that."""
    model = build_model(case, device)
    change(model)
    return make_trainer(model, case, strategy, ddp, optimizer, **wrapper_options)


def make_trainer(
    model: Any,
    case: Case,
    strategy: str | None,
    ddp: Mapping[str, Any] = MappingProxyType({}),
    optimizer_options: OptimizerOptions = MappingProxyType({}),
    **wrapper_options: Any,
) -> Trainer:
    """Wraps `model`, which is called like a GPTModel, and gives it an optimizer."""
    if strategy is None:
        cls = DistributedDataParallel
    else:
        cls = FullyShardedDataParallel
    wrapper = cls(model.config, ddp_config(case, strategy, ddp), model, **wrapper_options)
    if callable(optimizer_options):
        config = optimizer_options(optimizer_config(case))
    else:
        config = optimizer_config(case, **optimizer_options)
    optimizer = get_megatron_optimizer(config, [wrapper], use_gloo_process_groups=False)
    set_rates(optimizer, case)
    overlaps = wrapper.ddp_config.overlap_grad_reduce
    wrapper.config.no_sync_func = wrapper.no_sync if overlaps else None
    wrapper.config.finalize_model_grads_func = finalize_model_grads
    wrapper.config.grad_scale_func = optimizer.scale_loss
    return Trainer(case, wrapper, optimizer, strategy)


def set_rates(optimizer: Any, case: Case) -> None:
    """What OptimizerParamScheduler does at every step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(case.lr * group["lr_mult"])
        else:
            group["lr"] = case.lr * group["lr_mult"]
        group["weight_decay"] = case.weight_decay * group["wd_mult"]


def batches(case: Case, step: int, rank: int, device: torch.device) -> list[torch.Tensor]:
    """Fresh tokens (batch, seq + 1) of each microbatch, different on every rank."""
    generator = torch.Generator().manual_seed(case.seed + 7919 * step + 104729 * rank)
    found = []
    for _ in range(case.microbatches):
        tokens = torch.randint(0, case.vocab, (case.batch, case.seq + 1), generator=generator)
        found.append(tokens.to(device))
    return found


def forward_step(
    case: Case, iterator: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False
) -> Any:
    """What core's schedule calls; `iterator` gives tokens (batch, seq + 1). return_schedule_plan:
    core asks for the model's plan, whose parts it runs by itself."""
    tokens = next(iterator)
    length = tokens.shape[1] - 1
    batch = batch_of_context_rank(
        {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(length, device=tokens.device).expand(len(tokens), -1),
        }
    )
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    run = model.build_schedule_plan if return_schedule_plan else model
    losses = run(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    counted = batch["labels"] % 3 != 0

    def loss_func(output: torch.Tensor) -> Any:
        output = output.float()
        report = {"loss": output.detach().mean()}
        if case.per_token_loss:  # every microbatch and rank has its own number of tokens
            return (output * counted).sum(), counted.sum().int(), report
        # The schedule multiplies by the number of context-parallel ranks.
        return output.mean() / parallel_state.get_context_parallel_world_size(), report

    return losses, loss_func


def step_from_dicts(
    case: Case,
    iterator: Iterator[Mapping[str, torch.Tensor]],
    model: Any,
    return_schedule_plan: bool = False,
) -> Any:
    """`forward_step` on what Megatron's loaders give, and core's wrapper of whole iterations asks
    for: dicts, with the tokens (batch, seq + 1)."""
    return forward_step(case, iter([next(iterator)["tokens"]]), model, return_schedule_plan)


def run_passes(
    trainer: Any, data: list[torch.Tensor], forward_only: bool = False, schedule: Any = None
) -> float:
    """Core's schedule, or another, over the microbatches; this rank's mean loss, 0 but on the last
    stage."""
    case = trainer.case
    chunks = trainer.chunks
    iterators = [iter([{"tokens": tokens} for tokens in data]) for _ in chunks]
    if not forward_only:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        trainer.optimizer.zero_grad()
    reports = (schedule or get_forward_backward_func())(
        forward_step_func=functools.partial(step_from_dicts, case),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(data),
        seq_length=case.seq,
        micro_batch_size=case.batch,
        forward_only=forward_only,
    )
    if reports:
        return float(torch.stack([r["loss"] for r in reports]).mean())
    return 0.0


def forward_backward(
    trainer: Trainer, data: list[torch.Tensor], forward_only: bool = False
) -> float:
    """`run_passes`; the mean loss over microbatches and ranks."""
    loss = torch.tensor(run_passes(trainer, data, forward_only), device=data[0].device)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def train_step(trainer: Trainer, data: list[torch.Tensor]) -> tuple[float, float]:
    """One step; (loss, gradient norm before clipping)."""
    loss = forward_backward(trainer, data)
    success, norm, _ = trainer.optimizer.step()
    assert success
    return loss, float(norm)


def full(value: Any) -> torch.Tensor:
    """A copy, on the host, of the whole tensor behind a parameter, a gradient or a moment of ours,
    or of what is no DTensor (a module that is left alone); collective."""
    return full_all({"": value})[""]


def full_all(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The same for several, by name, in few collectives."""
    split = {name: value for name, value in values.items() if isinstance(value, DTensor)}
    found = {}
    for name, value in {**values, **whole_tensors(split)}.items():
        found[name] = value.detach().cpu().clone()
    return found


def full_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Main weights, float32."""
    if trainer.strategy is not None:
        trainer.wrapper.stop_communication()
        return full_all(dict(named_parameters(trainer)))
    trainer.wrapper.start_param_sync(force_sync=True)
    whole = {name: p.detach().float().cpu().clone() for name, p in named_parameters(trainer)}
    if trainer.case.dtype != torch.float32:
        mains = put_together(named_parameters(trainer), trainer.optimizer, main_piece)
        whole |= {name: main.cpu() for name, main in mains.items()}
    return whole


def named_parameters(trainer: Trainer) -> list[tuple[str, Any]]:
    return [(plain_name(name), param) for name, param in trainer.wrapper.named_parameters()]


def distributed_optimizer(trainer: Trainer) -> Any:
    """The one `DistributedOptimizer`; stock DDP's comes in a chain of one."""
    [found] = optimizers_of(trainer.optimizer)
    return found
