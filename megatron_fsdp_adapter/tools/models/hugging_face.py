"""The options that a Hugging Face model's config.json describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .families import (
    FAMILIES,
    FIRST_DENSE,
    LAYER_TYPES,
    MAY_BE_NULL,
    NO_PARAMETERS,
    OF_EVERY_FAMILY,
    ONE_GROUP,
    POSITIONS,
    SAME_KEYS,
    SHARED_EXPERTS,
    TIED,
    Family,
)
from .spec import Options

HEADS = ("ForCausalLM", "LMHeadModel")
"""Suffixes of the class of a model with the output layer that is counted."""
INSTEAD = "Give the sizes by flags instead of --hf-config, e.g. --num-layers and --hidden-size"
LONGEST = 8192
"""Most tokens of a sequence that are assumed."""


def read_hugging_face(path: str) -> Options:
    """The options of a decoder's config.json, by the names of Megatron's arguments. path: of the
    file, or its folder.

    Raises FileNotFoundError or ValueError, naming the file: also for a model whose parameters
    could not be counted exactly."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"--hf-config {file}: no such file")
    try:
        found = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--hf-config {file}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"--hf-config {file}: no config of a model. Give a model's config.json")
    try:
        return _options_of(found)
    except ValueError as error:
        raise ValueError(f"--hf-config {file}: {error}") from error


def _options_of(found: dict[str, Any]) -> Options:
    """The options of a config. Raises ValueError for one that is not fully understood."""
    kind = found.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        inner = ""
        if "text_config" in found:
            inner = ". Its text_config, saved as a file of its own, may be of one"
        raise ValueError(
            f"model_type={kind!r}: not a known family. Known are {', '.join(FAMILIES)}{inner}. "
            f"{INSTEAD}"
        )
    found = dict(found)
    for key, other in SAME_KEYS.items():
        if key in family.reads and key not in found and other in found:
            found[key] = found.pop(other)
    _check(found, str(kind), family)
    options: dict[str, Any] = dict(family.options)
    for key, option in family.reads.items():
        value = found.get(key, family.defaults.get(key))
        if not isinstance(value, int | None):
            raise ValueError(f"{key}={value!r}: no number, and not true or false. Correct it")
        options[option] = value
    return _as_megatrons(options)


def _check(found: Options, kind: str, family: Family) -> None:
    """Raises ValueError for keys that are missing, that are unknown, or whose value the family
    does not have."""
    missing = []
    for key in family.reads.keys() - family.defaults.keys():
        if key not in found or (found[key] is None and key not in MAY_BE_NULL):
            missing.append(key)
    if missing:
        names = ", ".join(sorted(missing))
        raise ValueError(f"no config of {kind}, because it has no {names}. {INSTEAD}")
    classes = [name for name in found.get("architectures") or [] if not name.endswith(HEADS)]
    if classes:
        raise ValueError(
            f"architectures={classes}: only models with an output layer for tokens are counted "
            f"(classes that end in {' or '.join(HEADS)}). {INSTEAD}"
        )
    only = {**OF_EVERY_FAMILY, **family.only}
    harmless = {*family.reads, *family.ignores, *NO_PARAMETERS}
    for key, value in found.items():
        if key in only:
            known = value == only[key] or not (value or only[key])
        elif key == "layer_types":
            known = not value or set(value) <= set(LAYER_TYPES)
        else:
            # An unknown key that is off adds nothing.
            known = key in harmless or key.startswith("_") or not value
        if not known:
            allowed = f" other than {json.dumps(only[key])}" if key in only else ""
            raise ValueError(
                f"{key}={json.dumps(value)}: the parameters of {kind} models with a value"
                f"{allowed or ' of this key'} are not known. Remove the key from the file if it "
                f"adds no parameters. {INSTEAD}"
            )


def _as_megatrons(options: dict[str, Any]) -> Options:
    """The options with Megatron's in place of those that are not Megatron's."""
    heads = options["num_attention_heads"]
    groups = 1 if options.pop(ONE_GROUP, False) else options.get("num_query_groups")
    options["num_query_groups"] = groups or heads
    options["group_query_attention"] = True
    options["untie_embeddings_and_output_weights"] = not options.pop(TIED)
    positions = options.pop(POSITIONS)
    options["seq_length"] = min(positions or 4096, LONGEST)
    if options["position_embedding_type"] == "learned_absolute":
        options["max_position_embeddings"] = positions
    dense = options.pop(FIRST_DENSE, None)
    shared = options.pop(SHARED_EXPERTS, None)
    if not options.get("num_experts"):
        return {name: value for name, value in options.items() if not name.startswith("moe_")}
    if dense:
        options["moe_layer_freq"] = [0] * dense + [1] * (options["num_layers"] - dense)
    if shared:
        width = options["moe_ffn_hidden_size"]
        options["moe_shared_expert_intermediate_size"] = shared * width
    if not options.get("moe_shared_expert_intermediate_size"):
        options.pop("moe_shared_expert_intermediate_size", None)
        options.pop("moe_shared_expert_gate", None)
    return options
