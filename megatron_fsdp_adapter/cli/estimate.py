"""`estimate`: bytes per rank by kind of buffer and strategy, from a model configuration alone.

No GPU, no process group, no weights: the listing of parameters is planned like the engine plans
it, and the closed formula of `memory.py` is applied to the layouts. Activations, temporary
tensors of kernels and the CUDA context are not counted.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from megatron_fsdp_adapter.core.config import STRATEGIES, Strategy
from megatron_fsdp_adapter.core.layout import GroupLayout, ParamSpec, plan_group, row_granularity
from megatron_fsdp_adapter.core.layout.format import WeightFormat
from megatron_fsdp_adapter.diagnostics.memory import (
    GATHERED_WEIGHTS,
    QUANTIZED_COPIES,
    Precision,
    bytes_between_steps,
    held_by_rank,
    model_bytes,
    most_bytes,
    quantized_both_ways,
    unit_bytes,
    with_slots,
)
from megatron_fsdp_adapter.megatron.options.staging_options import slots_wanted
from megatron_fsdp_adapter.megatron.options.support import is_on
from megatron_fsdp_adapter.megatron.options.unit_grouping import UNIT_NUMEL, joins_by_default
from megatron_fsdp_adapter.sharding.unsharded_budget import GIB, UnshardedUnits, unsharded_units
from megatron_fsdp_adapter.sharding.unsharded_budget import OPTION as BUDGET

from . import joined_units, quantized_options
from .estimate_text import render, unit_row
from .gpt import (
    EMBEDDING,
    MEANINGS,
    PRESETS,
    ROOT,
    TRAINING_TOKENIZER,
    GptConfig,
    config_from,
    flag,
    gpt_parameter_listing,
    is_linear_weight,
    read_hugging_face,
    read_options,
)
from .joined_units import Params, Row, is_layer, layers_of
from .precision_options import (
    MOMENTS,
    POLICY_DTYPES,
    POLICY_OPTIONS,
    SWITCHES,
    UNFUSED,
    matrices_of_muon,
    precision,
)
from .quantized_options import PLAIN, Quantization, quantization

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

NO_SLOTS = slots_wanted(argparse.Namespace())

_INTEGERS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by",
    "max_position_embeddings", "seq_length",
)  # fmt: skip
_SWITCHES = (
    "group_query_attention", "swiglu", "add_qkv_bias", "qk_layernorm",
    "untie_embeddings_and_output_weights",
)  # fmt: skip
_STRINGS = ("normalization", "position_embedding_type", "tokenizer_type")


@dataclass(frozen=True)
class UnitKind:
    """Units that hold parameters of the same shapes, hence have the same layouts.

    All parameters of a dense model have one dtype and are trained, so a unit is one group, and one
    more of quantized weights. linear_numel: elements of what matrix products multiply by.
    """

    names: tuple[str, ...]
    layouts: tuple[GroupLayout, ...]
    linear_numel: int = 0

    @property
    def title(self) -> str:
        """Up to two names, or the first and the last."""
        if len(self.names) <= 2:
            return ", ".join(self.names)
        return f"{self.names[0]} .. {self.names[-1]}"


@dataclass(frozen=True)
class Model:
    """A planned model: its kinds of units, on `num_shards` shards; `order`: all units, by name, as
    they compute, the root unit last. `slots`: what `slots_wanted` says. `quantized`: what becomes
    of linear weights. `budget`: bytes for units that stay whole over a step. `graphs`: whether
    layers are in CUDA graphs. `ahead`: elements that may be gathered ahead of the unit that
    computes, if that is more than the next unit. `tensor`: ranks over which dense matrices are
    split. `listing`: what it was planned of, and `with_listing`, how another one is.
    """

    kinds: tuple[UnitKind, ...]
    num_shards: int
    order: tuple[str, ...]
    slots: Mapping[str, bool]
    quantized: Quantization = PLAIN
    budget: int = 0
    ahead: int = 0
    graphs: bool = False
    tensor: int = 1
    listing: Sequence[Row] = field(default=(), repr=False)
    with_listing: Callable[[Sequence[Row]], Model] = field(kw_only=True, repr=False)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(
            layout.item_numel * len(kind.names) for kind in self.kinds for layout in kind.layouts
        )

    @cached_property
    def fullest_rank(self) -> int:
        """The lowest of the ranks that hold most elements."""
        held = [0] * self.num_shards
        for kind in self.kinds:
            for layout in kind.layouts:
                for rank, numel in enumerate(held_by_rank(layout)):
                    held[rank] += numel * len(kind.names)
        return held.index(max(held))

    def bytes_held(
        self, strategy: Strategy, precision: Precision, rank: int
    ) -> dict[str, int]:
        """Bytes by kind on `rank`."""
        every = self.units()
        rows = self.kept(strategy, precision).rows
        whole = self.is_single_rank(strategy)
        held = {
            (id(kind), row): unit_bytes(kind.layouts, row, precision, rank, whole)
            for kind, row in {(id(k), r): (k, r) for k, r in zip(every, rows, strict=True)}.values()
        }
        layouts = [layout for kind in every for layout in kind.layouts]
        *units, root = [held[id(kind), row] for kind, row in zip(every, rows, strict=True)]
        totals = model_bytes(root, units) | joined_units.gathered(root, units, self.ahead)
        return with_slots(
            totals | self._copies(every) | matrices_of_muon(layouts, precision, self.tensor),
            [_class_of(kind) for kind in every],
            [[one for one in kind.layouts if not whole(one)] for kind in every],
            strategy,
            precision,
            rows,
            **self.slots,
        )

    def kept(self, strategy: Strategy, precision: Precision) -> UnshardedUnits:
        """What of which units the budget keeps whole over a step."""
        every = self.units()
        forward_only = [at for at, kind in enumerate(every) if EMBEDDING in kind.names]
        whole = self.is_single_rank(strategy)
        layouts = [[one for one in kind.layouts if not whole(one)] for kind in every]
        return unsharded_units(layouts, strategy, precision, self.budget, forward_only)

    def is_single_rank(self, strategy: Strategy) -> Callable[[GroupLayout], bool]:
        """Whether a group's domain has one rank; of layers in graphs those of experts alone may."""
        may = strategy.shard_grads and not (self.graphs and self.num_shards == 1)
        return lambda layout: may and layout.num_shards == 1

    def _copies(self, units: Sequence[UnitKind]) -> dict[str, int]:
        """What layers quantize of weights in the compute dtype, and autograd keeps from forward to
        backward: of all layers, or of the one that is computed again."""
        form = self.quantized.products
        if form is None:
            return {}
        copies = [quantized_both_ways(form, kind.linear_numel) for kind in units]
        return {QUANTIZED_COPIES: max(copies) if self.quantized.recomputes else sum(copies)}

    def units(self) -> list[UnitKind]:
        """The kind of each unit in order, the root unit last."""
        kind_of = {name: kind for kind in self.kinds for name in kind.names}
        return [kind_of[name] for name in self.order]

    def with_layers(self, count: int) -> Model:
        """With so many transformer layers, like its first one, joined as those would be."""
        other = self.with_listing(joined_units.with_layers(self.listing, count))
        return replace(self, kinds=other.kinds, order=other.order, listing=other.listing)

    def gathered_ahead(self, strategy: Strategy, precision: Precision) -> int:
        """Bytes of gathered weights that the next forward needs first: the root unit's and the
        first unit's. They are gathered from the optimizer step on, while the host is still busy
        between two steps. In slots they take nothing more."""
        if self.slots["weight_slots"]:
            return 0
        first_and_root = 0, len(self.order) - 1
        units, rows = self.units(), self.kept(strategy, precision).rows
        whole = self.is_single_rank(strategy)
        held = (unit_bytes(units[at].layouts, rows[at], precision, 0, whole)
                for at in first_and_root)  # fmt: skip
        return sum(one.get(GATHERED_WEIGHTS, 0) for one in held)


