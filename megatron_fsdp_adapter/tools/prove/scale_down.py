"""Scales a run's options down by rule, so that it can be proven on this machine.

Sizes shrink; features stay: strategy, precision, fusion, overlap, recomputation, axes of
parallelism. Every change has a reason. Features that this machine does not support are removed and
listed as not compared. Options have Megatron-LM's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp_adapter.megatron.options import sizes
from megatron_fsdp_adapter.megatron.options.settings import Change

Options = Mapping[str, Any]

AXES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "num_distributed_optimizer_instances",
)
"""Factors of the number of ranks, by priority if ranks are few."""

SIZES = frozenset(
    {
        *AXES, "world_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
        sizes.EXPERT_INSTANCES,
        "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank", "num_layers", "mtp_num_layers",
        "recompute_num_layers", "moe_layer_freq", "hidden_size", "ffn_hidden_size", "kv_channels",
        "num_attention_heads", "num_query_groups", "num_moe_experts", "num_experts",
        "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
        "moe_router_num_groups", "moe_router_group_topk", "q_lora_rank", "kv_lora_rank",
        "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "padded_vocab_size", "seq_length",
        "max_position_embeddings", "micro_batch_size", "global_batch_size", "microbatches",
    }
)  # fmt: skip
"""Options that are sizes and may shrink. Others stay, are in `DROPPED`, or follow: recomputed
modules, sequence parallelism, numbers of bf16 layers, learning rates, loss scale."""

STEP_LR = 1e-2


@dataclass(frozen=True)
class Room:
    """The most ranks of a proof; True for GPUs, and for an installed Transformer Engine."""

    ranks: int
    cuda: bool
    transformer_engine: bool

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"--ranks {self.ranks} must be at least 1")

    @property
    def has_te_layers(self) -> bool:
        """True if Transformer Engine's layers can run."""
        return self.cuda and self.transformer_engine


@dataclass
class ScaledDown:
    """A scaled-down run: its options, changes with reasons, and features that are not compared.
    keep: sizes that are not changed."""

    options: dict[str, Any]
    keep: frozenset[str] = frozenset()
    changes: list[Change] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return int(self.options["world_size"])

    def set(self, name: str, value: Any, reason: str) -> None:
        """Changes an option, and notes why. No-op for an option in `keep`."""
        before = self.options.get(name)
        if name in self.keep or before == value:
            return
        self.options[name] = value
        self.changes.append(Change(name, before, value, reason))

    def two_or_one(self, name: str, fits: bool, why_not: str) -> bool:
        """Gives an axis of several ranks two if `fits`, else one. Returns True if it gave two."""
        size = _number(self.options, name, 1)
        if size == 1:
            return False
        if fits:
            self.set(name, 2, "the fewest ranks that have this axis")
        else:
            self.left_out.append(f"{name}={size}: {why_not}")
            self.set(name, 1, why_not)
        return fits

    def at_most(self, name: str, value: int, reason: str) -> None:
        """Lowers a size to `value` if it is larger."""
        before = self.options.get(name)
        if before is not None and before > value:
            self.set(name, value, reason)


When = Callable[[Options, Room], bool]


def _on(name: str) -> When:
    return lambda o, room: bool(o.get(name))


def _on_cpu(name: str) -> When:
    return lambda o, room: bool(o.get(name)) and not room.cuda


def _without_te(name: str) -> When:
    return lambda o, room: bool(o.get(name)) and not room.has_te_layers


def _te_layers_without_te(options: Options, room: Room) -> bool:
    return options.get("transformer_impl") != "local" and not room.has_te_layers


def _needs_precision_aware(name: str) -> When:
    """A predicate: True if the option's dtype needs a precision-aware optimizer, which is off."""

    def needs(options: Options, room: Room) -> bool:
        if options.get("use_precision_aware_optimizer") or options.get(name) is None:
            return False
        return str(options[name]) not in ("fp32", "float32", "torch.float32")

    return needs


