"""Transformer Engine knows of what is captured, and only of that."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.graphs.capture import CudaGraphs
from megatron_fsdp_adapter.megatron.layers import layer_graphs as wrapper_graphs
from megatron_fsdp_adapter.megatron.layers.te_captures import (
    check_tracker,
    telling_te,
    telling_te_of_an_iteration,
)
from tests.lib.engine.fake_graphs import FakeGraphs, put_graphs_into
from tests.lib.gpt.gpt import Case, batches, build_trainer, forward_backward

CHECKS = ("megatron/layers/te_captures.py", "graphs/capture.py", "graphs/full_iteration.py")

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, seq=5, bf16=True)
CPU = torch.device("cpu")
PLAIN = SimpleNamespace(fp8=None, fp8_recipe="delayed")
"""The config of a model without FP8. Core's recipe is then what it is by default."""


class Flag:
    """Stands for `transformer_engine.pytorch.graph` of 2.20.2: two functions and what they set."""

    def __init__(self) -> None:
        self.is_on = False

    def set_capture_start(self) -> None:
        self.is_on = True

    def set_capture_end(self) -> None:
        self.is_on = False


class Tracker:
    """Stands for TE's own tracker of random numbers."""


class OtherTracker:
    """Stands for core's."""


@pytest.fixture
def flag(monkeypatch: pytest.MonkeyPatch) -> Flag:
    """Of a Transformer Engine that is imported."""
    made = Flag()
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.graph", made)
    tracker = SimpleNamespace(CudaRNGStatesTracker=Tracker)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", tracker)
    return made


def attention(tracker: Any) -> nn.Module:
    """A model whose attention has this tracker."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Identity())
    model[1].rng_states_tracker = tracker
    return model


def test_te_is_told_of_a_capture_until_it_ends_or_fails(flag: Flag) -> None:
    with telling_te():
        assert flag.is_on
    assert not flag.is_on
    with pytest.raises(ZeroDivisionError), telling_te():
        raise ZeroDivisionError
    assert not flag.is_on


def test_without_te_there_is_nobody_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("graph", "distributed"):
        monkeypatch.delitem(sys.modules, f"transformer_engine.pytorch.{name}", raising=False)
    with telling_te():
        check_tracker(attention(OtherTracker()))


def test_a_function_is_captured_in_the_context_that_is_given(flag: Flag) -> None:
    with mock.patch.multiple(
        torch.cuda,
        Stream=mock.MagicMock(),
        stream=mock.MagicMock(),
        CUDAGraph=mock.MagicMock(),
        current_stream=mock.MagicMock(),
    ):
        graphs = CudaGraphs(torch.device("cuda"), around=telling_te)
        _, is_on = graphs.capture(lambda: flag.is_on, "pool")
    assert is_on
    assert not flag.is_on


def test_graphs_of_layers_tell_te(one_rank: torch.device) -> None:
    trainer = build_trainer(CASE, "no_shard", CPU)
    with mock.patch.object(wrapper_graphs, "CudaGraphs") as made:
        made.return_value = FakeGraphs()
        put_graphs_into(trainer.wrapper, None)
    assert made.call_args.args[-1] is telling_te


def test_te_is_told_of_a_whole_iteration_from_its_first_forward_to_its_gradients(
    one_rank: torch.device, flag: Flag
) -> None:
    trainer = build_trainer(CASE, "no_shard", CPU)
    trainer.wrapper.captures._is_capturing = lambda: True
    seen = []
    trainer.wrapper.module.register_forward_hook(lambda *_: seen.append(flag.is_on))
    forward_backward(trainer, batches(CASE, 0, 0, CPU))
    assert seen == [True] * CASE.microbatches
    assert not flag.is_on


@pytest.mark.parametrize(
    ("config", "tracker", "is_told"),
    [
        (PLAIN, None, True),
        (PLAIN, Tracker(), True),
        (PLAIN, OtherTracker(), False),
        (SimpleNamespace(fp8="hybrid", fp8_recipe="delayed"), Tracker(), False),
        (SimpleNamespace(fp8="hybrid", fp8_recipe="tensorwise"), Tracker(), True),
    ],
)
def test_te_is_told_of_iterations_that_it_can_capture(
    flag: Flag, config: Any, tracker: Any, is_told: bool
) -> None:
    with telling_te_of_an_iteration(attention(tracker), config):
        assert flag.is_on is is_told
    assert not flag.is_on


def test_attention_with_another_tracker_is_an_error_that_says_what_to_set(flag: Flag) -> None:
    check_tracker(attention(Tracker()))
    check_tracker(attention(None))
    with pytest.raises(ValueError, match=r"has a OtherTracker\. Set use_te_rng_tracker=True"):
        check_tracker(attention(OtherTracker()))
