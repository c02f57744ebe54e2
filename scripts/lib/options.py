"""The options of `pretrain_gpt.py`: fields of Megatron's configs, flags of Megatron-LM's script.

Every field of `Options` is a flag (``num_layers`` is ``--num-layers``) and a key of a preset
(``num-layers: 2``). Type, choices, default and help of a config's field come from its class.
Booleans also have a negative (``--bf16`` / ``--no-bf16``), so that the command line can override a
preset both ways. `check.py` has the rules.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.megatron.options.ddp_config import DistributedDataParallelConfig
from megatron_fsdp_adapter.megatron.options.option import Dtype, Gib, gib
from megatron_fsdp_adapter.megatron.options.table import (
    ELASTIC,
    GATHER_GROUPS,
    OPTIONS,
    REPLICAS,
    VERSION,
)
from megatron_fsdp_adapter.tools.models import sources
from megatron_fsdp_adapter.tools.models.spec import flag

MODEL = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels",
    "normalization", "qk_layernorm", "hidden_dropout", "attention_dropout", "bias_dropout_fusion",
    "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "gradient_accumulation_fusion",
    "recompute_granularity", "recompute_method", "recompute_num_layers",
    "tensor_model_parallel_size", "sequence_parallel", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "calculate_per_token_loss", "bf16",
    "init_model_with_meta_device",
)  # fmt: skip
EXPERTS = (
    "moe_ffn_hidden_size", "moe_router_topk", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_permute_fusion",
    "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
)  # fmt: skip
"""Fields for experts. Without experts core warns about some of them, and rejects others."""
FP8 = ("fp8_recipe", "fp8_amax_history_len", "fp8_amax_compute_algo")
OPTIMIZER = (
    "optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps",
    "clip_grad", "bf16", "use_distributed_optimizer", "overlap_param_gather",
)  # fmt: skip
DDP = (
    "overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer",
    "num_distributed_optimizer_instances", "use_megatron_fsdp",
    "reduce_scatter_with_fp32_accumulation", "fp8_param_gather",
)  # fmt: skip
ELSEWHERE = (GATHER_GROUPS, VERSION, ELASTIC, REPLICAS)
"""Options of ours that are none of this script: it makes groups for gathers by itself, and does not
train beside replicas that may die."""


def _own_options() -> list[str]:
    """Names of the options of our table that are flags of this script."""
    found = []
    for option in OPTIONS:
        has_flag = bool(option.help and option.use)
        sets_dtype = option.type == Dtype  # which --bf16 and --grad-reduce-in-bf16 do here
        if has_flag and not sets_dtype and option.name not in ELSEWHERE:
            found.append(option.name)
    return found


FSDP = (
    "data_parallel_sharding_strategy", "nccl_ub", "fsdp_double_buffer",
    "suggested_communication_unit_size", *_own_options(),
)  # fmt: skip
"""Fields of our DDP config, set with --use-megatron-fsdp only: some of core's, and each option of
our table that has a flag and an effect."""
FIELDS = (
    (TransformerConfig, (*MODEL, *EXPERTS, *FP8)),
    (OptimizerConfig, OPTIMIZER),
    (DistributedDataParallelConfig, (*DDP, *FSDP)),
)

REQUIRED = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size",
    "train_iters", "lr",
)  # fmt: skip
DEFAULTS = {
    **dict.fromkeys(REQUIRED), "bias_dropout_fusion": True, "min_lr": 0.0,
    "data_parallel_sharding_strategy": "optim_grads_params",
}  # fmt: skip
"""Defaults that differ from the configs'."""

