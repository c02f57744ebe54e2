"""What `plan --measure` makes of the times that it takes."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron_fsdp_adapter.cli.quantised_options import PLAIN, Quantisation
from megatron_fsdp_adapter.core.layout.format import PER_TENSOR
from megatron_fsdp_adapter.planning import measure, measure_layer
from megatron_fsdp_adapter.planning.machine import (
    H200,
    from_json,
    machine_named,
    operation_seconds,
    to_json,
)
from megatron_fsdp_adapter.planning.measure import factors, seconds_of, slowed_beside
from megatron_fsdp_adapter.planning.measure_layer import (
    Part,
    layer_shape,
    measure_parts,
    rate_inside,
    works_of,
)
from megatron_fsdp_adapter.planning.program import Kind
from megatron_fsdp_adapter.planning.shapes import Shape

pytestmark = pytest.mark.once

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("quantised", "kind", "rate"),
    [(PLAIN, Kind.PRODUCT, H200.product_tflops),
     (Quantisation(products=PER_TENSOR), Kind.FP8_PRODUCT, H200.fp8_product_tflops)],
)  # fmt: skip
def test_the_rate_inside_of_a_layer_is_that_which_gives_the_layers_time(quantised, kind, rate):
    works = works_of(layer_shape(), quantised)
    whole = sum(operation_seconds(one.kind, one.amount, H200, one.kernels) for one in works)
    assert rate_inside(whole, works, kind, H200) == pytest.approx(rate)
    assert rate_inside(1.1 * whole, works, kind, H200) < rate
    with pytest.raises(ValueError, match="all of it but"):
        rate_inside(0.1 * whole, works, kind, H200)


def test_factors_are_those_of_the_time_that_both_ran():
    assert factors([1.0, 1.0], [1.5, 1.5]) == (1.5, 1.5)
    first, second = factors([1.0, 1.0], [1.25, 2.0])  # 0.75 of the second ran alone
    assert first == 1.25 and second == pytest.approx(1.25 / 0.25)
    assert factors([1.0, 2.0], [1.0, 2.0]) == (1.0, 1.0)
    assert max(factors([1e-9, 1.0], [1.0, 1.0])) <= measure.MOST


def test_a_part_that_does_not_run_is_named_and_the_table_stays():
    def fails(gpu: Any, *_: Any) -> Any:
        raise RuntimeError("no such kernel")

    parts = [Part("one", lambda gpu, *_: replace(gpu, iteration=0.5)), Part("two", fails)]
    gpu, left = measure_parts(H200, CPU, seconds_of, parts)
    assert gpu == replace(H200, iteration=0.5)
    assert left == ["not measured: two: RuntimeError: no such kernel"]


class _Layer(nn.Linear):
    """Stands for Transformer Engine's, with its arguments."""

    def __init__(self, hidden: int, ffn: int, heads: int, **given: Any) -> None:
        assert given["num_gqa_groups"] and given["params_dtype"] is torch.bfloat16
        super().__init__(hidden, hidden, bias=False, dtype=torch.bfloat16)


TINY_GPT = {
    "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "vocab_size": 128,
}  # fmt: skip


def tiny_shape() -> Shape:
    return Shape("tiny", replace(layer_shape().gpt, **TINY_GPT), 32)


def test_a_library_that_cannot_be_loaded_is_named_too(monkeypatch):
    def load(name: str) -> None:
        raise OSError("undefined symbol")

    monkeypatch.setattr(measure_layer.importlib, "import_module", load)
    measure_layer.load_transformer_engine()
    part = Part("a layer", lambda *_: load("transformer_engine"))
    assert measure_parts(H200, CPU, seconds_of, [part])[1] == [
        "not measured: a layer: OSError: undefined symbol"
    ]


def test_a_layer_of_transformer_engine_is_run_forward_and_backward(monkeypatch):
    stub = ModuleType("transformer_engine.pytorch")
    stub.TransformerLayer = _Layer  # type: ignore[attr-defined]
    package = ModuleType("transformer_engine")
    package.pytorch = stub  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", stub)
    monkeypatch.setattr(measure_layer, "layer_shape", tiny_shape)
    runs = []

    def timed(run, device, times):
        runs.append(run())
        return 4 * 1.0

    found = measure_layer.in_bf16(H200, CPU, timed)
    assert len(runs) == 1 and 0 < found.product_tflops < H200.product_tflops


def test_attention_is_that_of_transformer_engine(monkeypatch):
    package, stub = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")

    class Attention:
        def __init__(self, heads: int, width: int, **given: Any) -> None:
            assert (heads, width, given["num_gqa_groups"]) == (4, 16, 2)

        def __call__(self, query, key, value):
            assert query.shape == (32, 1, 4, 16) and key.shape == value.shape == (32, 1, 2, 16)
            return (query * torch.cat([key + value] * 2, 2)).flatten(2)

    stub.DotProductAttention = Attention  # type: ignore[attr-defined]
    package.pytorch = stub  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", stub)
    monkeypatch.setattr(measure_layer, "layer_shape", tiny_shape)

    def timed(run, device, times):
        run()
        return 1.0

    found = measure_layer.of_attention(H200, CPU, timed)
    assert found.attention_tflops == pytest.approx(3.5 * 2 * 32 * 32 * 64 / 1e12)


def test_products_of_a_layer_are_run_forward_and_backward():
    products = measure.products_of_layer(CPU, measure.TINY)
    with FlopCounterMode(display=False) as counted:
        products()
    numel = 32 * (48 + 32 + 2 * 64 + 64)
    assert counted.get_total_flops() == 6 * 16 * numel


class _Event:
    """Of a clock that each launch moves on its own stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = _Stream.now.clock

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.at - self.at)


class _Stream:
    now: Any = None

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.clock = 0.0

    def __enter__(self) -> None:
        _Stream.now = self

    def __exit__(self, *_: Any) -> None:
        pass


def test_two_things_run_beside_each_other_as_often_as_both_take_as_long(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    alone = iter([0.001, 0.010])
    monkeypatch.setattr(measure, "seconds_of", lambda run, device, times: next(alone))
    launched = [0, 0]

    def launch(number: int, seconds: float):
        def run() -> None:
            launched[number] += 1
            _Stream.now.clock += seconds

        return run

    found = slowed_beside(launch(0, 0.0012), launch(1, 0.013), CPU, lambda value: value)
    assert launched == [100, 10]  # in two rounds
    assert found[0] == pytest.approx(1.2) and found[1] == pytest.approx(0.06 / 0.045)


def test_what_is_measured_is_read_back(tmp_path):
    machine = machine_named("h200")
    path = tmp_path / "machine.json"
    path.write_text(to_json(machine))
    assert from_json(str(path)) == machine
