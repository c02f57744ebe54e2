"""The estimate of quantized weights: against a plan made by hand, and the numbers of Llama-3 8B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_adapter.cli.estimate import main, plan_model
from megatron_fsdp_adapter.cli.gpt import (
    PRESETS,
    GptConfig,
    config_from,
    gpt_parameter_listing,
)
from megatron_fsdp_adapter.cli.quantized_options import PLAIN, RECIPES, Quantization, quantization
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.layout import ParamSpec, plan_group, row_granularity
from megatron_fsdp_adapter.core.layout.format import MXFP8, PER_TENSOR, WeightFormat
from megatron_fsdp_adapter.diagnostics.memory import Precision

GIB = 2**30
ZERO_3 = STRATEGIES["optim_grads_params"]
FORMATS = RECIPES["fp8"]
LINEAR_8B = 6_979_321_856
"""Elements of the weights of matrix products in the 32 layers of Llama-3 8B."""


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Of Llama-3 8B under ZeRO-3, by kind, with "between_steps" and "peak"."""
    given = ["--preset", "llama3-8b", "--json", *words]
    assert main([*given, "--data-parallel-sharding-strategy", "optim_grads_params"]) == 0
    found = json.loads(capsys.readouterr().out)["strategies"]["optim_grads_params"]
    return {**found["bytes"], "between_steps": found["between_steps"], "peak": found["peak"]}


def flags(recipe: str) -> list[str]:
    return [f"--fp8-recipe={recipe}", "--fp8-param-gather"]


# Llama-3 8B. What is kept in float32 and the shard of bytes, in GiB, by data-parallel size. What
# serves forward and backward alike is cast at every gather, and no shard of it is kept.
KEPT = {
    "bf16": {2: (44.88, 0), 4: (22.44, 0), 8: (11.22, 0), 64: (1.40, 0)},
    "tensorwise": {2: (44.88, 0), 4: (22.44, 0), 8: (11.22, 0), 64: (1.40, 0)},
    "blockwise": {2: (44.92, 0), 4: (22.46, 0), 8: (11.31, 0), 64: (1.40, 0)},
    "mxfp8": {2: (44.92, 6.71), 4: (22.62, 3.38), 8: (11.31, 1.69), 64: (1.40, 0.21)},
}