SCRIPT: tuple[tuple[str, Any, Any, str], ...] = (
    # Model
    ("group_query_attention", bool, False, "grouped-query attention"),
    ("num_query_groups", int, 1, "key/value heads with --group-query-attention"),
    ("seq_length", int, None, "tokens in a sample"),
    ("max_position_embeddings", int, None, "longest sequence; default seq-length"),
    ("position_embedding_type", Literal["learned_absolute", "rope", "none"], "learned_absolute",
     "kind of position embedding"),
    ("rotary_base", int, 10000, "base of the rotary frequencies"),
    ("swiglu", bool, False, "gated SiLU instead of GELU"),
    ("disable_bias_linear", bool, False, "linear layers without a bias"),
    ("untie_embeddings_and_output_weights", bool, False, "an output layer with separate weights"),
    ("transformer_impl", Literal["local", "transformer_engine"], None,
     "implementation of layers; default: Transformer Engine's, if it and CUDA are available"),
    ("num_experts", int, None, "experts of each layer; default: none, dense layers"),
    ("bias_gelu_fusion", bool, True, "fused bias and GELU (compiled; off on the CPU)"),
    ("bias_swiglu_fusion", bool, True, "fused bias and SwiGLU (compiled; off on the CPU)"),
    ("rope_fusion", bool, True, "TE's rotary kernel (off without Transformer Engine)"),
    # Batches and schedule
    ("micro_batch_size", int, None, "samples of one forward on one rank"),
    ("global_batch_size", int, None,
     "samples of one step; default micro-batch-size x data-parallel size"),
    ("train_iters", int, None, "steps"),
    ("eval_interval", int, 1000, "steps between evaluations"),
    ("eval_iters", int, 100, "global batches of one evaluation; 0: none"),
    ("exit_interval", int, None, "save (if --save) and exit after the first step that it divides"),
    ("lr_decay_style", Literal["constant", "linear", "cosine", "inverse-square-root"], "linear",
     "shape of the learning-rate decay"),
    ("lr_decay_iters", int, None, "steps of the decay; default train-iters"),
    ("lr_warmup_iters", int, 0, "steps of the linear warm-up"),
    # Precision and parallelism
    ("grad_reduce_in_bf16", bool, False, "with --bf16: reduce gradients in bf16, not fp32"),
    ("check_for_nan_in_loss_and_grad", bool, True, "stop when the loss is not finite"),
    ("fp8_format", Literal["hybrid", "e4m3"], None, "FP8 GEMMs (TE's layers)"),
    ("ddp_bucket_size", int, None, "elements of a gradient bucket"),
    ("separate_all_gather_groups", bool, False,
     "with --use-megatron-fsdp: gather on separate process groups"),
    ("distributed_backend", Literal["nccl", "gloo"], None, "default: nccl with CUDA, else gloo"),
    ("distributed_timeout_minutes", int, 10, "time after which a collective fails"),
    # Data
    ("train_data_path", tuple[str, ...], None,
     "prefix of a .bin/.idx pair, or alternating weights and prefixes"),
    ("valid_data_path", tuple[str, ...], None, "the same for evaluations"),
    ("data_cache_path", str, None, "folder of the sample index; default beside data"),
    ("mock_data", bool, False, "random tokens instead of data"),
    ("tokenizer_type", Literal["ByteLevelTokenizer", "NullTokenizer"], "ByteLevelTokenizer",
     "tokenizer of the data; prepare_data.py makes bytes"),
    ("vocab_size", int, None, "with NullTokenizer: tokens without the end of document"),
    ("make_vocab_size_divisible_by", int, 128, "the embedding is padded to a multiple of it"),
    ("padded_vocab_size", int, None, "rows of the embedding, instead of the above"),
    # Checkpoints, log, run
    ("save", str, None, "folder to save checkpoints in"),
    ("load", str, None, "folder to resume from; that of --save may be empty, at the first start"),
    ("save_interval", int, None, "steps between checkpoints; default only at the end"),
    ("ckpt_format", Literal["fsdp_dtensor"], None, "needs --use-megatron-fsdp"),
    ("override_opt_param_scheduler", bool, False,
     "resume with this run's schedule and weight decay; default: they must equal the checkpoint's"),
    ("use_checkpoint_opt_param_scheduler", bool, False, "resume with those of the checkpoint"),
    ("log_interval", int, 100, "steps between lines of the log"),
    ("loss_log_file", str, None,
     "JSON lines: loss and gradient norm of every step, with all digits"),
    ("seed", int, 1234, "random seed of weights, dropout and data order"),
    ("deterministic", bool, False, "deterministic kernels only"),
)  # fmt: skip
"""Name, type, default and help of options that no config has, or has in another form."""
SPELLINGS = {
    "override_opt_param_scheduler": "--override-opt_param-scheduler",
    "use_checkpoint_opt_param_scheduler": "--use-checkpoint-opt_param-scheduler",
}
"""Second names of flags, which Megatron-LM has, too."""


def texts_of(config: type) -> dict[str, str]:
    """Field of a config -> its description: the docstring behind it in core's source, or the help
    of our table of options."""
    fields = dataclasses.fields(config)
    found = {one.name: one.metadata["help"] for one in fields if "help" in one.metadata}
    for one in reversed(config.__mro__[:-1]):
        if not one.__module__.startswith("megatron."):
            continue
        # Python does not keep docstrings of fields, so they are read from the source.
        tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        body = tree.body[0].body  # type: ignore[attr-defined]
        for item, text in itertools.pairwise(body):
            if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Expr):
                words = ast.literal_eval(text.value).split()
                found[item.target.id] = " ".join(words)  # type: ignore[union-attr]
    return found


