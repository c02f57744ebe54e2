"""Builds the wrappers that `benchmark.py` compares, and runs their training steps.

All of them train the model that the options describe, from the same weights, on core's
forward-backward schedule, with AdamW and the same clipping, and with float32 gradients on the wire.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.transformer.transformer_layer import TransformerLayer

from lib import model as training
from lib.bench_subjects import LAYERS, STEP, Subject
from lib.check import Machine, this_machine, validated
from lib.distributed import Place
from lib.loop import forward_step
from lib.options import Options

Batch = dict[str, torch.Tensor]

REWRITE = "bundled-v2"
"""The kind of the rewrite of core's own FSDP."""


@dataclass
class Runner:
    """A wrapper that can train.

    Attributes:
        model: the module that core's schedule calls.
        zero: clears all gradients.
        optimize: clips, steps, and returns the gradient norm before clipping (a number, a tensor,
            or None).
        schedule: core's forward-backward function.
        losses, norms: one entry a step, as 0-dimensional tensors or numbers; `history` reads them.
    """

    subject: Subject
    options: Options
    model: Any
    zero: Callable[[], None]
    optimize: Callable[[], Any] = lambda: None
    schedule: Callable[..., Any] = dataclasses.field(default_factory=get_forward_backward_func)
    losses: list[Any] = dataclasses.field(default_factory=list)
    norms: list[Any] = dataclasses.field(default_factory=list)

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Computes gradients of the microbatches; returns a (2,) tensor: this rank's summed loss
        and number of tokens."""
        self.zero()
        sums = self.schedule(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=self.options.seq_length,
            micro_batch_size=self.options.micro_batch_size,
            forward_only=False,
        )
        return torch.stack(sums).sum(dim=0)

    def step(self, batches: Sequence[Batch]) -> None:
        """Runs one training step, without reading from the device."""
        total = self.forward_backward(batches)
        self.losses.append(total[0] / total[1])
        self.norms.append(self.optimize())

    def close(self) -> None:
        """Breaks reference cycles, so that the wrapper can be collected.

        Core keeps configs of mixtures of experts, and so the functions in them. Core's DDP puts
        hooks on autograd nodes; these reference DDP, in cycles that Python's collector does not
        see. If gradients are written in place, a reference remains in spite of this, so DDP's
        buffers are emptied."""
        if self.subject.captures == STEP:
            forget_graphs()
        config = getattr(self.model, "config", None)
        for wired in ("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"):
            if hasattr(config, wired):
                setattr(config, wired, None)
        if not self.subject.is_ddp:
            return
        for node in self.model.grad_accs:
            hooks = node.register_hook(lambda *unused: None).hooks_dict_ref()
            if hooks is not None:
                hooks.clear()
        self.model.grad_accs.clear()
        for buffer in (*self.model.buffers, *self.model.expert_parallel_buffers):
            for data in (buffer.param_data, buffer.grad_data):
                if data is not None:
                    data.untyped_storage().resize_(0)

    def history(self) -> list[list[float | None]]:
        """(loss of this rank, gradient norm over all ranks) of each step. Collective, blocks."""
        steps: list[list[float | None]] = []
        for loss, norm in zip(self.losses, self.norms, strict=True):
            if hasattr(norm, "full_tensor"):
                norm = norm.full_tensor()
            steps.append([float(loss), None if norm is None else float(norm)])
        return steps


def row_options(subject: Subject, options: Options, machine: Machine | None = None) -> Options:
    """The options of one wrapper: the common ones, changed by those that select it. machine:
    default: that of this process.

    Raises ValueError for a wrapper that does not support the options.
    """
    ours = subject.is_ours
    is_ddp = subject.is_ddp
    is_rewrite = subject.kind == REWRITE
    is_fsdp = ours or subject.kind == "bundled" or is_rewrite
    uses_core_optimizer = is_fsdp or is_ddp
    common = {
        "use_distributed_optimizer": uses_core_optimizer,
        "overlap_grad_reduce": uses_core_optimizer,
        "overlap_param_gather": uses_core_optimizer,
        "use_megatron_fsdp": is_fsdp,
        # The floor and fully_shard have no main gradients to write into; the bundled engine writes
        # float32 ones with an operation that takes the compute dtype only.
        "gradient_accumulation_fusion": options.gradient_accumulation_fusion and (ours or is_ddp),
        "optimizer": "adam",
        "ddp_bucket_size": options.ddp_bucket_size if is_ddp else None,
        # Every token counts in a benchmark, so a mean over tokens is the mean over microbatches,
        # and wrappers without token counts compute the same gradients with the latter.
        "calculate_per_token_loss": (
            options.calculate_per_token_loss and uses_core_optimizer and not is_rewrite
        ),
        "fsdp_unsharded_budget_gib": subject.budget,
        "ckpt_format": None,
        "data_parallel_sharding_strategy": subject.strategy or "optim_grads_params",
    }
    if not ours:
        common["megatron_fsdp_enable_fine_grained_param_gather"] = False
        common["suggested_communication_unit_size"] = None
    changed = dataclasses.replace(options, **{**common, **subject.options()})
    found, *_ = validated(changed, machine or this_machine())
    if is_rewrite:  # Megatron's FSDP turns it on
        found = dataclasses.replace(found, use_distributed_optimizer=False)
    return found


def build(subject: Subject, options: Options, place: Place) -> Runner:
    """A wrapper around a new model, whose initial weights depend only on the seed."""
    options = row_options(subject, options)
    torch.manual_seed(options.seed)
    captures = bool(subject.captures)
    # Transformer Engine's tracker where that is installed: in captures it accepts no other.
    tensor_parallel.model_parallel_cuda_manual_seed(
        options.seed,
        te_rng_tracker=captures,
        use_cudagraphable_rng=captures,
        force_reset_rng=True,
    )
    makers = {"floor": _floor, "floor-graph": _floor, "fsdp2": _fsdp2}
    runner = makers.get(subject.kind, _with_core_optimizer)(subject, options, place)
    if subject.captures == STEP:
        forget_graphs()
        runner.schedule = FullCudaGraphWrapper(runner.schedule, cuda_graph_warmup_steps=2)
    return runner


def forget_graphs() -> None:
    """Deletes core's full-iteration graphs, which core keeps on a class with their inputs and
    outputs. They must be deleted before their communicators, which would wait for them forever."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for stage in ("training", "validation"):
        FullCudaGraphWrapper.curr_iteration[stage] = 0
        FullCudaGraphWrapper.cuda_graph[stage] = None
        FullCudaGraphWrapper.result[stage] = None
        StaticBufferLoader.static_buffers[stage] = []


