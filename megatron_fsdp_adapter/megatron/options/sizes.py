"""Divisibility of sizes: ranks, heads, experts, batches, layers of pipeline stages.

The rules are those that Megatron-Core and Megatron-LM assert when a run starts. They are repeated
here because configurations are checked and planned without importing them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

Options = Mapping[str, Any]
"""Options by the names of Megatron's configs or arguments; None means absent."""

LAYOUT = "pipeline_model_parallel_layout"
FIRST = ("num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers")
LAST = ("num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers")
VIRTUAL = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
PER_VIRTUAL = "num_layers_per_virtual_pipeline_stage"
STANDALONE = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
EXPERTS = ("num_moe_experts", "num_experts")
GROUP = (
    "microbatch_group_size_per_vp_stage", "microbatch_group_size_per_virtual_pipeline_stage"
)  # fmt: skip
OTHER_LAYERS = ("hybrid_layer_pattern", "hybrid_override_pattern", "encoder_num_layers")
"""Options that define the layers of stages in ways that are not checked here."""

NAMES = (*FIRST, *LAST, *VIRTUAL, PER_VIRTUAL, *EXPERTS, *GROUP, *OTHER_LAYERS)

WHOLE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances", "num_layers", "hidden_size", "num_attention_heads",
    "seq_length", "micro_batch_size", "global_batch_size", *VIRTUAL,
)  # fmt: skip
"""Options that are integers above 0, or absent."""

