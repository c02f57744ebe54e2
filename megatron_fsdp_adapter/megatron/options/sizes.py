"""Divisibility of sizes: ranks, heads, experts, batches, layers of pipeline stages.

The rules are those that Megatron-Core and Megatron-LM assert when a run starts. They are repeated
here because configurations are checked and planned without importing them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

ConfigOptions = Mapping[str, Any]
"""Options by the names of Megatron's configs or arguments; None means absent."""

LAYOUT = "pipeline_model_parallel_layout"
FIRST = ("num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers")
LAST = ("num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers")
VIRTUAL = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
PER_VIRTUAL = "num_layers_per_virtual_pipeline_stage"
STANDALONE = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
EXPERTS = ("num_moe_experts", "num_experts")
GROUP = (
    "microbatch_group_size_per_vp_stage",
    "microbatch_group_size_per_virtual_pipeline_stage",
)
OTHER_LAYERS = ("hybrid_layer_pattern", "hybrid_override_pattern", "encoder_num_layers")
"""Options that define layers in ways that are not checked here: with one of them the split of
layers over stages is not checked."""

NAMES = (*FIRST, *LAST, *VIRTUAL, PER_VIRTUAL, *EXPERTS, *GROUP, *OTHER_LAYERS)

EXPERT_INSTANCES = "expert_num_distributed_optimizer_instances"

WHOLE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances", EXPERT_INSTANCES,
    "num_layers", "hidden_size", "num_attention_heads",
    "seq_length", "micro_batch_size", "global_batch_size", *VIRTUAL,
)  # fmt: skip
"""Options that are integers above 0, or absent."""

UNEVEN_BATCH = "decrease_batch_size_if_needed"

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Name of a kind of layer in a layout -> its letter in the layout's string."""

USE_LAYOUT = f"Use {LAYOUT}, which defines the layers of each stage, or other sizes."


def _size(options: ConfigOptions, *names: str, default: int = 1) -> int:
    """The value of the first of `names` that is set; `default` if none is."""
    return next((int(options[name]) for name in names if options.get(name)), default)


def _values(options: ConfigOptions, *names: str) -> str:
    """Text for messages: those of `names` that are set, with their values."""
    return ", ".join(f"{name}={options[name]}" for name in names if options.get(name))


