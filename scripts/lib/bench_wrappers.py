"""The wrappers that `benchmark.py` compares: how each is built, and one training step of it.

All of them train the model that the options describe, from the same weights, on core's
forward-backward schedule, with AdamW and the same clipping, and with float32 gradients on the wire.
"""

from __future__ import annotations

import dataclasses
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
from lib.bench_subjects import OURS, Subject
from lib.check import Machine, this_machine, validated
from lib.distributed import Place
from lib.loop import forward_step
from lib.options import Options
from megatron_fsdp_adapter.core.runtime.registered import zero_cta_options

Batch = dict[str, torch.Tensor]


def _no_norm() -> None:
    return None


@dataclass
class Runner:
    """One wrapper that can train.

    Attributes:
        model: what core's schedule calls.
        zero: forgets all gradients.
        optimize: clips, steps, and returns the gradient norm before clipping (a number, a tensor,
            or None).
        marked: whether a marker is launched after forward and after backward, for a trace.
        schedule: core's forward-backward function.
        losses, norms: one entry a step, as 0-dimensional tensors or numbers; `history` reads them.
    """

    subject: Subject
    options: Options
    model: Any
    zero: Callable[[], None]
    optimize: Callable[[], Any] = _no_norm
    optimizer: Any = None
    marked: bool = False
    schedule: Callable[..., Any] = dataclasses.field(default_factory=get_forward_backward_func)
    losses: list[Any] = dataclasses.field(default_factory=list)
    norms: list[Any] = dataclasses.field(default_factory=list)

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Gradients of the microbatches; (2,): this rank's summed loss and number of tokens."""
        self.zero()
        sums = self.schedule(
            forward_step_func=self._marked_forward if self.marked else forward_step,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=self.options.seq_length,
            micro_batch_size=self.options.micro_batch_size,
            forward_only=False,
        )
        return torch.stack(sums).sum(dim=0)

    def _marked_forward(self, batches: Any, model: Any, **how: Any) -> Any:
        output, loss = forward_step(batches, model, **how)

        def marked_loss(*args: Any) -> Any:
            value = loss(*args)
            torch.cuda._sleep(1)
            return value

        return output, marked_loss

    def step(self, batches: Sequence[Batch]) -> None:
        """One training step. Nothing is read back from the device here."""
        total = self.forward_backward(batches)
        if self.marked:
            torch.cuda._sleep(1)
        self.losses.append(total[0] / total[1])
        self.norms.append(self.optimize())

    def close(self) -> None:
        """Lets the wrapper be collected. Core keeps the configs of mixtures of experts, and so the
        functions in them; its DDP hooks autograd nodes with functions that hold it: cycles that run
        outside of Python's collector and would keep its buffers for good. With gradients written in
        place something still does, so DDP's buffers are emptied."""
        if self.subject.is_captured:
            forget_graphs()
        config = getattr(self.model, "config", None)
        for wired in ("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"):
            if hasattr(config, wired):
                setattr(config, wired, None)
        if self.subject.kind in ("ddp", "ddp-muon"):
            for node in self.model.grad_accs:
                handle = node.register_hook(lambda *unused: None)
                hooks = handle.hooks_dict_ref()
                if hooks is not None:
                    hooks.clear()
            self.model.grad_accs.clear()
            for buffer in (*self.model.buffers, *self.model.expert_parallel_buffers):
                for data in (buffer.param_data, buffer.grad_data):
                    if data is not None:
                        data.untyped_storage().resize_(0)

    def history(self) -> list[tuple[float, float | None]]:
        """(loss of this rank, gradient norm over all ranks) of each step. Collective, blocks."""
        losses = [float(loss) for loss in self.losses]
        return list(zip(losses, [_plain(norm) for norm in self.norms], strict=True))


