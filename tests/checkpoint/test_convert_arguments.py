"""The tables of arguments have every one that core and Megatron-LM have, and what core has fixed is
what is written.

    MEGATRON_LM_PATH=path/to/Megatron-LM python -m pytest tests/checkpoint/test_convert_arguments.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from megatron_fsdp_adapter.checkpoint.convert import architecture, arguments

TABLES: tuple[Any, ...] = (
    arguments.REQUIRED, arguments.OF_EXPERTS, arguments.NOT_CARRIED, arguments.READ,
    arguments.WITHOUT_EFFECT,
)  # fmt: skip
LLAMA = ("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm",
         "--position-embedding-type", "rope")  # fmt: skip

PARSE = """
import argparse, json, sys
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
found, rest = parser.parse_known_args(sys.argv[1:])
assert not rest, rest
plain = (type(None), bool, int, float, str, list)
print(json.dumps({k: v if isinstance(v, plain) else str(v) for k, v in vars(found).items()}))
"""


def test_each_argument_is_in_one_table() -> None:
    counts = Counter(name for table in TABLES for name in table)
    assert {name for name, count in counts.items() if count > 1} == set()


def test_every_field_of_cores_config_is_in_one() -> None:
    from megatron.core.transformer import MLATransformerConfig

    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    known = {name for table in TABLES for name in table}
    assert len(fields) > 200
    assert {name for name in fields if not name.startswith("_")} - known == set()


def test_the_constants_of_rotary_scaling_are_cores() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    fixed = inspect.signature(RotaryEmbedding._apply_scaling).parameters
    assert {name: fixed[name].default for name in architecture._LLAMA3} == architecture._LLAMA3
    factor = inspect.signature(RotaryEmbedding).parameters["rope_scaling_factor"].default
    assert architecture._FACTOR == factor == fixed["factor"].default


def _megatron_lm(*options: str) -> dict[str, Any]:
    """Megatron-LM's arguments as it saves them."""
    checkout = os.environ.get("MEGATRON_LM_PATH")
    if not checkout:
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout")
    path = os.pathsep.join([checkout, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE, *options],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_every_argument_of_megatron_lm_is_in_one_and_a_llamas_are_taken() -> None:
    found = _megatron_lm(*LLAMA)
    known = {name for table in TABLES for name in table}
    assert len(found) > 600 and set(found) - known == set()
    for experts in (False, True):
        arguments.refuse_other_models(found, experts)
        arguments.refuse_unknown(found)
    for option, value in (("--softmax-type", "learnable"), ("--apply-layernorm-1p", None)):
        changed = _megatron_lm(*LLAMA, option, *([value] if value else []))
        with pytest.raises(ValueError, match="neither a Llama nor a Mixtral"):
            arguments.refuse_other_models(changed, False)