_GPU = "needs a GPU"
_TE = "needs a GPU and Transformer Engine"
_RANDOM = "ranks draw other random numbers"
_READ_EARLY = "a proof reads gradients between backward and step"
_SAME_START = "both models are given the same weights before they are wrapped"
_FEW_ACTIVATIONS = "activations of a small model need no offload"
_LAYERS_GONE = "it names the layers that were taken away"


def _each(
    names: Sequence[str], predicate: Callable[[str], When], value: Any, reason: str
) -> dict[str, tuple[When, Any, str]]:
    """Rows of `DROPPED` that have one neutral value and one reason."""
    return {name: (predicate(name), value, reason) for name in names}


OF_TE = (
    "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "apply_rope_fusion",
    "use_precision_aware_optimizer", "tp_comm_overlap", "first_last_layers_bf16",
    "use_transformer_engine_op_fuser",
)  # fmt: skip
OF_GPUS = (
    "optimizer_cpu_offload", "bias_gelu_fusion", "bias_swiglu_fusion", "bias_dropout_fusion",
    "bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm",
    "cross_entropy_loss_fusion", "nccl_ub", "fsdp_copy_engine_all_gather",
    "fsdp_copy_engine_reduce_scatter", "fsdp_manual_registration", "moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
)  # fmt: skip
UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
)  # fmt: skip

DROPPED: Mapping[str, tuple[When, Any, str]] = {
    # Core's default is not 0, so a missing option counts too.
    "hidden_dropout": (lambda o, room: o.get("hidden_dropout") != 0.0, 0.0, _RANDOM),
    "attention_dropout": (lambda o, room: o.get("attention_dropout") != 0.0, 0.0, _RANDOM),
    "transformer_impl": (_te_layers_without_te, "local", _TE),
    "fp8": (_without_te("fp8"), None, _TE),
    **_each(OF_TE, _without_te, False, _TE),
    **_each(
        ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
        _needs_precision_aware,
        "fp32",
        "only with a precision-aware optimizer",
    ),
    **_each(OF_GPUS, _on_cpu, False, _GPU),
    "softmax_type": (
        lambda o, room: o.get("softmax_type") not in (None, "vanilla") and not room.has_te_layers,
        "vanilla",
        _TE,
    ),
    "moe_token_dispatcher_type": (
        lambda o, room: o.get("moe_token_dispatcher_type") == "flex",
        "alltoall",
        "needs a package, and GPUs with the links that its kernels require",
    ),
    "moe_expert_rank_capacity_factor": (
        _on("moe_expert_rank_capacity_factor"),
        None,
        "only with the flex dispatcher",
    ),
    "moe_paged_stash": (_on("moe_paged_stash"), False, "only with the flex dispatcher"),
    "cuda_graph_impl": (
        lambda o, room: o.get("cuda_graph_impl") not in (None, "none"),
        "none",
        _READ_EARLY,
    ),
    "enable_cuda_graph": (_on("enable_cuda_graph"), False, _READ_EARLY),
    "init_model_with_meta_device": (_on("init_model_with_meta_device"), False, _SAME_START),
    **_each(("fp8_param", "fp8_param_gather"), _on, False, f"{_SAME_START}, in bf16"),
    **_each(("fine_grained_activation_offloading", "cpu_offloading"), _on, False, _FEW_ACTIVATIONS),
    **_each(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        _on,
        False,
        "stages are made even",
    ),
    **_each(UNEVEN_STAGES, _on, None, "stages are made even"),
    **_each(
        ("pipeline_model_parallel_layout", "heterogeneous_layers_config_path"),
        _on,
        None,
        _LAYERS_GONE,
    ),
    **_each(
        ("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_limited_devices"),
        _on,
        None,
        "the small model has too few experts for groups",
    ),
    "moe_input_jitter_eps": (_on("moe_input_jitter_eps"), None, _RANDOM),
    "fp4": (_on("fp4"), None, "no error bound is known for its GEMMs"),
    "moe_expert_capacity_factor": (
        _on("moe_expert_capacity_factor"),
        None,
        "it makes routing depend on other ranks' tokens",
    ),
}
"""Options that a proof cannot keep: when (after the rows above), the neutral value, and why."""