def forget_fp8() -> None:
    """Resets Transformer Engine's per-process FP8 state, which keeps amaxes of all earlier modules.
    Call it while no wrapper exists."""
    module = sys.modules.get("transformer_engine.pytorch.quantization")
    if module is not None:
        module.FP8GlobalStateManager.reset()


def model_config(subject: Subject, options: Options) -> Any:
    """Core's model config, with the CUDA graphs of the subject."""
    config = training.transformer_config(options)
    if subject.captures == STEP:
        ask_for_one_graph(config)
    if subject.captures == LAYERS:  # whole layers; of layers with experts the attention
        config.cuda_graph_impl = "local"
        config.cuda_graph_warmup_steps = 1
        newer = hasattr(config, "cuda_graph_modules")
        setattr(config, "cuda_graph_modules" if newer else "cuda_graph_scope", [])
    return config


def ask_for_one_graph(config: Any) -> None:
    """Sets the fields for a full-iteration graph: an implementation, or, before megatron-core 0.18,
    a scope of "local"."""
    if hasattr(config, "cuda_graph_modules"):
        config.cuda_graph_impl = "full_iteration"
    else:
        config.cuda_graph_impl = "local"
        config.cuda_graph_scope = [CudaGraphScope.full_iteration]


def _floor(subject: Subject, options: Options, place: Place) -> Runner:
    """The bare model, without an optimizer."""
    model = training.build_model(options, model_config(subject, options), place)
    model.train()
    return Runner(subject, options, model, lambda: model.zero_grad(set_to_none=True))


