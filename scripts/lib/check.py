"""Rules about options: defaults, and problems found before any process group exists.

Every problem of a command line is collected; the user sees them in one error.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.options import Options, flag
from megatron_fsdp_adapter.tools.models.spec import default_ffn_hidden_size

BYTE_VOCABULARY = 256


@dataclass(frozen=True)
class Machine:
    """The environment of the run: number of processes, True for CUDA and for Transformer Engine,
    and the value of CUDA_DEVICE_MAX_CONNECTIONS."""

    world_size: int
    cuda: bool
    transformer_engine: bool
    max_connections: str | None = None

    @property
    def has_te_layers(self) -> bool:
        """True if Transformer Engine's layers can run."""
        return self.cuda and self.transformer_engine


def data_parallel_size(options: Options, machine: Machine) -> int:
    """Number of data-parallel ranks; 0 if tensor parallelism does not divide the processes."""
    tensor = max(options.tensor_model_parallel_size, 1)
    if machine.world_size % tensor == 0:
        return machine.world_size // tensor
    return 0


# Defaults of options that are None, in the order of their dependencies.
DERIVED: tuple[tuple[str, Callable[[Options, Machine], Any]], ...] = (
    ("ffn_hidden_size", lambda o, m: default_ffn_hidden_size(o.hidden_size, o.swiglu)),
    ("moe_ffn_hidden_size", lambda o, m: o.ffn_hidden_size),
    ("expert_tensor_parallel_size", lambda o, m: o.tensor_model_parallel_size),
    ("kv_channels", lambda o, m: o.hidden_size // max(o.num_attention_heads, 1)),
    ("max_position_embeddings", lambda o, m: o.seq_length),
    (
        "transformer_impl",
        lambda o, m: "transformer_engine" if m.has_te_layers else "local",
    ),
    ("global_batch_size", lambda o, m: o.micro_batch_size * data_parallel_size(o, m)),
    ("lr_decay_iters", lambda o, m: o.train_iters),
    ("distributed_backend", lambda o, m: "nccl" if m.cuda else "gloo"),
    ("ckpt_format", lambda o, m: "fsdp_dtensor"),
)

# Options that follow from others, with the reason; the run prints those that change a value.
FORCED: tuple[tuple[str, Any, Callable[[Options, Machine], bool], str], ...] = (
    (
        "use_distributed_optimizer",
        True,
        lambda o, m: o.use_megatron_fsdp,
        "required by --use-megatron-fsdp",
    ),
    ("bias_gelu_fusion", False, lambda o, m: not m.cuda, "it is compiled for the GPU"),
    ("bias_swiglu_fusion", False, lambda o, m: not m.cuda, "it is compiled for the GPU"),
    ("bias_dropout_fusion", False, lambda o, m: not m.cuda, "it is compiled for the GPU"),
    (
        "rope_fusion",
        False,
        lambda o, m: not m.has_te_layers,
        "a kernel of Transformer Engine",
    ),
)

SIZES_OF_EXPERTS = (
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
ABOVE_ZERO = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels",
    "num_query_groups", "seq_length", "max_position_embeddings", "micro_batch_size",
    "global_batch_size", "train_iters", "eval_interval", "exit_interval", "lr_decay_iters",
    "recompute_num_layers", "tensor_model_parallel_size", "ddp_bucket_size",
    "num_distributed_optimizer_instances", "distributed_timeout_minutes", "vocab_size",
    "padded_vocab_size", "make_vocab_size_divisible_by", "save_interval", "log_interval",
    "fp8_amax_history_len",
)  # fmt: skip
NOT_NEGATIVE = (
    "eval_iters", "lr", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad", "hidden_dropout",
    "attention_dropout", "seed",
)  # fmt: skip
AT_LEAST: dict[str, float] = {
    **dict.fromkeys(SIZES_OF_EXPERTS, 1),
    "moe_aux_loss_coeff": 0,
    "suggested_communication_unit_size": 0,
    **dict.fromkeys(ABOVE_ZERO, 1),
    **dict.fromkeys(NOT_NEGATIVE, 0),
}


def _splits_heads_unevenly(o: Options, m: Machine) -> bool:
    heads = o.num_query_groups if o.group_query_attention else o.num_attention_heads
    return heads % o.tensor_model_parallel_size != 0


def _splits_batch_unevenly(o: Options, m: Machine) -> bool:
    ranks = data_parallel_size(o, m)
    if ranks == 0:
        return False
    return (o.global_batch_size or 0) % (o.micro_batch_size * ranks) != 0


def _recomputes_without_method(o: Options, m: Machine) -> bool:
    if o.recompute_granularity != "full":
        return False
    return o.recompute_method is None or o.recompute_num_layers is None


def _has_method_without_recomputation(o: Options, m: Machine) -> bool:
    if o.recompute_granularity == "full":
        return False
    return o.recompute_method is not None or o.recompute_num_layers is not None


def _overlaps_gathers_without_shards(o: Options, m: Machine) -> bool:
    if not o.overlap_param_gather or o.use_megatron_fsdp:
        return False
    return not (o.use_distributed_optimizer and o.overlap_grad_reduce)


def _splits_experts_unevenly(o: Options, m: Machine) -> bool:
    if o.num_experts is None:
        return False
    return m.world_size % (o.expert_model_parallel_size * o.expert_tensor_parallel_size) != 0


def _needs_sequence_parallel(o: Options, m: Machine) -> bool:
    if o.num_experts is None or o.sequence_parallel:
        return False
    return o.tensor_model_parallel_size > 1


def _overlaps_no_exchange(o: Options, m: Machine) -> bool:
    if not o.overlap_moe_expert_parallel_comm:
        return False
    return o.expert_model_parallel_size == 1 or o.moe_token_dispatcher_type != "alltoall"


def _evaluates_nothing(o: Options, m: Machine) -> bool:
    if o.eval_iters <= 0 or o.eval_interval is None:
        return False
    return bool(o.train_data_path) and not o.valid_data_path


def _has_no_row_for_the_end(o: Options, m: Machine) -> bool:
    if o.padded_vocab_size is None:
        return False
    return o.padded_vocab_size <= (o.vocab_size or BYTE_VOCABULARY)


def _has_no_te(o: Options, m: Machine) -> bool:
    return o.transformer_impl == "transformer_engine" and not m.has_te_layers


RULES: tuple[tuple[Callable[[Options, Machine], bool], str], ...] = (
    # Predicate of a problem, and its text. o: options; m: machine; d: data-parallel ranks; u: d x
    # micro batch size, of which a global batch is a multiple.
    # Model
    (
        lambda o, m: o.hidden_size % o.num_attention_heads != 0,
        "--hidden-size {o.hidden_size} is not a multiple of --num-attention-heads "
        "{o.num_attention_heads}. Change one of them",
    ),
    (
        lambda o, m: o.group_query_attention and o.num_attention_heads % o.num_query_groups != 0,
        "--num-query-groups {o.num_query_groups} does not divide --num-attention-heads "
        "{o.num_attention_heads}. Change one of them",
    ),
    (
        _splits_heads_unevenly,
        "--tensor-model-parallel-size {o.tensor_model_parallel_size} does not divide the number "
        "of key/value heads. Change one of them",
    ),
    (
        lambda o, m: (o.max_position_embeddings or 0) < o.seq_length,
        "--max-position-embeddings {o.max_position_embeddings} is less than --seq-length "
        "{o.seq_length}. Raise it",
    ),
    (
        lambda o, m: max(o.hidden_dropout, o.attention_dropout) >= 1,
        "--hidden-dropout {o.hidden_dropout} and --attention-dropout {o.attention_dropout} must "
        "be below 1",
    ),
    (
        _has_no_te,
        "--transformer-impl transformer_engine needs a GPU and an installed Transformer Engine: "
        "use --transformer-impl local",
    ),
    (
        lambda o, m: o.cross_entropy_loss_fusion and not m.cuda,
        "--cross-entropy-loss-fusion is compiled for the GPU. Leave it out on the CPU",
    ),
    (
        lambda o, m: o.gradient_accumulation_fusion and not m.cuda,
        "--gradient-accumulation-fusion needs CUDA kernels. Leave it out on the CPU",
    ),
    # Batches and schedule
    (
        lambda o, m: data_parallel_size(o, m) == 0,
        "--tensor-model-parallel-size {o.tensor_model_parallel_size} does not divide the number "
        "of processes {m.world_size}. Change one of them",
    ),
    (
        _splits_batch_unevenly,
        "--global-batch-size {o.global_batch_size} is not a multiple of --micro-batch-size "
        "{o.micro_batch_size} x {d} data-parallel ranks. Use a multiple of {u}",
    ),
    (
        lambda o, m: o.min_lr > o.lr,
        "--min-lr {o.min_lr} is more than --lr {o.lr}. Lower it",
    ),
    (
        lambda o, m: o.lr_warmup_iters >= (o.lr_decay_iters or 0),
        "--lr-warmup-iters {o.lr_warmup_iters} is not less than --lr-decay-iters "
        "{o.lr_decay_iters} (default --train-iters). Lower it",
    ),
    # Precision and memory
    (
        lambda o, m: o.grad_reduce_in_bf16 and not o.bf16,
        "--grad-reduce-in-bf16 without --bf16: gradients of an fp32 model are reduced in fp32. "
        "Leave it out",
    ),
    (
        lambda o, m: o.fp8_format is not None and o.transformer_impl != "transformer_engine",
        "--fp8-format {o.fp8_format} with --transformer-impl {o.transformer_impl}: FP8 GEMMs need "
        "TE. Use --transformer-impl transformer_engine, on a GPU, or leave it out",
    ),
    (
        lambda o, m: o.fp8_format is not None and not o.bf16,
        "--fp8-format {o.fp8_format} without --bf16: weights that are not FP8 must be bf16. Give "
        "--bf16",
    ),
    (
        lambda o, m: o.fp8_format is None and o.fp8_param_gather,
        "--fp8-param-gather without --fp8-format: FP8 weights need FP8 GEMMs. Give --fp8-format "
        "hybrid, or leave it out",
    ),
    (
        _recomputes_without_method,
        "--recompute-granularity full needs --recompute-method (uniform or block) and "
        "--recompute-num-layers",
    ),
    (
        _has_method_without_recomputation,
        "--recompute-method and --recompute-num-layers only go with --recompute-granularity full",
    ),
    # Parallelism
    (
        lambda o, m: o.distributed_backend == "nccl" and not m.cuda,
        "--distributed-backend nccl, but there is no CUDA. Use gloo",
    ),
    (
        lambda o, m: o.distributed_backend == "gloo" and m.cuda,
        "--distributed-backend gloo, but there is a GPU. Use nccl, or hide the GPUs "
        "(CUDA_VISIBLE_DEVICES='') to train on the CPU",
    ),
    (
        lambda o, m: o.sequence_parallel and o.tensor_model_parallel_size == 1,
        "--sequence-parallel with --tensor-model-parallel-size 1. Leave it out",
    ),
    (
        _overlaps_gathers_without_shards,
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    ),
    (
        lambda o, m: o.num_distributed_optimizer_instances > 1 and not o.use_distributed_optimizer,
        "--num-distributed-optimizer-instances {o.num_distributed_optimizer_instances} needs "
        "--use-distributed-optimizer",
    ),
    (
        lambda o, m: o.num_experts is None and o.expert_model_parallel_size > 1,
        "--expert-model-parallel-size {o.expert_model_parallel_size} without --num-experts. Give "
        "the number of experts, or leave it out",
    ),
    (
        lambda o, m: (o.num_experts or 0) % o.expert_model_parallel_size != 0,
        "--expert-model-parallel-size {o.expert_model_parallel_size} does not divide "
        "--num-experts {o.num_experts}. Change one of them",
    ),
    (
        _splits_experts_unevenly,
        "--expert-model-parallel-size {o.expert_model_parallel_size} x "
        "--expert-tensor-parallel-size {o.expert_tensor_parallel_size} does not divide the number "
        "of processes {m.world_size}. Change one of them",
    ),
    (
        lambda o, m: o.num_experts is not None and o.moe_router_topk > o.num_experts,
        "--moe-router-topk {o.moe_router_topk} is more than --num-experts {o.num_experts}. Lower "
        "it",
    ),
    (
        _needs_sequence_parallel,
        "--num-experts with --tensor-model-parallel-size {o.tensor_model_parallel_size} needs "
        "--sequence-parallel",
    ),
    (
        lambda o, m: o.moe_grouped_gemm and o.transformer_impl != "transformer_engine",
        "--moe-grouped-gemm needs --transformer-impl transformer_engine. Leave it out",
    ),
    (
        lambda o, m: o.moe_permute_fusion and not m.has_te_layers,
        "--moe-permute-fusion needs a GPU and an installed Transformer Engine. Leave it out",
    ),
    (
        _overlaps_no_exchange,
        "--overlap-moe-expert-parallel-comm needs --expert-model-parallel-size above 1 and "
        "--moe-token-dispatcher-type alltoall. Give both, or leave it out",
    ),
    (
        lambda o, m: o.overlap_moe_expert_parallel_comm and not o.bf16,
        "--overlap-moe-expert-parallel-comm needs --bf16: core refuses it otherwise",
    ),
    (
        lambda o, m: o.delay_wgrad_compute and not o.overlap_moe_expert_parallel_comm,
        "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm. Give both, or leave it "
        "out",
    ),
    (
        lambda o, m: o.separate_all_gather_groups and not o.use_megatron_fsdp,
        "--separate-all-gather-groups without --use-megatron-fsdp: stock DDP has one group. Leave "
        "it out",
    ),
    (
        lambda o, m: o.use_megatron_fsdp and o.ddp_bucket_size is not None,
        "--ddp-bucket-size with --use-megatron-fsdp has no effect: units replace buckets. Leave "
        "it out",
    ),
    (
        lambda o, m: o.use_megatron_fsdp and m.max_connections == "1" and m.cuda,
        "the environment has CUDA_DEVICE_MAX_CONNECTIONS=1, which keeps the communication of "
        "--use-megatron-fsdp from overlapping. Unset it",
    ),
    (
        lambda o, m: o.init_model_with_meta_device and not o.use_megatron_fsdp,
        "--init-model-with-meta-device without --use-megatron-fsdp: the weights would not be "
        "initialized. Leave it out",
    ),
    # Checkpoints
    (
        lambda o, m: not o.use_megatron_fsdp and bool(o.save or o.load),
        "--save or --load without --use-megatron-fsdp: this script does not save stock DDP. Save "
        "its runs with Megatron-LM's script, or give --use-megatron-fsdp",
    ),
    (
        lambda o, m: o.save is None and o.save_interval is not None,
        "--save-interval {o.save_interval} without --save. Give the folder with --save",
    ),
    (
        lambda o, m: o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler,
        "--override-opt-param-scheduler takes this run's schedule, and "
        "--use-checkpoint-opt_param-scheduler the checkpoint's. Give one of them",
    ),
    # Data
    (
        lambda o, m: o.mock_data == bool(o.train_data_path),
        "give --train-data-path (made by scripts/prepare_data.py) or --mock-data, one of them",
    ),
    (
        _evaluates_nothing,
        "--eval-iters {o.eval_iters}, but there is no validation data. Give --valid-data-path "
        "or --eval-iters 0",
    ),
    (
        lambda o, m: o.tokenizer_type == "NullTokenizer" and o.vocab_size is None,
        "--tokenizer-type NullTokenizer needs --vocab-size",
    ),
    (
        lambda o, m: o.tokenizer_type == "ByteLevelTokenizer" and o.vocab_size is not None,
        "--vocab-size {o.vocab_size} with --tokenizer-type ByteLevelTokenizer, which has 256: "
        "leave it out, or use NullTokenizer",
    ),
    (
        _has_no_row_for_the_end,
        "--padded-vocab-size {o.padded_vocab_size} has no row for the end of a document. Raise it "
        "above the vocabulary (256 for ByteLevelTokenizer, else --vocab-size)",
    ),
    (
        lambda o, m: (o.padded_vocab_size or 0) % o.tensor_model_parallel_size != 0,
        "--padded-vocab-size {o.padded_vocab_size} is not a multiple of "
        "--tensor-model-parallel-size {o.tensor_model_parallel_size}. Raise it to one",
    ),
)


def resolve(options: Options, machine: Machine) -> tuple[Options, list[str]]:
    """The resolved options, and a line for each one that was forced."""
    for name, derive in DERIVED:
        if getattr(options, name) is None:
            options = dataclasses.replace(options, **{name: derive(options, machine)})
    lines = []
    for name, value, applies, reason in FORCED:
        if applies(options, machine) and getattr(options, name) != value:
            options = dataclasses.replace(options, **{name: value})
            lines.append(f"{flag(name)} is {'on' if value else 'off'}: {reason}")
    return options, lines


def _range_problems(options: Options) -> Iterator[str]:
    for name, least in AT_LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            yield f"{flag(name)} {value} must be at least {least:g}"


def _prefixes(blend: Sequence[str] | None) -> Sequence[str]:
    """The prefixes of a --train-data-path, without the weights that may precede each."""
    parts = blend or []
    if len(parts) % 2 == 1:
        return parts
    has_weights = all(part.replace(".", "", 1).isdigit() for part in parts[::2])
    return parts[1::2] if has_weights else parts


def missing_files(options: Options) -> list[str]:
    """A line for each data prefix without its files, and for a checkpoint folder to load that does
    not exist. That of --save may not exist yet."""
    lines = []
    for name in ("train_data_path", "valid_data_path"):
        for prefix in _prefixes(getattr(options, name)):
            files = (f"{prefix}.bin", f"{prefix}.idx")
            gone = [file for file in files if not Path(file).is_file()]
            if gone:
                lines.append(
                    f"{flag(name)} {prefix}: no file {' and '.join(gone)}. "
                    "Make them with scripts/prepare_data.py, or correct the prefix"
                )
    if options.load not in (None, options.save) and not Path(options.load).is_dir():
        lines.append(
            f"--load {options.load}: no such folder. Correct it, or leave --load out to start "
            "from the beginning"
        )
    return lines


def problems(options: Options, machine: Machine) -> list[str]:
    """The problems of resolved options, as text with option, value and remedy. If numbers are out
    of range, only these."""
    found = list(_range_problems(options))
    if found:  # the rules below divide by these numbers
        return found
    ranks = data_parallel_size(options, machine)
    values = {"o": options, "m": machine, "d": ranks, "u": options.micro_batch_size * ranks}
    return [text.format(**values) for broken, text in RULES if broken(options, machine)]


def validated(options: Options, machine: Machine) -> tuple[Options, list[str]]:
    """Resolved options without problems, and the lines about forced ones.

    Raises one FileNotFoundError if only files are missing, else one ValueError with all problems.
    """
    options, lines = resolve(options, machine)
    wrong = problems(options, machine)
    gone = missing_files(options)
    if wrong:
        raise ValueError("\n  ".join(["bad options:", *wrong, *gone]))
    if gone:
        raise FileNotFoundError("\n  ".join(["missing:", *gone]))
    return options, lines


def this_machine() -> Machine:
    """The machine of this process, before any process group exists."""
    import torch

    return Machine(
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        cuda=torch.cuda.is_available(),
        transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
    )