def _rows() -> dict[str, tuple[Any, Any, str]]:
    """Type, default and help of each option."""
    rows: dict[str, tuple[Any, Any, str]] = {}
    for config, names in FIELDS:
        hints = typing.get_type_hints(config)
        texts = texts_of(config)
        own = {item.name: item.default for item in dataclasses.fields(config)}
        for name in names:
            default = DEFAULTS.get(name, own[name])
            rows.setdefault(name, (hints[name], default, texts.get(name, config.__name__)))
    names = tuple(STRATEGIES)
    rows["data_parallel_sharding_strategy"] = (Literal[names], names[-1], "ZeRO 0 to 3 by name")
    for name, hint, default, text in SCRIPT:
        rows[name] = (hint, default, text)
    return rows


if typing.TYPE_CHECKING:
    Options = Any
else:
    _fields = []
    for _name, (_hint, _default, _text) in _rows().items():
        _field = dataclasses.field(default=_default, metadata={"help": _text})
        _fields.append((_name, _hint, _field))
    Options = dataclasses.make_dataclass("Options", _fields, frozen=True)


def chosen(options: Options, names: Sequence[str]) -> dict[str, Any]:
    """The options of these names."""
    return {name: getattr(options, name) for name in names}


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for bad arguments, in place of printing its usage and
    exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def form_of(hint: Any) -> tuple[type, tuple[Any, ...] | None, bool]:
    """Type of one value, its choices or None, and True if there may be several values, by the type
    hint of a field."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if hint == Gib:
            return gib, None, False
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return type(choices[0]), choices, False
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], None, True
    return hint, None, False


def make_parser() -> argparse.ArgumentParser:
    """The parser: a flag for each field of `Options`, and ``--config``."""
    parser = _Parser(
        description="Train a GPT on megatron-core, with this package's FSDP or with stock DDP.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="preset (YAML: flag names as keys); flags override it"
    )
    for item in dataclasses.fields(Options):
        scalar, choices, many = form_of(item.type)
        text = item.metadata["help"]
        if item.default not in (None, False, True):
            text += f" (default {item.default})"
        how: dict[str, Any] = {"default": item.default}
        if scalar is bool:
            how["action"] = argparse.BooleanOptionalAction
        else:
            how["type"] = scalar
            how["choices"] = choices
            how["nargs"] = "+" if many else None
            if not choices:
                how["metavar"] = scalar.__name__.upper()
        names = [flag(item.name)]
        if item.name in SPELLINGS:
            names.append(SPELLINGS[item.name])
        parser.add_argument(*names, help=text.replace("%", "%%"), **how)
    return parser


def read_preset(path: str) -> list[str]:
    """A preset as command-line arguments.

    Raises as `sources.read_preset`, and ValueError for keys that are no flags (all in one error).
    """
    lines = sources.read_preset(path)
    content = {str(key).replace("_", "-"): value for key, value in lines.items()}
    known = {item.name.replace("_", "-"): item.type for item in dataclasses.fields(Options)}
    unknown = [_unknown(key, known) for key in content if key not in known]
    if unknown:
        raise ValueError(f"--config {path}: " + "; ".join(unknown))
    arguments: list[str] = []
    for key, value in content.items():
        if value is None:
            continue
        scalar, _, many = form_of(known[key])
        listed = value if isinstance(value, list) and many else [value]
        if not all(_is_of(scalar, one) for one in listed):
            wanted = "true or false" if scalar is bool else f"one {scalar.__name__}"
            raise ValueError(f"--config {path}: {key} is {value!r}, must be {wanted}")
        if scalar is bool:
            arguments.append(f"--{key}" if value else f"--no-{key}")
        else:
            arguments += [f"--{key}", *map(str, listed)]
    return arguments


def _is_of(scalar: type, value: object) -> bool:
    """True if a value of YAML can be one value of a flag: a boolean for a switch, else a number or
    text."""
    if isinstance(value, list | dict):
        return False
    return isinstance(value, bool) is (scalar is bool)


def _unknown(key: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f"unknown key {key!r}, did you mean {near[0]!r}?"
    return f"unknown key {key!r}"


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line, which override those of its preset. Raises ValueError for bad
    ones, and as `read_preset`."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.config is not None:
        given = parser.parse_args([*read_preset(given.config), *arguments])
    values = vars(given)
    values.pop("config")
    missing = [flag(name) for name in REQUIRED if values[name] is None]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not given. Set on the command line or in --config")
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return Options(**values)
