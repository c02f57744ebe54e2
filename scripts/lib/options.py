"""The options of `pretrain_gpt.py`: Megatron's flag names, one table, presets from YAML files.

Every field of `Options` is a flag (``num_layers`` is ``--num-layers``) and a key of a preset
(``num-layers: 2``). Booleans also have a negative (``--bf16`` / ``--no-bf16``), so that the
command line can override a preset both ways.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron_fsdp_adapter.cli import gpt
from megatron_fsdp_adapter.cli.gpt import flag


def option(default: Any, text: str) -> Any:
    """A field of `Options`: its default and its line of ``--help``."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Options:
    """Everything a run is configured by. Sizes in elements or tokens; see `check.py` for rules."""

    # Model
    num_layers: int = option(None, "transformer layers")
    hidden_size: int = option(None, "width of the residual stream")
    num_attention_heads: int = option(None, "attention heads")
    ffn_hidden_size: int | None = option(
        None, "MLP width; default 4 x hidden, with --swiglu 8/3 x hidden rounded down to 64"
    )
    kv_channels: int | None = option(None, "width of a head; default hidden-size / heads")
    group_query_attention: bool = option(False, "grouped-query attention")
    num_query_groups: int = option(1, "key/value heads with --group-query-attention")
    seq_length: int = option(None, "tokens in a sample")
    max_position_embeddings: int | None = option(None, "longest sequence; default seq-length")
    position_embedding_type: str = option("learned_absolute", "learned_absolute, rope or none")
    rotary_base: int = option(10000, "base of the rotary frequencies")
    normalization: str = option("LayerNorm", "LayerNorm or RMSNorm")
    swiglu: bool = option(False, "gated SiLU in place of GELU")
    disable_bias_linear: bool = option(False, "linear layers without a bias")
    untie_embeddings_and_output_weights: bool = option(False, "an output layer of its own")
    hidden_dropout: float = option(0.1, "dropout on the residual stream")
    attention_dropout: float = option(0.1, "dropout on the attention weights")
    transformer_impl: str | None = option(
        None, "local or transformer_engine; default the latter where it is installed and CUDA is"
    )
    # Mixture of experts
    num_experts: int | None = option(None, "experts of each layer; default: none, dense layers")
    moe_ffn_hidden_size: int | None = option(None, "width of an expert; default ffn-hidden-size")
    moe_router_topk: int = option(2, "experts of a token")
    moe_router_load_balancing_type: str = option(
        "aux_loss", "aux_loss, seq_aux_loss, global_aux_loss, sinkhorn or none"
    )
    moe_aux_loss_coeff: float = option(0.0, "weight of the load-balancing loss")
    moe_token_dispatcher_type: str = option("allgather", "allgather or alltoall")
    moe_grouped_gemm: bool = option(False, "one kernel for a rank's experts (TE's grouped linear)")
    moe_permute_fusion: bool = option(False, "TE's kernels that sort tokens by expert")
    overlap_moe_expert_parallel_comm: bool = option(
        False, "core's schedule that runs parts of layers of two microbatches in turn"
    )
    delay_wgrad_compute: bool = option(
        False, "weight gradients behind those of inputs; with that schedule"
    )
    # Kernels
    bias_gelu_fusion: bool = option(True, "fused bias and GELU (compiled; off on the CPU)")
    bias_swiglu_fusion: bool = option(True, "fused bias and SwiGLU (compiled; off on the CPU)")
    bias_dropout_fusion: bool = option(True, "fused bias, dropout, add (compiled; off on the CPU)")
    rope_fusion: bool = option(True, "TE's rotary kernel (off without Transformer Engine)")
    cross_entropy_loss_fusion: bool = option(False, "fused cross entropy")
    cross_entropy_fusion_impl: str = option("native", "native or te")
    gradient_accumulation_fusion: bool = option(False, "weight gradients added in place")
    # Batches and schedule
    micro_batch_size: int = option(None, "samples of one forward on one rank")
    global_batch_size: int | None = option(
        None, "samples of one step; default micro-batch-size x data-parallel size"
    )
    train_iters: int = option(None, "steps")
    eval_interval: int | None = option(1000, "steps between evaluations")
    eval_iters: int = option(100, "global batches of one evaluation; 0: none")
    exit_interval: int | None = option(
        None, "save (if --save) and exit after the first step that it divides"
    )
    # Optimizer
    lr: float = option(None, "highest learning rate")
    min_lr: float = option(0.0, "lowest learning rate")
    lr_decay_style: str = option("linear", "constant, linear, cosine or inverse-square-root")
    lr_decay_iters: int | None = option(None, "steps of the decay; default train-iters")
    lr_warmup_iters: int = option(0, "steps of the linear warm-up")
    weight_decay: float = option(0.01, "decoupled weight decay")
    optimizer: str = option("adam", "adam, or muon for matrices and adam for the rest")
    adam_beta1: float = option(0.9, "Adam's first decay rate")
    adam_beta2: float = option(0.999, "Adam's second decay rate")
    adam_eps: float = option(1e-8, "Adam's epsilon")
    clip_grad: float = option(1.0, "largest global gradient norm; 0: no clipping")
    # Precision
    bf16: bool = option(False, "bfloat16 compute with fp32 main weights")
    grad_reduce_in_bf16: bool = option(False, "with --bf16: reduce gradients in bf16, not fp32")
    reduce_scatter_with_fp32_accumulation: bool = option(
        False, "with --grad-reduce-in-bf16: sum in fp32 what travels in bf16"
    )
    calculate_per_token_loss: bool = option(
        False, "average over the tokens of the global batch, not over microbatches"
    )
    check_for_nan_in_loss_and_grad: bool = option(True, "stop when the loss is not finite")
    fp8_format: str | None = option(None, "hybrid or e4m3: FP8 matrix products (TE's layers)")
    fp8_recipe: str = option("delayed", "delayed, tensorwise, blockwise or mxfp8 scales of FP8")
    fp8_param_gather: bool = option(False, "weights of TE's linear layers kept and gathered in FP8")
    fp8_amax_history_len: int = option(1, "steps whose largest values delayed scaling keeps")
    fp8_amax_compute_algo: str = option("most_recent", "most_recent or max of that history")
    # Memory
    recompute_granularity: str | None = option(None, "full or selective activation recompute")
    recompute_method: str | None = option(None, "uniform or block, with full recompute")
    recompute_num_layers: int | None = option(None, "layers of a recompute unit, or of the block")
    # Parallelism
    tensor_model_parallel_size: int = option(1, "ranks that split each layer")
    sequence_parallel: bool = option(False, "split the sequence between tensor-parallel regions")
    expert_model_parallel_size: int = option(1, "ranks that share out the experts")
    expert_tensor_parallel_size: int | None = option(
        None, "ranks that split each expert; default tensor-model-parallel-size"
    )
    use_distributed_optimizer: bool = option(False, "optimizer state split over data parallel")
    overlap_grad_reduce: bool = option(False, "reduce gradients during the backward")
    overlap_param_gather: bool = option(False, "gather parameters during the forward")
    ddp_bucket_size: int | None = option(None, "elements of a gradient bucket")
    num_distributed_optimizer_instances: int = option(1, "copies of the distributed optimizer")
    use_megatron_fsdp: bool = option(False, "this package's FullyShardedDataParallel")
    data_parallel_sharding_strategy: str = option(
        "optim_grads_params", "no_shard, optim, optim_grads or optim_grads_params (ZeRO 0 to 3)"
    )
    init_model_with_meta_device: bool = option(
        False, "make weights when they are sharded, unit by unit, and not before"
    )
    nccl_ub: bool = option(False, "communication buffers in fixed memory, registered with NCCL")
    fsdp_double_buffer: bool = option(False, "communication buffers in fixed memory")
    fsdp_copy_engine_all_gather: bool = option(False, "weights gathered by the copy engines")
    fsdp_copy_engine_reduce_scatter: bool = option(False, "gradients carried by the copy engines")
    fsdp_unsharded_budget_gib: float = option(
        0.0, "GiB of each GPU for weights and gradients that stay whole over a step"
    )
    suggested_communication_unit_size: int | None = option(
        None, "with --use-megatron-fsdp: elements up to which layers are joined to one unit; 0: "
        "each is one; default: small ones are joined"
    )
    chunked_optimizer_state_offload: bool = option(
        False, "main weights and moments in host memory, updated on the GPU unit by unit"
    )
    megatron_fsdp_enable_fine_grained_param_gather: bool = option(
        False, "parts of a layer's experts are units of their own"
    )
    separate_all_gather_groups: bool = option(
        False, "with --use-megatron-fsdp: gather on process groups of its own"
    )
    distributed_backend: str | None = option(None, "nccl or gloo; default nccl where CUDA is")
    distributed_timeout_minutes: int = option(10, "time after which a collective fails")
    # Data
    train_data_path: tuple[str, ...] | None = option(
        None, "prefix of a .bin/.idx pair, or weights and prefixes in turn"
    )
    valid_data_path: tuple[str, ...] | None = option(None, "the same for evaluations")
    data_cache_path: str | None = option(None, "folder of the sample index; default beside data")
    mock_data: bool = option(False, "random tokens in place of data")
    tokenizer_type: str = option(
        "ByteLevelTokenizer", "ByteLevelTokenizer (prepare_data.py) or NullTokenizer"
    )
    vocab_size: int | None = option(None, "with NullTokenizer: tokens without the end of document")
    make_vocab_size_divisible_by: int = option(128, "the embedding is padded to a multiple of it")
    padded_vocab_size: int | None = option(None, "rows of the embedding, in place of the above")
    # Checkpoints
    save: str | None = option(None, "folder to save checkpoints in")
    load: str | None = option(None, "folder to resume from")
    save_interval: int | None = option(None, "steps between checkpoints; default only at the end")
    ckpt_format: str | None = option(
        None, "fsdp_dtensor; it needs --use-megatron-fsdp"
    )
    # Log
    log_interval: int = option(100, "steps between lines of the log")
    loss_log_file: str | None = option(
        None, "JSON lines: loss and gradient norm of every step, with all digits"
    )
    # Run
    seed: int = option(1234, "random seed of weights, dropout and data order")
    deterministic: bool = option(False, "deterministic kernels only")

    def as_dict(self) -> dict[str, Any]:
        """Plain values by field name, for checkpoints."""
        return dataclasses.asdict(self)


REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "micro_batch_size",
    "train_iters",
    "lr",
)


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _value_type(hint: Any) -> tuple[Any, bool]:
    """(scalar type, takes many values) of a field's type hint."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def make_parser() -> argparse.ArgumentParser:
    """One flag for each field of `Options`, and ``--config``."""
    parser = _Parser(
        description="Train a GPT on megatron-core, with this package's FSDP or with stock DDP.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="preset (YAML: flag names as keys); flags override it"
    )
    hints = typing.get_type_hints(Options)
    for item in dataclasses.fields(Options):
        scalar, many = _value_type(hints[item.name])
        text = item.metadata["help"]
        if item.default not in (None, False, True):
            text += f" (default {item.default})"
        text = text.replace("%", "%%")
        if scalar is bool:
            parser.add_argument(
                flag(item.name),
                action=argparse.BooleanOptionalAction,
                default=item.default,
                help=text,
            )
        else:
            parser.add_argument(
                flag(item.name),
                type=scalar,
                nargs="+" if many else None,
                default=item.default,
                metavar=scalar.__name__.upper(),
                help=text,
            )
    return parser


def read_preset(path: str) -> list[str]:
    """A preset as the command-line arguments it stands for.

    Raises as `gpt.read_preset`, and ValueError for keys that are no flags (all in one error).
    """
    content = gpt.read_preset(path)
    known = {item.name.replace("_", "-") for item in dataclasses.fields(Options)}
    unknown = [str(key) for key in content if str(key).replace("_", "-") not in known]
    if unknown:
        raise ValueError(f"--config {path}: " + "; ".join(_unknown(key, known) for key in unknown))
    hints = typing.get_type_hints(Options)
    arguments: list[str] = []
    for key, value in content.items():
        arguments += _preset_arguments(path, str(key).replace("_", "-"), value, hints)
    return arguments


def _unknown(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key.replace("_", "-"), known, n=1)
    return f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "")


def _preset_arguments(path: str, key: str, value: Any, hints: dict[str, Any]) -> list[str]:
    scalar, many = _value_type(hints[key.replace("-", "_")])
    if value is None:
        return []
    if scalar is bool:
        if not isinstance(value, bool):
            raise ValueError(f"--config {path}: {key} is {value!r}, must be true or false")
        return [f"--{key}" if value else f"--no-{key}"]
    if many:
        parts = value if isinstance(value, list) else [value]
        return [f"--{key}", *map(str, parts)]
    if isinstance(value, list | dict | bool):
        raise ValueError(f"--config {path}: {key} is {value!r}, must be one {scalar.__name__}")
    return [f"--{key}={value}"]


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line; its preset, if any, is read first. Raises ValueError."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.config is not None:
        given = parser.parse_args([*read_preset(given.config), *arguments])
    values = vars(given)
    values.pop("config")
    missing = [flag(name) for name in REQUIRED if values[name] is None]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not given; set on the command line or in --config")
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Options(**{**values, **lists})