@pytest.mark.parametrize("recipe", KEPT)
def test_what_a_rank_keeps_of_llama(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for size, (floats, shard) in KEPT[recipe].items():
        words = [] if recipe == "bf16" else flags(recipe)
        found = report(capsys, "--data-parallel-size", str(size), *words)
        kept = found["main weights"] + found["optimizer state"]
        assert kept / GIB == pytest.approx(floats, abs=0.012), size
        assert found.get("quantized shard", 0) / GIB == pytest.approx(shard, abs=0.012), size
        assert found["between_steps"] == kept + found.get("quantized shard", 0)


@pytest.mark.parametrize(
    ("recipe", "layer"), (("tensorwise", 208), ("blockwise", 208), ("mxfp8", 430))
)
def test_what_a_layer_of_llama_takes_while_it_is_used(
    recipe: str, layer: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """MiB of all planes."""
    model = plan_model(
        config_from(PRESETS["llama3-8b"]), 2, torch.bfloat16,
        quantized=Quantization(weights=FORMATS[recipe]),
    )  # fmt: skip
    (layers,) = [kind for kind in model.kinds if len(kind.names) == 32]
    (quantized,) = [one for one in layers.layouts if one.format.quantized]
    gathered = quantized.format.nbytes(quantized.total_numel)
    assert round(gathered / 2**20) == layer
    # Less of one layer in the slots that hold the two largest units: the embedding is larger.
    words = ["--fsdp-double-buffer", "--data-parallel-size=2", *flags(recipe)]
    assert report(capsys, *words)["weight slots"] > 2 * gathered
    transposes = report(capsys, "--data-parallel-size=2", *flags(recipe)).get("transposes", 0)
    assert transposes == (0 if recipe == "mxfp8" else gathered)


@pytest.mark.parametrize(
    ("words", "per_element"),
    (
        (["--fp8-format=hybrid", "--fp8-recipe=tensorwise"], 2),
        (["--fp8-format=hybrid"], 2),
        (["--fp8-format=hybrid", "--fp8-recipe=mxfp8"], 2 * 33 / 32),
        (["--fp4-format=e2m1"], 2 * 9 / 16),
        (["--fp8-format=hybrid", "--fp8-param-gather"], 0),
        ([], 0),
    ),
)
def test_autograd_keeps_quantized_copies_of_weights_that_are_not(
    words: list[str], per_element: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """13 GiB of Llama-3 8B, whatever the number of ranks; of one layer where layers run again."""
    again = "--recompute-granularity=full"
    for size in ("2", "8"):
        for more, layers in (([], 1), ([again], 32)):
            found = report(capsys, "--data-parallel-size", size, *words, *more)
            kept = found.get("quantized copies of weights", 0)
            assert kept == LINEAR_8B * per_element / layers
            assert found["peak"] >= found["between_steps"] + kept


def test_weights_in_fp8_take_less_at_the_peak_than_fp8_products_of_bf16_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the copies, less transposes of one layer."""
    words = ["--data-parallel-size=2", "--fp8-format=hybrid"]
    bf16, fp8 = report(capsys, *words), report(capsys, *words, "--fp8-param-gather")
    saved = bf16["peak"] - fp8["peak"]
    assert 12 * GIB < saved < 13 * GIB


SIZES = st.sampled_from((128, 256, 384))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)), st.sampled_from(sorted(STRATEGIES)), st.integers(1, 9), SIZES,
    SIZES, st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_bytes_are_those_of_every_unit_planned_by_itself(
    recipe: str, strategy: str, shards: int, hidden: int, ffn: int, tied: bool, bias: bool,
    recomputes: bool,
) -> None:  # fmt: skip
    """Persistent kinds and the gradient shard, by arithmetic on layouts and planes."""
    form, row = FORMATS[recipe], STRATEGIES[strategy]
    config = GptConfig(
        num_layers=3, hidden_size=hidden, num_attention_heads=2, ffn_hidden_size=ffn,
        vocab_size=300, position_embedding_type="none", add_bias_linear=bias,
        untie_embeddings_and_output_weights=not tied,
    )  # fmt: skip
    quantized = Quantization(weights=form, recomputes=recomputes)
    model = plan_model(config, shards, torch.bfloat16, quantized=quantized)
    rank = model.fullest_rank
    held = model.bytes_held(row, Precision(), rank)
    expected: dict[str, int] = {}
    gathers = row.shard_weights and shards > 1
    for layout in _planned(config, shards, form):
        total, shard = layout.total_numel, layout.shard_numel
        planes = layout.format.planes
        whole = sum(total // p.elements * p.dtype.itemsize for p in planes)
        mine = sum(shard // p.elements * p.dtype.itemsize for p in planes)
        own = sum(layout.shard_range(i, rank).numel for i in range(len(layout.specs)))
        parts = {
            "compute weights": 0 if gathers else whole,
            "quantized shard": mine if gathers and form is MXFP8 and layout.format is MXFP8 else 0,
            "main weights": 4 * (shard if row.shard_main else total),
            "optimizer state": 8 * (own if row.shard_main else layout.item_numel),
            "main gradients": 0 if row.shard_grads else 4 * total,
            "gradient shard": 4 * shard if row.shard_grads else 0,
        }
        for kind, count in parts.items():
            expected[kind] = expected.get(kind, 0) + count
        if layout.format.quantized:
            assert mine * shards == whole
    assert {kind: held.get(kind, 0) for kind in expected} == expected


def _planned(config: GptConfig, shards: int, form: WeightFormat) -> list[Any]:
    groups: dict[tuple[str, bool], list[ParamSpec]] = {}
    for unit, fqn, shape in gpt_parameter_listing(config):
        quantized = "layers" in fqn and "linear" in fqn and fqn.endswith("weight")
        group = groups.setdefault((unit, quantized), [])
        granule = form.granularity(shape) if quantized else row_granularity(shape)
        group.append(
            ParamSpec(len(group), (fqn,), shape, torch.bfloat16, True, granule,
                      form if quantized else None)
        )  # fmt: skip
    return [plan_group(specs, shards) for specs in groups.values()]


# Options.


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        ({}, PLAIN),
        ({"fp8_recipe": "mxfp8"}, PLAIN),
        ({"fp8_param_gather": True}, Quantization(weights=PER_TENSOR)),
        ({"fp8": "hybrid", "fp8_param": True, "fp8_recipe": "mxfp8"}, Quantization(weights=MXFP8)),
        ({"fp8_format": "e4m3", "recompute_granularity": "full"},
         Quantization(products=PER_TENSOR, recomputes=True)),
    ),
)  # fmt: skip
def test_what_options_mean(options: dict[str, Any], expected: Quantization) -> None:
    """Megatron's flags, and the fields that its configs have."""
    assert quantization(options, "bf16") == expected


def test_a_file_may_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("bf16: true\nfp8-format: hybrid\nfp8-recipe: mxfp8\nfp8-param-gather: true\n")
    words = ["--preset=llama3-8b", f"--config={path}", "--padded-vocab-size=128256"]
    assert main([*words, "--data-parallel-size=2"]) == 0
    text = capsys.readouterr().out
    assert "linear weights as mxfp8" in text.splitlines()[0]
    assert "decoder.layers.0 .. decoder.layers.31, mxfp8" in text and "quantized shard" in text


@pytest.mark.parametrize(
    ("words", "said"),
    (
        (["--fp8-recipe=fast", "--fp8-param-gather"], "--fp8-recipe 'fast' is unknown"),
        (["--fp8-param-gather", "--params-dtype=fp32"], "use --params-dtype bf16"),
        (["--fp8-param-gather", "--fp4-format=e2m1"], "FP8 and FP4 are both asked for"),
        (["--fp8-param-gather", "--fp8-recipe=mxfp8", "--ffn-hidden-size=144"],
         "mlp.linear_fc1.weight as mxfp8"),
    ),
)  # fmt: skip
def test_bad_options_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--num-layers=1", "--hidden-size=128", "--num-attention-heads=2", "--vocab-size=128"]
    assert main([*model, "--position-embedding-type=none", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_layers_that_stay_bf16_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--first-last-layers-bf16"):
        quantization({"fp8_param_gather": True, "first_last_layers_bf16": True}, "bf16")


@pytest.mark.parametrize("option", ("fp4_param", "fp4_param_gather"))
def test_weights_in_nvfp4_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')}: .* leave it out"):
        quantization({option: True}, "bf16")
