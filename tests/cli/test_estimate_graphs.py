"""The estimate of what CUDA graphs of layers take."""

from __future__ import annotations

import json

import pytest

from megatron_fsdp_adapter.cli.estimate import main

POOLED = [
    *("--preset", "llama3-8b", "--seq-length", "4096", "--data-parallel-size", "8", "--json"),
    *("--cuda-graph-impl", "local", "--fsdp-double-buffer"),
]

UNKNOWN_LENGTH = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--vocab-size", "128", "--position-embedding-type", "rope"),
]


def test_pools_of_graphs_of_layers_are_activations_of_layers_for_each_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--micro-batch-size", "2", "--passes-in-flight", "3", "--memory-gib", "80"]
    assert main([*POOLED, *more]) == 0
    found = json.loads(capsys.readouterr().out)["strategies"]
    assert set(found) == {"optim_grads", "optim_grads_params"}
    kept = 4 * 4096 + 2 * 4096 + 2 * 8 * 128 + 3 * 14336
    sharded = found["optim_grads_params"]
    assert sharded["pools"] == 3 * 2 * 4096 * 2 * 32 * kept
    assert not sharded["fits"] and sharded["peak"] < 80 * 2**30
    assert sharded["most_layers"] < 32


@pytest.mark.parametrize(
    ("left_out", "more", "told"),
    [
        (["--fsdp-double-buffer"], [], "give --fsdp-double-buffer"),
        (POOLED[:4], UNKNOWN_LENGTH, "need --seq-length"),
        ([], ["--data-parallel-sharding-strategy", "optim"], "use optim_grads or"),
        ([], ["--micro-batch-size", "0"], "at least 1"),
    ],
)
def test_what_graphs_of_layers_need_is_said(
    capsys: pytest.CaptureFixture[str], left_out: list[str], more: list[str], told: str
) -> None:
    assert main([one for one in POOLED if one not in left_out] + more) == 2
    assert told in capsys.readouterr().err
