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
    words = []
    for pair in options.items():
        words.extend(map(str, pair))
    for name, value in ddp.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    tied = "--no-" if case.tied else "--"
    words.append(f"{tied}untie-embeddings-and-output-weights")
    words.append("--json")
    return words


def estimated(
    case: Case, world: int, rank: int, ddp: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    with redirect_stdout(io.StringIO()) as said:
        status = estimate.main(flags(case, world, rank, ddp))
        assert status == 0
    return json.loads(said.getvalue())