def _bundled_wrapper(
    options: Options, config: Any, module: Any, place: Place, version: int = 1
) -> Any:
    """The model in megatron-core's own FSDP, or in its rewrite, version 2."""
    from lib.bench_bundled import bundled_wrapper

    ddp = training.ddp_config(options)
    ddp.preserve_fp32_weights = True  # our config leaves that to newer fields
    # Of core 0.16. Later releases reduce and accumulate gradients in the dtype of the weights,
    # which is their default, unless `megatron_fsdp_main_grads_dtype` is set.
    ddp.grad_reduce_in_fp32 = not options.grad_reduce_in_bf16
    return bundled_wrapper(config, ddp, module, place, version)


def _with_core_optimizer(subject: Subject, options: Options, place: Place) -> Runner:
    """Ours, core's DDP or core's own FSDP, with core's optimizer."""
    config = model_config(subject, options)
    module = training.build_model(options, config, place)
    wrappers: dict[str, Callable[..., Any]] = {
        "bundled": _bundled_wrapper,
        REWRITE: functools.partial(_bundled_wrapper, version=2),
    }
    wrap = wrappers.get(subject.kind, training.wrap)
    model = wrap(options, config, module, place)
    model.train()
    optimizer = training.build_optimizer(options, model)
    for group in optimizer.param_groups:  # what core's scheduler does at every step
        group["lr"] = options.lr * group["lr_mult"]
        group["weight_decay"] = options.weight_decay * group["wd_mult"]
    training.connect(config, model, optimizer)

    def zero() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()

    def optimize() -> Any:
        updated, norm, _ = optimizer.step()
        if not updated:
            raise RuntimeError(f"{subject.name}: the optimizer skipped a step")
        return norm

    return Runner(subject, options, model, zero, optimize)


def _fsdp2(subject: Subject, options: Options, place: Place) -> Runner:
    """PyTorch's `fully_shard` on the unit boundaries of ours, with fp32 weights and gradients."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if options.expert_model_parallel_size > 1:
        raise ValueError(
            f"--expert-model-parallel-size {options.expert_model_parallel_size}: not supported by "
            "the fully_shard row, which has one mesh for all parameters. Leave it out"
        )
    model = training.build_model(options, model_config(subject, options), place).float()
    compute = training.params_dtype(options)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=torch.float32,
        # Activations already have the compute dtype; rotary angles must stay float32.
        cast_forward_inputs=False,
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mesh = DeviceMesh.from_group(group, place.device.type)
    gpt = model.module if hasattr(model, "module") else model
    units = [(one, True) for one in gpt.modules() if isinstance(one, TransformerLayer)]
    if not gpt.share_embeddings_and_output_weights:
        # The output layer's backward follows its forward at once.
        units += [(gpt.embedding, True), (gpt.output_layer, False)]
    for unit, reshard in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.train()
    params = [param for param in model.parameters() if param.requires_grad]
    decay = {True: options.weight_decay, False: 0.0}  # of matrices, and of other parameters
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params if (p.ndim > 1) is matrices], "weight_decay": value}
            for matrices, value in decay.items()
        ],
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        fused=place.device.type == "cuda",
        foreach=place.device.type != "cuda",
    )

    def optimize() -> Any:
        limit = options.clip_grad if options.clip_grad > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(params, limit)
        optimizer.step()
        return norm

    return Runner(subject, options, model, lambda: optimizer.zero_grad(set_to_none=True), optimize)
