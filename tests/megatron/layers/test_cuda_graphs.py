"""State between the replays of a captured training step. Without a GPU the capture is a flag: what
is captured runs, and what a replay would find is looked at."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.transformer.enums import CudaGraphScope
from torch.autograd.graph import get_gradient_edge

from megatron_fsdp_adapter.core.engine.unit import Phase
from megatron_fsdp_adapter.graphs.full_iteration import FullIterationGraphs
from megatron_fsdp_adapter.megatron.compat import core_api
from megatron_fsdp_adapter.megatron.options import cuda_graphs, support
from tests.lib.engine.fake_graphs import has_accumulator
from tests.lib.gpt.checks import free_run
from tests.lib.gpt.gpt import STRATEGIES, Case, Trainer, batches, build_trainer, forward_backward

CHECKS = ("graphs/full_iteration.py", "megatron/options/cuda_graphs.py", "core/engine/unit.py")

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2)
CPU = torch.device("cpu")


def capture(trainer: Trainer, flag: Any, step: int) -> None:
    """As core does: gradients are forgotten outside, all microbatches and the end inside."""
    trainer.wrapper.zero_grad_buffer()
    flag.now = True
    forward_backward(trainer, batches(CASE, step, 0, CPU))
    flag.now = False


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_between_replays_nothing_is_gathered_and_no_gradient_is_bound_anew(
    one_rank: torch.device, strategy: str
) -> None:
    """What the training loop does around a replay, which itself runs no Python and gathers by
    itself. Evaluations may be captured, too. Not even an eager step that forgets gradients takes
    their storage: the next replay writes to the same addresses."""
    # What stands for `is_current_stream_capturing` of torch 2.11 and 2.13: a flag `now`.
    trainer = build_trainer(CASE, strategy, CPU)
    flag = SimpleNamespace(now=False)
    engine = trainer.wrapper.engine
    trainer.wrapper.captures = FullIterationGraphs(engine, lambda: flag.now)
    free_run(trainer, 0, 1, CPU)
    engine.quantization = mock.MagicMock()
    engine.quantization.is_pending.return_value = False
    capture(trainer, flag, 1)

    def gradients() -> list[tuple[int, int]]:
        grads = [pair.sharded.grad for pair in engine.pairs]
        for grad in grads:
            assert grad._local_tensor.untyped_storage().nbytes() > 0
        return [(id(grad), grad._local_tensor.data_ptr()) for grad in grads]

    # A replay runs no Python that could quantize weights.
    engine.quantization.quantize_at_once.assert_called()
    bound = gradients()
    for replay in range(8):
        trainer.optimizer.step()
        trainer.wrapper.start_param_sync()
        states = {(unit.phase, unit.stale) for unit in engine.units if unit.groups}
        assert states == {(Phase.SHARDED, True)}
        if replay % 2:
            flag.now = replay % 4 == 1
            with torch.no_grad():
                forward_backward(trainer, batches(CASE, 90 + replay, 0, CPU), forward_only=True)
            flag.now = False
        trainer.wrapper.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        for pair in engine.pairs:
            pair.sharded.grad._local_tensor.normal_()  # the replay
        assert gradients() == bound, f"replay {replay}"
    engine.zero_grads()
    for group in engine.groups:
        assert group.grads.main.allocated


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_node_that_accumulates_a_gradient_outlives_its_graph(
    one_rank: torch.device, strategy: str
) -> None:
    """Such a node works on the stream that was current when it was made. A wrapper that holds one
    from its construction would take a capture on another stream out of it."""
    trainer = build_trainer(CASE, strategy, CPU)
    engine = trainer.wrapper.engine
    weights = [pair.unsharded for pair in engine.pairs]
    for _ in range(2):
        engine.to_unsharded()
        engine.gather.unshard_all()
        assert not any(map(has_accumulator, weights))
        free_run(trainer, 0, 1, CPU)
    engine.to_unsharded()
    engine.gather.unshard_all()
    held = [get_gradient_edge(weight).node for weight in weights]  # this can tell
    assert len(held) == sum(map(has_accumulator, weights))


def model(impl: str, scope: Any, name: str = "cuda_graph_scope") -> Any:
    return SimpleNamespace(**{"cuda_graph_impl": impl, name: scope})


FULL = [CudaGraphScope.full_iteration]


@pytest.mark.parametrize(
    ("config", "captures"),
    [
        (model("local", FULL), "iterations"),
        (model("local", "full_iteration"), "iterations"),
        (model("full_iteration", None), "iterations"),
        (model("local", []), "layers"),
        (model("local", [CudaGraphScope.attn]), "layers"),
        (model("local", ["mlp"], "cuda_graph_modules"), "layers"),
        (model("transformer_engine", [CudaGraphScope.attn]), "refused"),
        (model("none", None), ""),
        (SimpleNamespace(), ""),
    ],
)
def test_whole_iterations_are_told_from_other_captures(config: Any, captures: str) -> None:
    assert cuda_graphs.captures_iteration(config) is (captures == "iterations")
    assert cuda_graphs.captures_layers(config) is (captures == "layers")
    (rule,) = [rule for rule in support.MODEL_CONFIG_RULES if rule.option == "cuda_graph_impl"]
    assert rule.broken(config) is (captures == "refused")


def test_whether_core_asks_for_the_number_of_tokens_is_read_off_its_function() -> None:
    source = inspect.getsource(finalize_model_grads)
    assert core_api.asks_tokens_on_the_host() is ("if num_tokens > 0" in source)
    assert core_api.asks_tokens_on_the_host() is ("torch.clamp(num_tokens" not in source)