def _class_of(kind: UnitKind) -> str:
    """Of the module: units of one class with three or more of them take turns in two slots."""
    return "TransformerLayer" if is_layer(kind.names[0]) else kind.names[0]


def plan_model(
    config: GptConfig,
    num_shards: int,
    dtype: torch.dtype,
    slots: Mapping[str, bool] = NO_SLOTS,
    quantized: Quantization = PLAIN,
    budget: int = 0,
    unit_numel: int | None = None,
    **planner: Any,
) -> Model:
    """Plans every unit once per set of shapes. `slots`: what `slots_wanted` says; `quantized`: what
    becomes of linear weights; `budget`: bytes for units that stay whole over a step; `unit_numel`:
    elements up to which layers are joined to units, and may be gathered ahead, None for the
    default; `planner`: options of `plan_listing`. ValueError for weights that cannot be represented
    in their format."""
    rows = [(unit, fqn, shape, num_shards) for unit, fqn, shape in gpt_parameter_listing(config)]
    return plan_listing(rows, dtype, slots, quantized, budget, unit_numel, **planner)


def plan_listing(
    listing: Sequence[Row],
    dtype: torch.dtype,
    slots: Mapping[str, bool] = NO_SLOTS,
    quantized: Quantization = PLAIN,
    budget: int = 0,
    unit_numel: int | None = None,
    fused: bool = True,
    **planner: Any,
) -> Model:
    """The same for any parameters: unit, name, shape and number of shards of each. `fused`: modules
    may write weight gradients by themselves; `planner`: options of `plan_group`."""
    units: dict[str, Params] = {}
    for unit, *param in listing:
        units.setdefault(unit, []).append(tuple(param))  # type: ignore[arg-type]
    units = joined_units.joined(units, unit_numel)
    alike: dict[tuple[bool, tuple[tuple[Any, int], ...]], list[str]] = {}
    for unit, params in units.items():
        shapes = tuple((shape, shards) for _, shape, shards in params)
        alike.setdefault((unit == ROOT, shapes), []).append(unit)
    kinds = []
    for names in alike.values():
        params = units[names[0]]
        groups: dict[tuple[WeightFormat | None, int], list[ParamSpec]] = {}
        for fqn, shape, shards in params:
            form = quantized.weights if is_linear_weight(fqn) else None
            group = groups.setdefault((form, shards), [])
            spec = _spec(len(group), fqn, shape, dtype, form)
            group.append(replace(spec, from_autograd=not fused))
        layouts = tuple(
            plan_group(specs, shards, **planner) for (_, shards), specs in groups.items()
        )
        linear = sum(math.prod(shape) for fqn, shape, _ in params if is_linear_weight(fqn))
        kinds.append(UnitKind(tuple(names), layouts, linear))
    order = sorted(units, key=lambda unit: unit == ROOT)
    num_shards = max(shards for _, _, _, shards in listing)
    planned = functools.partial(
        plan_listing, dtype=dtype, slots=slots, quantized=quantized, budget=budget,
        unit_numel=unit_numel, fused=fused, **planner,
    )  # fmt: skip
    return Model(
        tuple(kinds), num_shards, tuple(order), slots, quantized, budget, ahead=unit_numel or 0,
        listing=listing, with_listing=planned,
    )  # fmt: skip