def _plain(norm: Any) -> float | None:
    if norm is None:
        return None
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def row_options(subject: Subject, options: Options, machine: Machine | None = None) -> Options:
    """The options of one wrapper: what all have in common, and what selects it. `machine`: default
    that which this process finds.

    Raises ValueError for a wrapper that cannot take the options.
    """
    if subject.offload is not None and options.transformer_impl != "transformer_engine":
        raise ValueError(
            f"{subject.name}: Transformer Engine offloads activations; use --transformer-impl "
            "transformer_engine"
        )
    on_shards = subject.is_ours or subject.kind == "bundled"
    reduces_tokens = on_shards or subject.kind in ("ddp", "ddp-muon")
    changed = dataclasses.replace(
        options,
        use_distributed_optimizer=reduces_tokens,
        overlap_grad_reduce=reduces_tokens,
        overlap_param_gather=reduces_tokens,
        use_megatron_fsdp=on_shards,
        # The floor and fully_shard have no main gradients to write into; the bundled engine writes
        # float32 ones with an operation that takes the compute dtype only.
        gradient_accumulation_fusion=options.gradient_accumulation_fusion
        and (subject.is_ours or subject.kind in ("ddp", "ddp-muon")),
        optimizer="muon" if subject.has_muon else "adam",
        separate_all_gather_groups=subject.kind == "ours-ag",
        fsdp_double_buffer=subject.kind in ("ours-db", "ours-ub", "ours-graph", "ours-layers"),
        nccl_ub=subject.kind in ("ours-ub", "ours-ce-ub"),
        fsdp_copy_engine_all_gather=subject.kind.startswith("ours-ce"),
        chunked_optimizer_state_offload=subject.kind == "ours-stream",
        fsdp_copy_engine_reduce_scatter=subject.kind
        in ("ours-ce-rs", "ours-ce-apart", "ours-ce-graph", "ours-ce-layers"),
        ddp_bucket_size=options.ddp_bucket_size if subject.kind == "ddp" else None,
        # Every token counts in a benchmark, so a mean over tokens is the mean over microbatches,
        # and wrappers that know nothing of tokens reach the same gradients with the latter.
        calculate_per_token_loss=options.calculate_per_token_loss and reduces_tokens,
        fsdp_unsharded_budget_gib=subject.budget,
        megatron_fsdp_enable_fine_grained_param_gather=subject.is_ours
        and options.megatron_fsdp_enable_fine_grained_param_gather,
        suggested_communication_unit_size=0
        if subject.is_apart
        else options.suggested_communication_unit_size if subject.is_ours else None,
        data_parallel_sharding_strategy=subject.strategy or "optim_grads_params",
        ckpt_format=None,
        **_precision(subject),
    )
    return validated(changed, machine or this_machine())[0]


def _precision(subject: Subject) -> dict[str, Any]:
    """The options that its name says, over those of the run."""
    if subject.precision is None:
        return {}
    fp8 = {"fp8_format": "hybrid", "fp8_recipe": subject.recipe} if subject.recipe else {}
    return {
        "bf16": True,
        "fp8_format": None,
        "fp8_param_gather": subject.has_fp8_weights,
        **fp8,
    }


def build(subject: Subject, options: Options, place: Place) -> Runner:
    """A wrapper around a new model, whose weights depend on the seed alone."""
    options = row_options(subject, options)
    torch.manual_seed(options.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        options.seed,
        use_cudagraphable_rng=subject.is_captured or subject.captures_layers,
        force_reset_rng=True,
    )
    runner = _BUILDERS[subject.kind](subject, options, place)
    if subject.is_captured:
        forget_graphs()
        runner.schedule = FullCudaGraphWrapper(runner.schedule, cuda_graph_warmup_steps=2)
    return runner


