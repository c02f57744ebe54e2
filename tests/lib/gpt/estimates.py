"""The command `estimate` for a model of the tests: its flags, and what it prints."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from types import MappingProxyType
from typing import Any

from megatron_fsdp_adapter.tools.cli import estimate
from tests.lib.gpt.gpt import Case


def flags(
    case: Case, world: int, rank: int, ddp: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """The case on the command line of `estimate`."""
    options = {
        "--num-layers": case.num_layers,
        "--hidden-size": case.hidden,
        "--num-attention-heads": case.heads,
        "--ffn-hidden-size": case.ffn,
        "--padded-vocab-size": case.vocab,
        "--max-position-embeddings": case.seq,
        "--params-dtype": "bf16" if case.bf16 else "fp32",
        "--data-parallel-size": world,
        "--rank": rank,
    }
    tied = "--no-" if case.tied else "--"
    words = [str(word) for pair in options.items() for word in pair]
    for name, value in ddp.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [*words, f"{tied}untie-embeddings-and-output-weights", "--json"]


def estimated(
    case: Case, world: int, rank: int, ddp: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    with redirect_stdout(io.StringIO()) as said:
        assert estimate.main(flags(case, world, rank, ddp)) == 0
    return json.loads(said.getvalue())