UNSUPPORTED: Mapping[str, Any] = {
    "yaml_cfg": None, "spec": None, "use_legacy_models": False, "is_hybrid_model": False,
    "experimental_attention_variant": None, "hybrid_override_pattern": None,
    "qk_layernorm_of_all_heads": False, "post_layernorms": False,
}  # fmt: skip
"""Options of models that a proof cannot build, with the value that is allowed."""


def ranks_over(options: Options) -> int:
    """The number of ranks over which the model is split, except its experts."""
    return math.prod(_number(options, name, 1) for name in AXES[:3])


def _number(options: Options, name: str, default: int) -> int:
    return int(options.get(name) or default)


def _round_up(value: float, multiple: int) -> int:
    return max(1, -(-int(value) // multiple)) * multiple


def shrink(options: Options, room: Room, keep: frozenset[str] = frozenset()) -> ScaledDown:
    """The scaled-down run. options: by Megatron's names; keep: sizes that are not changed.

    Raises ValueError for names in `keep` that are no sizes, and for models that cannot be built.
    """
    unknown = sorted(keep - SIZES)
    if unknown:
        raise ValueError(
            f"--keep {', '.join(unknown)}: not a size that a proof changes. Leave it out"
        )
    for name, allowed in UNSUPPORTED.items():
        value = options.get(name)
        if value not in (allowed, None):
            raise ValueError(f"{name}={value!r}: not supported by a proof. Leave it out")
    work = ScaledDown(dict(options), keep)
    for option, (when, value, reason) in DROPPED.items():
        if when(work.options, room):
            work.left_out.append(f"{option}={work.options.get(option)}: {reason}")
            work.set(option, value, reason)
    # In this order: each step reads sizes that earlier ones have shrunk.
    _recomputed(work, room)
    _ranks(work, room)
    _layers(work)
    _widths(work, room)
    _experts(work)
    _batches(work, room)
    _schedule(work)
    work.left_out.append("data, tokenizer and learning-rate schedule: random tokens, one rate")
    work.left_out = list(dict.fromkeys(work.left_out))
    return work


_ASKS_TE = "core's recomputation of it needs Transformer Engine"
NOT_RECOMPUTED: Mapping[str, tuple[When, str]] = {
    "moe_act": (lambda o, room: not o.get("moe_grouped_gemm"), "only with moe_grouped_gemm"),
    "layernorm": (lambda o, room: not room.transformer_engine, _ASKS_TE),
    "mla_up_proj": (lambda o, room: not room.transformer_engine, _ASKS_TE),
}
"""Parts of layers that core cannot recompute, when, and why."""


def _recomputed(work: ScaledDown, room: Room) -> None:
    """Removes modules that cannot be recomputed; without any other, recomputation is off."""
    for module, (when, reason) in NOT_RECOMPUTED.items():
        modules = work.options.get("recompute_modules") or []
        if module not in modules or not when(work.options, room):
            continue
        work.left_out.append(f"recompute_modules={module}: {reason}")
        work.set("recompute_modules", [one for one in modules if one != module], reason)
        if len(modules) == 1:
            work.set("recompute_granularity", None, reason)


def _ranks(work: ScaledDown, room: Room) -> None:
    """Sets two ranks for each axis that fits. Data parallelism is first: its sharding is proven."""
    options = work.options
    if not options.get("group_query_attention"):
        work.set("num_query_groups", None, "only with group_query_attention")
    world = min(2, room.ranks)
    too_few = f"there are {room.ranks} ranks"
    if world < 2:
        work.left_out.append("shards of several ranks: there is one rank")
    for name in AXES:
        if name == "context_parallel_size" and not room.cuda:
            work.two_or_one(name, False, _TE)
        elif work.two_or_one(name, 2 * world <= room.ranks, too_few):
            world *= 2
    if "world_size" in work.keep:
        world = _number(options, "world_size", world)
    tensor = _number(options, "tensor_model_parallel_size", 1)
    pipeline = _number(options, "pipeline_model_parallel_size", 1)
    if _number(options, "num_moe_experts", 0):
        split = _number(options, "expert_model_parallel_size", 1) > 1
        if split and world // pipeline == 2 and 2 * world <= room.ranks:
            world *= 2  # or each expert would be on one rank, without shards
        in_stage = world // pipeline
        if work.two_or_one("expert_model_parallel_size", in_stage > 1, too_few) and in_stage < 4:
            work.left_out.append("shards of experts: each expert is on one rank")
        both = 2 * _number(options, "expert_model_parallel_size", 1)
        if work.two_or_one("expert_tensor_parallel_size", tensor > 1 and in_stage >= both, too_few):
            both *= 2
        work.two_or_one(sizes.EXPERT_INSTANCES, in_stage >= both, too_few)
    else:  # Megatron sets it without experts, too, and requires that it divides the ranks
        work.set("expert_tensor_parallel_size", tensor, "as tensor parallelism: no experts")
    if tensor == 1 and options.get("sequence_parallel"):
        work.left_out.append("sequence_parallel: only with tensor parallelism")
        work.set("sequence_parallel", False, "one tensor-parallel rank")
    work.set("world_size", world, "the fewest ranks that have all axes")


VIRTUAL = (*sizes.VIRTUAL, sizes.PER_VIRTUAL)
"""The names of one size."""


def _layers(work: ScaledDown) -> None:
    """Shrinks the number of layers, at most two model chunks a rank. After `_ranks`."""
    options = work.options
    stages = _number(options, "pipeline_model_parallel_size", 1)
    virtual = any(map(options.get, VIRTUAL))
    if virtual and stages == 1:
        work.left_out.append("virtual_pipeline_model_parallel_size: one pipeline stage")
    chunks = 2 if virtual and stages > 1 else 1
    first, *others = VIRTUAL
    reason = "two chunks, by virtual_pipeline_model_parallel_size"
    work.set(first, chunks if chunks > 1 else None, reason)
    for name in others:
        work.set(name, None, reason)
    pieces = stages * chunks
    frequency = options.get("moe_layer_freq", 1)
    if isinstance(frequency, int) and frequency > 1:  # as a list of all layers, which is cut below
        frequency = [int(i % frequency == 0) for i in range(_number(options, "num_layers", 1))]
    # Three layers if all are in one piece: a first, a last, and one in between. Else two a piece.
    few = 3 if pieces == 1 else 2 * pieces
    work.at_most("num_layers", few, "a first, a last and one in between")
    if isinstance(frequency, (list, tuple)):
        layers = _number(options, "num_layers", 1)
        kept = list(frequency[:layers])
        if len(set(frequency)) > len(set(kept)):  # dense layers come first: keep one
            kept = [0] + [1] * (layers - 1)
        work.set("moe_layer_freq", kept, "one entry a layer")
    for name in (
        "mtp_num_layers",
        "recompute_num_layers",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
    ):
        work.at_most(name, 1, "fewer layers")


def quantum(options: Options) -> int:
    """The multiple that widths must have: blocks of the FP8 recipe, or vectors of GPU kernels."""
    if not options.get("fp8"):
        return 8
    return {"blockwise": 128, "mxfp8": 32}.get(str(options.get("fp8_recipe")), 16)


LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
}
"""The largest widths of latent attention."""


def _widths(work: ScaledDown, room: Room) -> None:
    """Shrinks heads, then the widths that follow from them. Small head sizes, and small ratios of
    MLP to hidden size, stay. After `_ranks`."""
    options = work.options
    tensor = _number(options, "tensor_model_parallel_size", 1)
    heads = _number(options, "num_attention_heads", 1)
    hidden = _number(options, "hidden_size", heads)
    ratio = _number(options, "ffn_hidden_size", 4 * hidden) / hidden
    unit = quantum(options)
    head_dim = _number(options, "kv_channels", hidden // heads)
    small_dim = min(head_dim, 64 if room.cuda else 16)
    groups = options.get("num_query_groups")
    if groups:
        few_groups = tensor * min(2, max(1, groups // tensor))
        heads_of_group = min(3, max(1, heads // groups))
        work.at_most("num_query_groups", few_groups, "width")
        groups = _number(options, "num_query_groups", few_groups)
        work.at_most("num_attention_heads", groups * heads_of_group, "width, grouped as before")
    else:
        work.at_most("num_attention_heads", _round_up(3, tensor), "width")
    heads = _number(options, "num_attention_heads", heads)
    work.at_most("hidden_size", _round_up(heads * small_dim, unit * tensor), "width")
    hidden = _number(options, "hidden_size", hidden)
    if "hidden_size" not in work.keep:
        work.set("kv_channels", small_dim, "width of a head")
    # One unit more, so that it is no power of two and shards end inside matrices.
    ffn = _round_up(hidden * min(ratio, 3.0), unit * tensor) + unit * tensor
    work.set("ffn_hidden_size", min(ffn, options.get("ffn_hidden_size") or ffn), "width")
    for name, size in LATENT.items():
        work.at_most(name, size, "width")
    work.set("padded_vocab_size", _round_up(200, 8 * tensor), "a small vocabulary")


def routes_by_rounding(options: Options) -> bool:
    """True if rounding may route a token to another expert. A proof has few tokens, so that one of
    them changes the gradients of all earlier layers by more than rounding does."""
    is_narrow = any(options.get(name) for name in ("bf16", "fp16", "fp8"))
    return bool(options.get("num_moe_experts")) and is_narrow


def _experts(work: ScaledDown) -> None:
    """Shrinks the number of experts to two for each rank, but at least four, and their widths.
    After `_ranks` and `_widths`: an expert is as wide as the shrunk model."""
    options = work.options
    if not options.get("num_moe_experts"):
        return
    if routes_by_rounding(options):
        work.left_out.append(
            "gradients and updates after the first step: rounding may route a token to another "
            "expert"
        )
    number = 2 * max(2, _number(options, "expert_model_parallel_size", 1))
    work.at_most("num_moe_experts", number, "experts")
    if "num_experts" in options:
        work.set("num_experts", options["num_moe_experts"], "experts")
    work.at_most("moe_router_topk", 2, "fewer experts")
    unit = quantum(options) * _number(options, "expert_tensor_parallel_size", 1)
    hidden = _number(options, "hidden_size", 1)
    width = _round_up(hidden, unit) + unit  # one unit more, as in `_widths`
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if options.get(name) is not None:
            work.at_most(name, width, "width")


def _batches(work: ScaledDown, room: Room) -> None:
    """Shrinks sequences and batches. After `_ranks`."""
    options = work.options
    context = _number(options, "context_parallel_size", 1)
    stages = _number(options, "pipeline_model_parallel_size", 1)
    work.at_most("seq_length", 128 if room.cuda else 16 * context, "tokens")
    work.set("max_position_embeddings", _number(options, "seq_length", 16), "as many as tokens")
    # The original sizes decide if there are several microbatches, so they are read first.
    micro = _number(options, "micro_batch_size", 1)
    total = options.get("global_batch_size")
    work.at_most("micro_batch_size", 2, "samples")
    data_ranks = _number(options, "original_data_parallel_size", 1)
    several = total is not None and total > micro * data_ranks
    number = 3 if several else 1
    if stages > 1:
        number = 2 * stages
    work.set("microbatches", number, "several, as in the run" if several else "one step")
    if not several and stages == 1:
        work.left_out.append("several microbatches: the run has one (or no global batch size)")
    ranks = options["world_size"] // ranks_over(options)
    samples = options["microbatches"] * ranks * _number(options, "micro_batch_size", 1)
    work.set("global_batch_size", samples, "microbatches x ranks x samples")


def _schedule(work: ScaledDown) -> None:
    """Sets one learning rate, large enough to change bf16 weights. After an update of 1e-5 they
    round to the same values, so stale weights would go unnoticed."""
    work.set("lr", STEP_LR, "a step that rounding does not hide")
    work.set("min_lr", 0.0, "one learning rate")
    if work.options.get("fp16") and not work.options.get("loss_scale"):
        work.set("initial_loss_scale", 1024.0, "no step is skipped while the loss scale adapts")
