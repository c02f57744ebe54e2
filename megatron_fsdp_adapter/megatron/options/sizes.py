"""Divisibility of sizes: ranks, heads, experts, batches, layers of pipeline stages.

The rules are those that Megatron-Core and Megatron-LM assert when a run starts. They are repeated
here because configurations are checked and planned without importing them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
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

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Parts of the stages of a layout -> their letters in its string."""

USE_LAYOUT = f"Use {LAYOUT}, which defines the layers of each stage, or other sizes."


def _size(options: Options, *names: str, default: int = 1) -> int:
    """The value of the first name that is set."""
    return next((int(options[name]) for name in names if options.get(name)), default)


def _said(options: Options, *names: str) -> str:
    """Text of the names that are set, with their values."""
    return ", ".join(f"{name}={options[name]}" for name in names if options.get(name))


def stage_layers(options: Options) -> list[list[int]]:
    """The number of decoder layers of each model chunk of each pipeline stage:
    `found[stage][chunk]`.

    Raises ValueError, naming the option, for a split that Megatron-Core does not support.
    """
    if options.get(LAYOUT):
        return _of_layout(options)
    stages, virtual = _size(options, "pipeline_model_parallel_size"), _virtual(options)
    told = _said(options, *VIRTUAL, PER_VIRTUAL)
    if virtual > 1 and stages == 1:
        raise ValueError(f"{told}: there is one pipeline stage. Leave it out.")
    counts = _layers_of_stages(options, stages)
    if virtual > 1 and stages == 2 and len(_said(options, *FIRST, *LAST).split(", ")) == 2:
        raise ValueError(
            f"{told}: not supported without stages between the first and the last. {USE_LAYOUT}"
        )  # fmt: skip
    for count in counts:
        if count % virtual:
            raise ValueError(
                f"{told}: {count} layers of a pipeline stage are no multiple of {virtual} virtual "
                f"stages. {USE_LAYOUT}"
            )
    chunks = [[count // virtual] * virtual for count in counts]
    for option, end in zip(STANDALONE, (0, -1), strict=True):
        chunks[end][end] -= bool(options.get(option))
        if chunks[end][end] < 0:
            raise ValueError(f"{option}=True: its stage has no layers left. Use fewer stages.")
    return chunks


def _virtual(options: Options) -> int:
    if not options.get(PER_VIRTUAL):
        return _size(options, *VIRTUAL)
    layers = _size(options, "num_layers") + sum(bool(options.get(name)) for name in STANDALONE)
    each = layers // _size(options, "pipeline_model_parallel_size")
    virtual, rest = divmod(each, int(options[PER_VIRTUAL]))
    if rest or not virtual:
        raise ValueError(
            f"{PER_VIRTUAL}={options[PER_VIRTUAL]}: does not divide the {each} layers of a "
            "pipeline stage. Use a divisor of them."
        )
    return virtual


def _layers_of_stages(options: Options, stages: int) -> list[int]:
    """Layers of each stage, including an embedding or loss that counts as a layer."""
    first, last = (_size(options, *names, default=0) for names in (FIRST, LAST))
    standalone = [name for name in STANDALONE if options.get(name)]
    if (first or last) and standalone:
        raise ValueError(
            f"{_said(options, *FIRST, *LAST)}: incompatible with {standalone[0]}=True. Leave one "
            "of them out."
        )
    rest = _size(options, "num_layers") + len(standalone) - first - last
    others = stages - bool(first) - bool(last)
    if rest < 0 or bool(rest) != (others > 0) or (rest and rest % others):
        told = _said(options, "num_layers", *FIRST, *LAST, *STANDALONE)
        raise ValueError(
            f"pipeline_model_parallel_size={stages}: does not divide {told}. {USE_LAYOUT}"
        )
    each = [rest // others] * others if rest else []
    return [first] * bool(first) + each + [last] * bool(last)


def _of_layout(options: Options) -> list[list[int]]:
    layout, stages = options[LAYOUT], _size(options, "pipeline_model_parallel_size")

    def wrong(what: str, remedy: str) -> ValueError:
        return ValueError(f"{LAYOUT}={layout}: {what}. {remedy}")

    others = _said(options, *FIRST, *LAST, *STANDALONE, PER_VIRTUAL)
    if others:
        raise wrong(f"incompatible with {others}", "Leave one of them out.")
    chunks = _expanded(layout) if isinstance(layout, str) else [
        "".join(LETTERS.get(str(getattr(one, "name", one)).strip().lower(), "?") for one in chunk)
        for chunk in layout
    ]  # fmt: skip
    flat = "".join(chunks)
    count = Counter(flat)
    virtual, rest = divmod(len(chunks), stages)
    if set(flat) - set(LETTERS.values()):
        raise wrong("has letters other than E, t, m, L and |", "Write it as 'Et*2|t*2L'.")
    if rest:
        raise wrong(
            f"has {len(chunks)} parts, no multiple of pipeline_model_parallel_size={stages}",
            "Write one part for each stage, or one for each of its virtual stages.",
        )
    if _size(options, *VIRTUAL, default=virtual) != virtual:
        raise wrong(f"has {virtual} virtual stages, but {_said(options, *VIRTUAL)} is set",
                    "Leave that out.")  # fmt: skip
    if not flat.startswith("E") or not flat.endswith("L") or count["E"] + count["L"] != 2:
        raise wrong("does not begin with one E and end with one L", "Write it as 'Et*2|t*2L'.")
    layers = {"t": _size(options, "num_layers", default=count["t"]),
              "m": _size(options, "mtp_num_layers", default=0)}  # fmt: skip
    for letter, wanted in layers.items():
        if count[letter] != wanted:
            raise wrong(
                f"has {letter} {count[letter]} times, but the model has {wanted} such layers",
                        "Make them equal.")  # fmt: skip
    if "m" in flat and "t" in flat[flat.index("m") :]:
        raise wrong("has decoder layers after m", "Write m after the last t.")
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
    parts = (f"t*{each + (at < more)}" for at in range(stages * virtual))
    return f"E{'|'.join(parts)}L"


def size_problems(options: Options, world_size: int | None) -> list[str]:
    """All divisibility problems, one line each: `option=value: what is wrong. What to do.`
    world_size: ranks of the run; if None, rules that depend on it are skipped."""
    found = not_above_zero(options)
    if found:  # nothing divides by these
        return found
    found = [*_width_problems(options), *_expert_problems(options)]
    chunks = None
    if options.get("num_layers") and not any(options.get(name) for name in OTHER_LAYERS):
        try:
            chunks = stage_layers(options)
        except ValueError as error:
            found.append(str(error))
    if world_size is not None:
        found += _world_problems(options, world_size, len(chunks[0]) if chunks else 1)
    return found


def not_above_zero(options: Options) -> list[str]:
    """One line for each size that is no integer above 0."""
    told = {name: options[name] for name in WHOLE if options.get(name) is not None}
    return [
        f"{name}={size}: not an integer above 0. Write one, or leave it out."
        for name, size in told.items() if type(size) is not int or size < 1
    ]  # fmt: skip


def _width_problems(options: Options) -> Iterator[str]:
    tensor, heads = _size(options, "tensor_model_parallel_size"), options.get("num_attention_heads")
    hidden, context = options.get("hidden_size"), _size(options, "context_parallel_size")
    groups = options.get("num_query_groups") if options.get("group_query_attention", True) else None
    split = f"tensor_model_parallel_size={tensor}"
    if heads and hidden and hidden % heads and not options.get("kv_channels"):
        yield (f"num_attention_heads={heads}: does not divide hidden_size={hidden}. Change one of "
               "them, or set kv_channels.")  # fmt: skip
    if groups and heads and heads % groups:
        yield (f"num_query_groups={groups}: does not divide num_attention_heads={heads}. Change "
               "one of them.")  # fmt: skip
    if groups and groups % tensor and tensor % groups:
        yield (f"num_query_groups={groups}: neither a multiple nor a divisor of {split}. Use "
               "another tensor-parallel size.")  # fmt: skip
    mlp = () if _size(options, *EXPERTS, default=0) else ("ffn_hidden_size",)
    for name in ("num_attention_heads", *mlp, "padded_vocab_size"):
        if options.get(name) and options[name] % tensor:
            yield (f"{name}={options[name]}: no multiple of {split}. Use a tensor-parallel size "
                   "that divides it.")  # fmt: skip
    length = options.get("seq_length")
    for part, why, applies in (
        (2 * context, f"2 x context_parallel_size={context}", context > 1),
        (tensor * context, f"{split} x context_parallel_size={context}, over which "
         "sequence_parallel splits it", options.get("sequence_parallel")),
    ):  # fmt: skip
        if length and applies and length % part:
            yield f"seq_length={length}: no multiple of {why}. Use a multiple of {part}."


def _expert_problems(options: Options) -> Iterator[str]:
    experts, ranks = (_size(options, *EXPERTS, default=0),
                      _size(options, "expert_model_parallel_size"))  # fmt: skip
    if ranks > 1 and not experts:
        yield (f"expert_model_parallel_size={ranks}: the model has no experts. Leave it out, or "
               "set num_experts.")  # fmt: skip
    if not experts:
        return
    told = f"num_experts={experts}"
    if experts % ranks:
        yield f"expert_model_parallel_size={ranks}: does not divide {told}. Use a divisor."
    if _size(options, "moe_router_topk") > experts:
        yield f"moe_router_topk={options['moe_router_topk']}: more than {told}. Use fewer."
    split = _expert_tensor(options)
    width = _size(options, "moe_ffn_hidden_size", "ffn_hidden_size", default=split)
    if width % split:
        yield (f"moe_ffn_hidden_size={width}: no multiple of expert_tensor_parallel_size={split}. "
               "Use an expert-tensor-parallel size that divides it.")  # fmt: skip


def _expert_tensor(options: Options) -> int:
    """The expert-tensor-parallel size; by default the tensor-parallel size."""
    return _size(options, "expert_tensor_parallel_size", "tensor_model_parallel_size")


def _world_problems(options: Options, world_size: int, virtual: int) -> Iterator[str]:
    sizes = {name: _size(options, name) for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
    )}  # fmt: skip
    tensor, stages, context = sizes.values()
    split = tensor * stages * context
    if world_size % split:
        told = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        yield (f"{told}: {split} does not divide {world_size} ranks. Use sizes that do, or another "
               "number of ranks.")  # fmt: skip
        return
    data = world_size // split
    alike = {"data-parallel ranks": data * context}
    if _size(options, *EXPERTS, default=0):
        etp, ranks = _expert_tensor(options), _size(options, "expert_model_parallel_size")
        each = etp * ranks * stages
        if world_size % each:
            yield (f"expert_model_parallel_size={ranks} x expert_tensor_parallel_size={etp} x "
                   f"pipeline_model_parallel_size={stages}: {each} does not divide {world_size} "
                   "ranks. Use sizes that do.")  # fmt: skip
        else:
            alike["ranks with the same experts"] = world_size // each
    instances = _size(options, "num_distributed_optimizer_instances")
    for what, number in alike.items():
        if number % instances:
            yield (f"num_distributed_optimizer_instances={instances}: does not divide the {number} "
                   f"{what}. Use a divisor.")  # fmt: skip
    yield from _batch_problems(options, data, stages, virtual)


def _batch_problems(options: Options, data: int, stages: int, virtual: int) -> Iterator[str]:
    micro, total = _size(options, "micro_batch_size"), options.get("global_batch_size")
    if not total:
        return
    count, rest = divmod(total, micro * data)
    if rest and not options.get("decrease_batch_size_if_needed"):
        yield (f"global_batch_size={total}: no multiple of micro_batch_size={micro} x {data} "
               f"data-parallel ranks. Use a multiple of {micro * data}.")  # fmt: skip
        return
    group = _size(options, *GROUP, default=stages)
    if virtual > 1 and (not stages <= group <= count or 0 < count % group < stages):
        yield (f"global_batch_size={total}: {count} microbatches are no multiple of the {group} "
               f"that {virtual} virtual stages take at a time. Change the batch, or leave out the "
               "virtual stages.")  # fmt: skip