def _spec(
    index: int, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, form: WeightFormat | None
) -> ParamSpec:
    if form is None:
        return ParamSpec(index, (fqn,), shape, dtype, True, row_granularity(shape))
    try:
        return ParamSpec(index, (fqn,), shape, dtype, True, form.granularity(shape), form)
    except ValueError as error:
        raise ValueError(f"{fqn} as {form.name}: {error}; change the model's widths") from error


def most_layers(
    model: Model, strategy: Strategy, precision: Precision, rank: int, limit: int
) -> int:
    """The largest number of transformer layers whose states fit in `limit` bytes at any time."""

    def needed(num_layers: int) -> int:
        return most_bytes(model.with_layers(num_layers).bytes_held(strategy, precision, rank))

    # Every layer adds at least a shard of weights, gradients and state, so this is never too few.
    each = max(map(layers_of, model.order))
    candidates = range(limit * each // max(1, needed(3 + each) - needed(3)) + 3 + each)
    return max(0, bisect_right(candidates, limit, key=needed) - 1)


def estimate(
    model: Model,
    strategies: Sequence[Strategy],
    precision: Precision,
    rank: int | None = None,
    memory_gib: float | None = None,
) -> dict[str, Any]:
    """The report as plain values. `rank`: default the fullest."""
    rank = model.fullest_rank if rank is None else rank
    report: dict[str, Any] = {
        "parameters": model.num_parameters,
        "num_shards": model.num_shards,
        "rank": rank,
        "units": [
            unit_row(kind.title, len(kind.names), layout)
            for kind in model.kinds for layout in kind.layouts
        ],
        "strategies": {},
    }
    for strategy in strategies:
        held = model.bytes_held(strategy, precision, rank)
        found: dict[str, Any] = {
            "bytes": held,
            "between_steps": bytes_between_steps(held),
            "gathered_ahead": model.gathered_ahead(strategy, precision),
            "peak": most_bytes(held),
        }
        if model.budget:
            kept = model.kept(strategy, precision)
            found["kept"] = {"weights": kept.weights, "gradients": kept.grads, "bytes": kept.nbytes}
        if memory_gib is not None:
            limit = int(memory_gib * GIB)
            found["fits"] = found["peak"] <= limit
            found["most_layers"] = most_layers(model, strategy, precision, rank, limit)
        report["strategies"][strategy.name] = found
    return report


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_fsdp_adapter estimate",
        description="Bytes per rank by kind of buffer, from a dense GPT's configuration alone.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model (Megatron's flags; a flag overrides the files)")
    model.add_argument("--preset", choices=sorted(PRESETS), help="a known model")
    model.add_argument("--config", metavar="FILE", help="YAML with Megatron's flag names as keys")
    model.add_argument("--hf-config", metavar="FILE",
                       help="config.json of a Hugging Face model, or its folder")
    for name in _INTEGERS:
        model.add_argument(flag(name), type=int, metavar="N", help=MEANINGS[name])
    for name in _SWITCHES:
        model.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=MEANINGS[name])
    for name in _STRINGS:
        model.add_argument(flag(name), help=MEANINGS[name])
    for name, value in (("add", True), ("disable", False)):
        model.add_argument(f"--{name}-bias-linear", dest="add_bias_linear", action="store_const",
                           const=value, help=f"{name} biases")  # fmt: skip
    run = parser.add_argument_group("run")
    run.add_argument("--data-parallel-size", type=int, default=1, metavar="N", help="shards")
    run.add_argument(
        "--data-parallel-sharding-strategy", choices=list(STRATEGIES), help="default: all"
    )
    run.add_argument(
        "--params-dtype", choices=list(DTYPES), help="default: what --config says, else bf16"
    )
    for option, meaning in POLICY_OPTIONS.items():
        run.add_argument(flag(option), choices=list(POLICY_DTYPES), help=meaning)
    for option, meaning in quantized_options.STRINGS.items():
        run.add_argument(flag(option), help=meaning)
    switches = {**SWITCHES, **quantized_options.SWITCHES}
    for option, meaning in switches.items():
        run.add_argument(flag(option), action="store_true", help=meaning)
    run.add_argument(
        flag(BUDGET), type=float, help="GiB for weights and gradients that stay whole over a step"
    )
    run.add_argument(flag(UNIT_NUMEL), type=int, help="elements up to which layers are one unit; "
                     "0: each is one; default: as the wrapper joins them")
    run.add_argument("--optimizer", choices=("adam", *sorted(MOMENTS)),
                     help="others than adam: of matrices alone")
    run.add_argument("--rank", type=int, default=None, help="default: the rank that holds most")
    run.add_argument("--memory-gib", type=float, default=None, help="say what fits in it")
    run.add_argument("--padding-bound", type=float, default=0.01, help="see docs/layout.md")
    run.add_argument("--max-segments", type=int, default=4, help="see docs/layout.md")
    run.add_argument("--json", action="store_true", default=False, help="print it as JSON")
    return parser