UNEVEN_BATCH = "decrease_batch_size_if_needed"

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Parts of the stages of a layout -> their letters in its string."""

USE_LAYOUT = f"Use {LAYOUT}, which defines the layers of each stage, or other sizes."


def _size(options: Options, *names: str, default: int = 1) -> int:
    """The value of the first name that is set."""
    return next((int(options[name]) for name in names if options.get(name)), default)


def _values(options: Options, *names: str) -> str:
    """Text of the names that are set, with their values."""
    return ", ".join(f"{name}={options[name]}" for name in names if options.get(name))


def _found(*rows: tuple[Any, str]) -> list[str]:
    """The texts of the rows whose condition holds."""
    return [text for is_wrong, text in rows if is_wrong]


def _refuse(*rows: tuple[Any, str]) -> None:
    """ValueError with the text of the first row whose condition holds."""
    for text in _found(*rows)[:1]:
        raise ValueError(text)


def stage_layers(options: Options) -> list[list[int]]:
    """The number of decoder layers of each model chunk of each pipeline stage:
    `found[stage][chunk]`.

    Raises ValueError, naming the option, for a split that Megatron-Core does not support.
    """
    if options.get(LAYOUT):
        return _of_layout(options)
    stages, virtual = _size(options, "pipeline_model_parallel_size"), _virtual(options)
    given = _values(options, *VIRTUAL, PER_VIRTUAL)
    _refuse((virtual > 1 and stages == 1, f"{given}: there is one pipeline stage. Leave it out."))
    counts = _layers_of_stages(options, stages)
    has_both_ends = all(_size(options, *names, default=0) for names in (FIRST, LAST))
    _refuse(
        (virtual > 1 and stages == 2 and has_both_ends,
         f"{given}: not supported without stages between the first and the last. {USE_LAYOUT}"),
        *((count % virtual, f"{given}: {count} layers of a pipeline stage are no multiple of "
           f"{virtual} virtual stages. {USE_LAYOUT}") for count in counts),
    )  # fmt: skip
    chunks = [[count // virtual] * virtual for count in counts]
    for option, end in zip(STANDALONE, (0, -1), strict=True):
        chunks[end][end] -= bool(options.get(option))
        left = f"{option}=True: its stage has no layers left. Use fewer stages."
        _refuse((chunks[end][end] < 0, left))
    return chunks


def _virtual(options: Options) -> int:
    if not options.get(PER_VIRTUAL):
        return _size(options, *VIRTUAL)
    layers = _size(options, "num_layers") + sum(bool(options.get(name)) for name in STANDALONE)
    each = layers // _size(options, "pipeline_model_parallel_size")
    virtual, rest = divmod(each, int(options[PER_VIRTUAL]))
    _refuse((rest or not virtual, f"{PER_VIRTUAL}={options[PER_VIRTUAL]}: does not divide the "
             f"{each} layers of a pipeline stage. Use a divisor of them."))  # fmt: skip
    return virtual


def _layers_of_stages(options: Options, stages: int) -> list[int]:
    """Layers of each stage, including an embedding or loss that counts as a layer."""
    first, last = (_size(options, *names, default=0) for names in (FIRST, LAST))
    standalone = [name for name in STANDALONE if options.get(name)]
    rest = _size(options, "num_layers") + len(standalone) - first - last
    others = stages - bool(first) - bool(last)
    given = _values(options, "num_layers", *FIRST, *LAST, *STANDALONE)
    _refuse(
        ((first or last) and standalone, f"{_values(options, *FIRST, *LAST)}: incompatible with "
         f"{', '.join(standalone)}. Leave one of them out."),
        (rest < 0 or bool(rest) != (others > 0) or (rest and rest % others),
         f"pipeline_model_parallel_size={stages}: does not divide {given}. {USE_LAYOUT}"),
    )  # fmt: skip
    each = [rest // others] * others if rest else []
    return [first] * bool(first) + each + [last] * bool(last)


def _of_layout(options: Options) -> list[list[int]]:
    layout, stages = options[LAYOUT], _size(options, "pipeline_model_parallel_size")
    others = _values(options, *FIRST, *LAST, *STANDALONE, PER_VIRTUAL)
    chunks = _expanded(layout) if isinstance(layout, str) else [
        "".join(LETTERS.get(str(getattr(one, "name", one)).strip().lower(), "?") for one in chunk)
        for chunk in layout
    ]  # fmt: skip
    flat = "".join(chunks)
    count = Counter(flat)
    virtual, rest = divmod(len(chunks), stages)
    layers = {"t": _size(options, "num_layers", default=count["t"]),
              "m": _size(options, "mtp_num_layers", default=0)}  # fmt: skip
    found = _found(
        (others, f"incompatible with {others}. Leave one of them out."),
        (set(flat) - set(LETTERS.values()),
         "has letters other than E, t, m, L and |. Write it as 'Et*2|t*2L'."),
        (rest, f"has {len(chunks)} parts, no multiple of pipeline_model_parallel_size={stages}. "
         "Write one part for each stage, or one for each of its virtual stages."),
        (_size(options, *VIRTUAL, default=virtual) != virtual,
         f"has {virtual} virtual stages, but {_values(options, *VIRTUAL)} is set. Leave that out."),
        (not flat.startswith("E") or not flat.endswith("L") or count["E"] + count["L"] != 2,
         "does not begin with one E and end with one L. Write it as 'Et*2|t*2L'."),
        *((count[letter] != wanted, f"has {letter} {count[letter]} times, but the model has "
           f"{wanted} such layers. Make them equal.") for letter, wanted in layers.items()),
        ("t" in flat.partition("m")[2],
         "has decoder layers after m. Write m after the last t."),
    )  # fmt: skip
    _refuse(*((True, f"{LAYOUT}={layout}: {text}") for text in found))
    return [
        [chunk.count("t") for chunk in chunks[stage::stages]] for stage in range(stages)
    ]  # fmt: skip


def _expanded(layout: str) -> list[str]:
    """Letters of each part: `x*n` is n times x, `(xy|)*n` is n times the content of the
    parentheses."""

    def repeated(found: re.Match[str]) -> str:
        return found[1] * int(found[2])

    text = re.sub(r"\(([^()]*)\)\*(\d+)", repeated, layout.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", repeated, text).split("|")


def layout_of(layers: int, stages: int, virtual: int) -> str:
    """A layout of parts as even as possible, the longer ones first: "Et*31|t*30L"."""
    each, more = divmod(layers, stages * virtual)
    return "E" + "|".join(f"t*{each + (at < more)}" for at in range(stages * virtual)) + "L"


def size_problems(options: Options, world_size: int | None) -> list[str]:
    """All divisibility problems, one line each: `option=value: what is wrong. What to do.`
    world_size: ranks of the run; if None, rules that depend on it are skipped."""
    found = not_above_zero(options)
    if found:  # nothing divides by these
        return found
    found = [*_width_problems(options), *_expert_problems(options)]
    chunks = [[0]]
    if options.get("num_layers") and not any(options.get(name) for name in OTHER_LAYERS):
        try:
            chunks = stage_layers(options)
        except ValueError as error:
            found.append(str(error))
    return found + ([] if world_size is None else _world_problems(
        options, world_size, len(chunks[0])
    ))  # fmt: skip


def not_above_zero(options: Options) -> list[str]:
    """One line for each size that is no integer above 0."""
    given = {name: options[name] for name in WHOLE if options.get(name) is not None}
    return [
        f"{name}={size}: not an integer above 0. Write one, or leave it out."
        for name, size in given.items() if type(size) is not int or size < 1
    ]  # fmt: skip


def _width_problems(options: Options) -> list[str]:
    tensor, heads = _size(options, "tensor_model_parallel_size"), options.get("num_attention_heads")
    hidden, context = options.get("hidden_size"), _size(options, "context_parallel_size")
    groups = options.get("num_query_groups") if options.get("group_query_attention", True) else None
    split, length = f"tensor_model_parallel_size={tensor}", options.get("seq_length")
    mlp = () if _size(options, *EXPERTS, default=0) else ("ffn_hidden_size",)
    parts = (
        (2 * context, f"2 x context_parallel_size={context}", context > 1),
        (tensor * context, f"{split} x context_parallel_size={context}, over which "
         "sequence_parallel splits it", options.get("sequence_parallel")),
    )  # fmt: skip
    return _found(
        (heads and hidden and hidden % heads and not options.get("kv_channels"),
         f"num_attention_heads={heads}: does not divide hidden_size={hidden}. Change one of them, "
         "or set kv_channels."),
        (groups and heads and heads % groups,
         f"num_query_groups={groups}: does not divide num_attention_heads={heads}. Change one of "
         "them."),
        (groups and groups % tensor and tensor % groups,
         f"num_query_groups={groups}: neither a multiple nor a divisor of {split}. Use another "
         "tensor-parallel size."),
        *((options.get(name) and options[name] % tensor,
           f"{name}={options.get(name)}: no multiple of {split}. Use a tensor-parallel size that "
           "divides it.") for name in ("num_attention_heads", *mlp, "padded_vocab_size")),
        *((length and applies and length % part,
           f"seq_length={length}: no multiple of {why}. Use a multiple of {part}.")
          for part, why, applies in parts),
    )  # fmt: skip


def _expert_problems(options: Options) -> list[str]:
    experts, ranks = (_size(options, *EXPERTS, default=0),
                      _size(options, "expert_model_parallel_size"))  # fmt: skip
    split, chosen = _expert_tensor(options), _size(options, "moe_router_topk")
    width = _size(options, "moe_ffn_hidden_size", "ffn_hidden_size", default=split)
    return _found(
        (ranks > 1 and not experts, f"expert_model_parallel_size={ranks}: the model has no "
         "experts. Leave it out, or set num_experts."),
        (experts and experts % ranks, f"expert_model_parallel_size={ranks}: does not divide "
         f"num_experts={experts}. Use a divisor."),
        (experts and chosen > experts,
         f"moe_router_topk={chosen}: more than num_experts={experts}. Use fewer."),
        (experts and width % split, f"moe_ffn_hidden_size={width}: no multiple of "
         f"expert_tensor_parallel_size={split}. Use an expert-tensor-parallel size that divides "
         "it."),
    )  # fmt: skip


def _expert_tensor(options: Options) -> int:
    """The expert-tensor-parallel size; by default the tensor-parallel size."""
    return _size(options, "expert_tensor_parallel_size", "tensor_model_parallel_size")


def _world_problems(options: Options, world_size: int, virtual: int) -> list[str]:
    sizes = {name: _size(options, name) for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
    )}  # fmt: skip
    stages, split = sizes["pipeline_model_parallel_size"], math.prod(sizes.values())
    if world_size % split:
        given = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        return [f"{given}: {split} does not divide {world_size} ranks. Use sizes that do, or "
                "another number of ranks."]  # fmt: skip
    data, etp = world_size // split, _expert_tensor(options)
    ranks, experts = (_size(options, "expert_model_parallel_size"),
                      _size(options, *EXPERTS, default=0))  # fmt: skip
    each = etp * ranks * stages if experts else 1
    alike = {"data-parallel ranks": data * sizes["context_parallel_size"]}
    if experts and not world_size % each:
        alike["ranks with the same experts"] = world_size // each
    instances = _size(options, "num_distributed_optimizer_instances")
    return _found(
        (world_size % each, f"expert_model_parallel_size={ranks} x "
         f"expert_tensor_parallel_size={etp} x pipeline_model_parallel_size={stages}: {each} does "
         f"not divide {world_size} ranks. Use sizes that do."),
        *((number % instances, f"num_distributed_optimizer_instances={instances}: does not divide "
           f"the {number} {what}. Use a divisor.") for what, number in alike.items()),
        *_batch_rows(options, data, stages, virtual),
    )  # fmt: skip


def _batch_rows(
    options: Options, data: int, stages: int, virtual: int
) -> list[tuple[Any, str]]:
    micro, total = _size(options, "micro_batch_size"), options.get("global_batch_size")
    count, rest = divmod(total or micro * data, micro * data)
    group, uneven = _size(options, *GROUP, default=stages), options.get(UNEVEN_BATCH)
    splits_in_vain = not stages <= group <= count or 0 < count % group < stages
    return [
        (rest and not uneven,
         f"global_batch_size={total}: no multiple of micro_batch_size={micro} x {data} "
         f"data-parallel ranks. Use a multiple of {micro * data}."),
        (total and not (rest and not uneven) and virtual > 1 and splits_in_vain,
         f"global_batch_size={total}: {count} microbatches are no multiple of the {group} that "
         f"{virtual} virtual stages take at a time. Change the batch, or leave out the virtual "
         "stages."),
    ]  # fmt: skip