def stage_layers(options: ConfigOptions) -> list[list[int]]:
    """The number of decoder layers of each model chunk of each pipeline stage:
    `found[stage][chunk]`.

    Raises ValueError, naming the option, for a split that Megatron-Core does not support.
    """
    if options.get(LAYOUT):
        return _of_layout(options)
    stages = _size(options, "pipeline_model_parallel_size")
    virtual = _virtual(options)
    given = _values(options, *VIRTUAL, PER_VIRTUAL)
    if virtual > 1 and stages == 1:
        raise ValueError(f"{given}: there is one pipeline stage. Leave it out.")
    counts = _layers_of_stages(options, stages)
    has_both_ends = all(_size(options, *names, default=0) for names in (FIRST, LAST))
    if virtual > 1 and stages == 2 and has_both_ends:
        raise ValueError(
            f"{given}: not supported without stages between the first and the last. {USE_LAYOUT}"
        )
    for count in counts:
        if count % virtual:
            raise ValueError(
                f"{given}: {count} layers of a pipeline stage are no multiple of {virtual} virtual "
                f"stages. {USE_LAYOUT}"
            )
    chunks = [[count // virtual] * virtual for count in counts]
    for option, end in zip(STANDALONE, (0, -1), strict=True):
        if options.get(option):
            chunks[end][end] -= 1
        if chunks[end][end] < 0:
            raise ValueError(f"{option}=True: its stage has no layers left. Use fewer stages.")
    return chunks


def _virtual(options: ConfigOptions) -> int:
    """The number of virtual stages of each pipeline stage. ValueError if a number of layers for
    each virtual stage does not divide those of a pipeline stage."""
    if not options.get(PER_VIRTUAL):
        return _size(options, *VIRTUAL)
    layers = _size(options, "num_layers") + len(_standalone(options))
    layers_of_stage = layers // _size(options, "pipeline_model_parallel_size")
    virtual, rest = divmod(layers_of_stage, int(options[PER_VIRTUAL]))
    if rest or not virtual:
        raise ValueError(
            f"{PER_VIRTUAL}={options[PER_VIRTUAL]}: does not divide the {layers_of_stage} "
            "layers of a pipeline stage. Use a divisor of them."
        )
    return virtual


def _standalone(options: ConfigOptions) -> list[str]:
    """The set ones of the options that count the embedding, or the loss, as a layer of its
    stage."""
    return [name for name in STANDALONE if options.get(name)]


def _layers_of_stages(options: ConfigOptions, stages: int) -> list[int]:
    """Layers of each stage, including an embedding or loss that counts as a layer. ValueError for
    an uneven split."""
    first = _size(options, *FIRST, default=0)
    last = _size(options, *LAST, default=0)
    standalone = _standalone(options)
    if standalone and (first or last):
        raise ValueError(
            f"{_values(options, *FIRST, *LAST)}: incompatible with {', '.join(standalone)}. Leave "
            "one of them out."
        )
    ends = [count for count in (first, last) if count]
    others = stages - len(ends)
    rest = _size(options, "num_layers") + len(standalone) - sum(ends)
    if others > 0:
        is_even = rest > 0 and rest % others == 0
    else:
        is_even = rest == 0
    if not is_even:
        given = _values(options, "num_layers", *FIRST, *LAST, *STANDALONE)
        raise ValueError(
            f"pipeline_model_parallel_size={stages}: does not divide {given}. {USE_LAYOUT}"
        )
    counts = []
    if first:
        counts.append(first)
    if rest:
        counts += [rest // others] * others
    if last:
        counts.append(last)
    return counts


def _of_layout(options: ConfigOptions) -> list[list[int]]:
    layout = options[LAYOUT]
    stages = _size(options, "pipeline_model_parallel_size")
    if isinstance(layout, str):
        chunks = _expanded(layout)
    else:
        chunks = ["".join(map(_letter, chunk)) for chunk in layout]
    problem = next(_layout_problems(options, chunks, stages), None)
    if problem is not None:
        raise ValueError(f"{LAYOUT}={layout}: {problem}")
    counts = [chunk.count("t") for chunk in chunks]
    return [counts[stage::stages] for stage in range(stages)]


def _letter(part: Any) -> str:
    """The letter of a part, which is a name or a member of core's enum; "?" for an unknown one."""
    name = str(getattr(part, "name", part))
    return LETTERS.get(name.strip().lower(), "?")


def _layout_problems(options: ConfigOptions, chunks: list[str], stages: int) -> Iterator[str]:
    others = _values(options, *FIRST, *LAST, *STANDALONE, PER_VIRTUAL)
    if others:
        yield f"incompatible with {others}. Leave one of them out."
    letters = "".join(chunks)
    if not set(letters).issubset(LETTERS.values()):
        yield "has letters other than E, t, m, L and |. Write it as 'Et*2|t*2L'."
    virtual, rest = divmod(len(chunks), stages)
    if rest:
        yield (
            f"has {len(chunks)} parts, no multiple of pipeline_model_parallel_size={stages}. Write "
            "one part for each stage, or one for each of its virtual stages."
        )
    if _size(options, *VIRTUAL, default=virtual) != virtual:
        given = _values(options, *VIRTUAL)
        yield f"has {virtual} virtual stages, but {given} is set. Leave that out."
    count = Counter(letters)
    has_its_ends = letters.startswith("E") and letters.endswith("L")
    if not has_its_ends or count["E"] + count["L"] != 2:
        yield "does not begin with one E and end with one L. Write it as 'Et*2|t*2L'."
    layers = {
        "t": _size(options, "num_layers", default=count["t"]),
        "m": _size(options, "mtp_num_layers", default=0),
    }
    for letter, wanted in layers.items():
        if count[letter] != wanted:
            yield (
                f"has {letter} {count[letter]} times, but the model has {wanted} such layers. Make "
                "them equal."
            )
    if "t" in letters.partition("m")[2]:
        yield "has decoder layers after m. Write m after the last t."


def _expanded(layout: str) -> list[str]:
    """The letters of each part of a layout's string, with repetitions written out: `x*n` is n times
    x, `(xy|)*n` is n times the content of the parentheses."""

    def repeated(found: re.Match[str]) -> str:
        return found[1] * int(found[2])

    text = re.sub(r"\(([^()]*)\)\*(\d+)", repeated, layout.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", repeated, text).split("|")


def layout_of(layers: int, stages: int, virtual: int) -> str:
    """A layout with parts as equal as possible, the longer ones first: "Et*31|t*30L"."""
    parts = stages * virtual
    shorter, longer_parts = divmod(layers, parts)
    counts = [shorter + 1] * longer_parts + [shorter] * (parts - longer_parts)
    return "E" + "|".join(f"t*{count}" for count in counts) + "L"


def size_problems(options: ConfigOptions, world_size: int | None) -> list[str]:
    """All divisibility problems, one line each: `option=value: what is wrong. What to do.`
    world_size: ranks of the run; if None, rules that depend on it are skipped."""
    found = not_above_zero(options)
    if found:  # the rules below divide by these sizes
        return found
    found = [*_width_problems(options), *_expert_problems(options)]
    virtual = 1
    if options.get("num_layers") and not any(options.get(name) for name in OTHER_LAYERS):
        try:
            virtual = len(stage_layers(options)[0])
        except ValueError as error:
            found.append(str(error))
    if world_size is not None:
        found += _world_problems(options, world_size, virtual)
    return found


def not_above_zero(options: ConfigOptions) -> list[str]:
    """One line for each size that is no integer above 0."""
    found = []
    for name in WHOLE:
        size = options.get(name)
        if size is not None and (type(size) is not int or size < 1):
            found.append(f"{name}={size}: not an integer above 0. Write one, or leave it out.")
    return found


def _width_problems(options: ConfigOptions) -> Iterator[str]:
    heads = options.get("num_attention_heads")
    hidden = options.get("hidden_size")
    if heads and hidden and hidden % heads and not options.get("kv_channels"):
        yield (
            f"num_attention_heads={heads}: does not divide hidden_size={hidden}. Change one of "
            "them, or set kv_channels."
        )
    tensor = _size(options, "tensor_model_parallel_size")
    split = f"tensor_model_parallel_size={tensor}"
    groups = options.get("num_query_groups")
    if groups and options.get("group_query_attention", True):
        if heads and heads % groups:
            yield (
                f"num_query_groups={groups}: does not divide num_attention_heads={heads}. Change "
                "one of them."
            )
        if groups % tensor and tensor % groups:
            yield (
                f"num_query_groups={groups}: neither a multiple nor a divisor of {split}. Use "
                "another tensor-parallel size."
            )
    widths = ["num_attention_heads", "ffn_hidden_size", "padded_vocab_size"]
    if _size(options, *EXPERTS, default=0):
        widths.remove("ffn_hidden_size")  # `_expert_problems` checks the experts' width
    for name in widths:
        width = options.get(name)
        if width and width % tensor:
            yield (
                f"{name}={width}: no multiple of {split}. Use a tensor-parallel size that divides "
                "it."
            )
    yield from _length_problems(options, tensor, split)


def _length_problems(options: ConfigOptions, tensor: int, split: str) -> Iterator[str]:
    """Problems of the sequence length. split: the tensor-parallel size with its name."""
    length = options.get("seq_length")
    if not length:
        return
    context = _size(options, "context_parallel_size")
    by_context = f"context_parallel_size={context}"
    parts = {}  # text of a divisor -> the divisor
    if context > 1:
        # Each rank has two pieces of a sequence, one early and one late, to balance attention.
        parts[f"2 x {by_context}"] = 2 * context
    if options.get("sequence_parallel"):
        why = f"{split} x {by_context}, over which sequence_parallel splits it"
        parts[why] = tensor * context
    for why, part in parts.items():
        if length % part:
            yield f"seq_length={length}: no multiple of {why}. Use a multiple of {part}."


def _expert_problems(options: ConfigOptions) -> Iterator[str]:
    experts = _size(options, *EXPERTS, default=0)
    ranks = _size(options, "expert_model_parallel_size")
    if not experts:
        if ranks > 1:
            yield (
                f"expert_model_parallel_size={ranks}: the model has no experts. Leave it out, or "
                "set num_experts."
            )
        return
    if experts % ranks:
        yield (
            f"expert_model_parallel_size={ranks}: does not divide num_experts={experts}. Use a "
            "divisor."
        )
    chosen = _size(options, "moe_router_topk")
    if chosen > experts:
        yield f"moe_router_topk={chosen}: more than num_experts={experts}. Use fewer."
    split = _expert_tensor(options)
    width = _size(options, "moe_ffn_hidden_size", "ffn_hidden_size", default=split)
    if width % split:
        yield (
            f"moe_ffn_hidden_size={width}: no multiple of expert_tensor_parallel_size={split}. Use "
            "an expert-tensor-parallel size that divides it."
        )


def _expert_tensor(options: ConfigOptions) -> int:
    """The expert-tensor-parallel size; by default the tensor-parallel size."""
    return _size(options, "expert_tensor_parallel_size", "tensor_model_parallel_size")


def _world_problems(options: ConfigOptions, world_size: int, virtual: int) -> Iterator[str]:
    stages = _size(options, "pipeline_model_parallel_size")
    context = _size(options, "context_parallel_size")
    sizes = {
        "tensor_model_parallel_size": _size(options, "tensor_model_parallel_size"),
        "pipeline_model_parallel_size": stages,
        "context_parallel_size": context,
    }
    split = math.prod(sizes.values())
    if world_size % split:
        given = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        yield (
            f"{given}: {split} does not divide {world_size} ranks. Use sizes that do, or another "
            "number of ranks."
        )
        return
    data = world_size // split
    # Ranks that share gradients, and so divide into optimizer instances.
    alike = {"data-parallel ranks": data * context}
    if _size(options, *EXPERTS, default=0):
        ranks = _size(options, "expert_model_parallel_size")
        tensor = _expert_tensor(options)
        each = tensor * ranks * stages
        if world_size % each:
            yield (
                f"expert_model_parallel_size={ranks} x expert_tensor_parallel_size={tensor} x "
                f"pipeline_model_parallel_size={stages}: {each} does not divide {world_size} "
                "ranks. Use sizes that do."
            )
        else:
            alike["ranks with the same experts"] = world_size // each
            yield from _replica_problems(options, world_size // each)
    instances = _size(options, "num_distributed_optimizer_instances")
    for what, number in alike.items():
        if number % instances:
            yield (
                f"num_distributed_optimizer_instances={instances}: does not divide the {number} "
                f"{what}. Use a divisor."
            )
    yield from _batch_problems(options, data, stages, virtual)


def _replica_problems(options: ConfigOptions, ranks: int) -> Iterator[str]:
    """Problems of another number of replicas of experts. ranks: have the same experts."""
    replicas = _size(options, EXPERT_INSTANCES)
    if ranks % replicas:
        yield (
            f"{EXPERT_INSTANCES}={replicas}: does not divide the {ranks} ranks with the same "
            "experts. Use a divisor."
        )


def _batch_problems(options: ConfigOptions, data: int, stages: int, virtual: int) -> Iterator[str]:
    """Problems of the batch size. data: number of data-parallel ranks."""
    total = options.get("global_batch_size")
    if not total:
        return
    micro = _size(options, "micro_batch_size")
    count, rest = divmod(total, micro * data)
    if rest and not options.get(UNEVEN_BATCH):
        yield (
            f"global_batch_size={total}: no multiple of micro_batch_size={micro} x {data} "
            f"data-parallel ranks. Use a multiple of {micro * data}."
        )
        return
    group = _size(options, *GROUP, default=stages)
    # Core requires that each group of microbatches, also a smaller last one, has at least one for
    # each pipeline stage.
    is_wrong_group = not stages <= group <= count or 0 < count % group < stages
    if virtual > 1 and is_wrong_group:
        yield (
            f"global_batch_size={total}: {count} microbatches are no multiple of the {group} that "
            f"{virtual} virtual stages take at a time. Change the batch, or leave out the virtual "
            "stages."
        )