def _model_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Preset or Hugging Face config, then file, then flags; the later wins.

    A training preset that tells nothing of the vocabulary means the training script's default.
    """
    options: dict[str, Any] = dict(PRESETS.get(given.get("preset", ""), {}))
    if "hf_config" in given:
        options |= read_hugging_face(given["hf_config"])
    if "config" in given:
        options |= read_options(given["config"])
    options |= given
    vocabulary = ("vocab_size", "padded_vocab_size", "tokenizer_type")
    if "config" in given and all(options.get(name) is None for name in vocabulary):
        options["tokenizer_type"] = TRAINING_TOKENIZER
    return options


def _dtype_name(options: Mapping[str, Any]) -> str:
    if "params_dtype" in options:
        return str(options["params_dtype"])
    named = [name for name in ("bf16", "fp16") if options.get(name)]
    if len(named) == 2:
        raise ValueError("--bf16 and --fp16 are both set: leave one of them out")
    return named[0] if named else "fp32" if "config" in options else "bf16"


def _check(given: argparse.Namespace) -> None:
    if given.data_parallel_size < 1:
        raise ValueError(f"--data-parallel-size {given.data_parallel_size} must be at least 1")
    if given.rank is not None and not 0 <= given.rank < given.data_parallel_size:
        raise ValueError(
            f"--rank {given.rank} must be from 0 to {given.data_parallel_size - 1} with "
            f"--data-parallel-size {given.data_parallel_size}"
        )
    budget = vars(given).get(BUDGET, 0.0)
    if not (math.isfinite(budget) and budget >= 0):
        raise ValueError(f"{flag(BUDGET)} {budget} must be 0 or more")
    if vars(given).get(UNIT_NUMEL, 0) < 0:
        raise ValueError(f"{flag(UNIT_NUMEL)} {vars(given)[UNIT_NUMEL]} must be 0 or more")
    if given.memory_gib is not None and not given.memory_gib > 0:
        raise ValueError(f"--memory-gib {given.memory_gib} must be above 0")


def run(given: argparse.Namespace) -> str:
    """What the command prints. Raises ValueError or FileNotFoundError for bad input."""
    _check(given)
    options = _model_options(vars(given))
    dtype = _dtype_name(options)
    if dtype not in DTYPES:
        raise ValueError(f"--params-dtype {dtype!r} is unknown: use one of {list(DTYPES)}")
    quantized = quantization(options, dtype)
    model = plan_model(
        config_from(options),
        given.data_parallel_size,
        DTYPES[dtype],
        slots_wanted(given),
        quantized,
        int(vars(given).get(BUDGET, 0.0) * GIB),
        vars(given).get(UNIT_NUMEL, None if joins_by_default(given, given) else 0),
        fused=not is_on(given, UNFUSED),
        padding_bound=given.padding_bound,
        max_segments=given.max_segments,
    )
    chosen = vars(given).get("data_parallel_sharding_strategy")
    strategies = [STRATEGIES[chosen]] if chosen else list(STRATEGIES.values())
    report = estimate(model, strategies, precision(vars(given)), given.rank, given.memory_gib)
    report["params_dtype"] = dtype
    report["quantized"] = quantized.name
    if given.json:
        return json.dumps(report, indent=2)
    described = f"{dtype} compute weights" + (f", {quantized.name}" if quantized.name else "")
    return render(report, described, given.memory_gib)


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status, 2 for bad input."""
    try:
        print(run(make_parser().parse_args(argv)))
    except (ValueError, FileNotFoundError) as error:
        print(f"estimate: {error}", file=sys.stderr)
        return 2
    return 0