def forget_graphs() -> None:
    """Core keeps them, and what they read and return, on classes: one graph a process. They go
    before the communicators that they use, which would wait for them for good."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for stage in ("training", "validation"):
        FullCudaGraphWrapper.curr_iteration[stage] = 0
        FullCudaGraphWrapper.cuda_graph[stage] = None
        FullCudaGraphWrapper.result[stage] = None
        StaticBufferLoader.static_buffers[stage] = []


def forget_fp8() -> None:
    """Transformer Engine keeps the largest values of all FP8 modules there have been in one state
    of the process, and updates them after every step. Call it while no wrapper is alive."""
    module = sys.modules.get("transformer_engine.pytorch.quantization")
    if module is not None:
        module.FP8GlobalStateManager.reset()


def _config(subject: Subject, options: Options) -> Any:
    config = training.transformer_config(options)
    if subject.is_captured:
        ask_for_one_graph(config)
    if subject.captures_layers:
        ask_for_layers(config)
    config.cpu_offloading_num_layers = subject.offloaded_layers(options.num_layers)
    config.cpu_offloading = config.cpu_offloading_num_layers > 0
    return config


def ask_for_one_graph(config: Any) -> None:
    """A whole iteration in a graph: an implementation of its own, or, before megatron-core 0.18,
    the scope of another one."""
    if hasattr(config, "cuda_graph_modules"):
        config.cuda_graph_impl = "full_iteration"
    else:
        config.cuda_graph_impl = "local"
        config.cuda_graph_scope = [CudaGraphScope.full_iteration]


def ask_for_layers(config: Any) -> None:
    """Graphs of whole layers, of those with experts of their attention, from the second step on."""
    config.cuda_graph_impl, config.cuda_graph_warmup_steps = "local", 1
    parts = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
    setattr(config, parts, [])


def _floor(subject: Subject, options: Options, place: Place) -> Runner:
    model = training.build_model(options, _config(subject, options), place)
    model.train()
    return Runner(subject, options, model, lambda: model.zero_grad(set_to_none=True))


def _bundled_wrapper(options: Options, config: Any, module: Any, place: Place) -> Any:
    from lib.bench_bundled import bundled_wrapper

    ddp = training.ddp_config(options)
    ddp.preserve_fp32_weights = True  # our config leaves that to newer fields
    ddp.grad_reduce_in_fp32 = not options.grad_reduce_in_bf16
    return bundled_wrapper(config, ddp, module, place)


def _layer_wise_wrapper(options: Options, config: Any, module: Any, place: Place) -> Any:
    from lib.bench_muon import layer_wise_wrapper

    return layer_wise_wrapper(config, training.ddp_config(options), module)


def _with_core_optimizer(subject: Subject, options: Options, place: Place) -> Runner:
    config = _config(subject, options)
    module = training.build_model(options, config, place)
    special = {"bundled": _bundled_wrapper, "ddp-muon": _layer_wise_wrapper}
    wrap = special.get(subject.kind, training.wrap)
    model = wrap(options, config, module, place)
    model.train()
    optimizer = training.build_optimizer(options, model)
    for group in optimizer.param_groups:  # what core's scheduler does at every step
        group["lr"] = options.lr * group["lr_mult"]
        group["weight_decay"] = options.weight_decay * group["wd_mult"]
    trainee = training.Trainee(model, config, optimizer, None, 0)  # type: ignore[arg-type]
    training.connect(config, trainee, options)

    def zero() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()

    def optimize() -> Any:
        updated, norm, _ = optimizer.step()
        if not updated:
            raise RuntimeError(f"{subject.name}: the optimizer skipped a step")
        return norm

    return Runner(subject, options, model, zero, optimize, optimizer)


def _fsdp2(subject: Subject, options: Options, place: Place) -> Runner:
    """PyTorch's `fully_shard` on the unit boundaries of ours, with fp32 weights and gradients."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if options.expert_model_parallel_size > 1:
        raise ValueError(
            f"--expert-model-parallel-size {options.expert_model_parallel_size}: here fully_shard "
            "has one mesh for all parameters, over which it would mix ranks that hold different "
            "experts"
        )
    config = _config(subject, options)
    model = training.build_model(options, config, place).float()
    compute = training.params_dtype(options)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=torch.float32,
        # Activations have the compute dtype already; rotary angles are float32 and must stay so.
        cast_forward_inputs=False,
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    symmetric = subject.kind == "fsdp2-symm"
    if symmetric:
        ranks = torch.distributed.get_process_group_ranks(group)
        group = torch.distributed.new_group(ranks, pg_options=zero_cta_options())
        torch.distributed.all_reduce(torch.zeros(1, device=place.device), group=group)
    mesh = DeviceMesh.from_group(group, place.device.type)
    gpt = model.module if hasattr(model, "module") else model
    layers = [child for child in gpt.modules() if isinstance(child, TransformerLayer)]
    units = [(layer, True) for layer in layers]
    if not gpt.share_embeddings_and_output_weights:
        # The output layer's backward follows its forward at once.
        units += [(gpt.embedding, True), (gpt.output_layer, False)]
    for unit, reshard in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules() if symmetric else ():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_symm_mem_for_comm()
    model.train()
    return _with_torch_optimizer(subject, options, model, place)


def _with_torch_optimizer(
    subject: Subject, options: Options, model: Any, place: Place
) -> Runner:
    from lib.bench_muon import FullTensorMuon, Several, is_muons

    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    params = [param for _, param in named]
    matrices = [p for name, p in named if subject.has_muon and is_muons(name, p)]
    ids = {id(param) for param in matrices}
    decayed = [p for p in params if p.ndim > 1 and id(p) not in ids]
    others = [param for param in params if param.ndim <= 1]
    on_gpu = place.device.type == "cuda"
    optimizer: Any = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": options.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        fused=on_gpu,
        foreach=not on_gpu,
    )
    if matrices:
        muon = FullTensorMuon(matrices, options.lr, options.weight_decay)
        optimizer = Several([muon, optimizer])

    def optimize() -> Any:
        limit = options.clip_grad if options.clip_grad > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(params, limit)
        optimizer.step()
        return norm

    return Runner(
        subject, options, model, lambda: optimizer.zero_grad(set_to_none=True), optimize, optimizer
    )


_BUILDERS: dict[str, Callable[[Subject, Options, Place], Runner]] = {
    "floor": _floor,
    "floor-graph": _floor,
    "ddp": _with_core_optimizer,
    **dict.fromkeys(OURS, _with_core_optimizer),
    "bundled": _with_core_optimizer,
    "fsdp2": _fsdp2,
    "fsdp2-symm": _fsdp2,
    "fsdp2-muon": _fsdp2,
    "ddp-muon": _with_core_optimizer,
}
