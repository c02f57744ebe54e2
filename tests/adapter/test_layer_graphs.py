"""CUDA graphs of layers on the host: what is captured is noted, operator by operator, and replayed
on the same memory (`tests/engine/fake_graphs.py`). Trained beside the same model without them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fsdp_adapter.core.engine.unit import Phase
from megatron_fsdp_adapter.graphs.layer_graphs import _Call
from megatron_fsdp_adapter.megatron import layer_graphs as wrapper_graphs
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from megatron_fsdp_adapter.megatron.layer_graphs import layer_graphs, take_off_managers
from megatron_fsdp_adapter.megatron.options import cuda_graphs
from tests.distributed.checks import check_same_bits
from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    full_weights,
    train_step,
)
from tests.engine.fake_graphs import Asked, FakeGraphs, put_graphs_into

CASE = Case(num_layers=3, hidden=12, heads=2, ffn=20, vocab=23, seq=5, microbatches=2, bf16=True)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SLOTS = {"fsdp_double_buffer": True}
ZERO_3 = "optim_grads_params"


def graphed(case: Case, strategy: str = ZERO_3, *parts: str) -> tuple[Trainer, FakeGraphs]:
    trainer, fake = build_trainer(case, strategy, CPU, ddp=SLOTS), FakeGraphs()
    put_graphs_into(trainer.wrapper, fake, *parts)
    return trainer, fake


def numbers(trainer: Trainer, steps: int) -> Any:
    """Losses and norms of steps, losses of evaluations between, and the weights at the end."""
    found: list[Any] = []
    for step in range(steps):
        found.append(train_step(trainer, batches(trainer.case, step, 0, CPU)))
        if step % 2 == 0:
            data = batches(trainer.case, 90 + step, 0, CPU)
            with torch.no_grad():
                found.append(forward_backward(trainer, data, forward_only=True))
    return found, full_weights(trainer)


def check_trains_alike(case: Case, strategy: str, parts: tuple[str, ...]) -> FakeGraphs:
    plain = build_trainer(case, strategy, CPU, ddp=SLOTS)
    trainer, fake = graphed(case, strategy, *parts)
    expected, weights = numbers(plain, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that something runs eagerly
        found, mine = numbers(trainer, 4)
    assert found == expected
    check_same_bits(mine, weights, strategy)
    assert fake.captures == 2 * case.num_layers * max(1, len(parts))
    return fake


@pytest.mark.parametrize("parts", [(), ("attn", "mlp")])
@pytest.mark.parametrize("strategy", ["optim_grads", ZERO_3])
def test_replays_train_to_the_bits_of_eager_steps(
    one_rank: torch.device, strategy: str, parts: tuple[str, ...]
) -> None:
    fake = check_trains_alike(CASE, strategy, parts)
    assert len(fake.replays) == 3 * CASE.microbatches * fake.captures


@pytest.mark.parametrize(
    "change",
    [
        {"fused": True},
        {"recompute": "selective-mlp", "bias": False},
        {"tied": True, "swiglu": True},
    ],
    ids=str,
)
def test_other_models_replay_to_the_same_bits(
    one_rank: torch.device, change: dict[str, Any]
) -> None:
    patches.install(FUSED_WGRAD)
    try:
        check_trains_alike(CASE.but(num_layers=2, **change), ZERO_3, ())
    finally:
        patches.uninstall(FUSED_WGRAD)


def test_another_length_trains_eagerly_to_the_same_bits_and_is_said_once(
    one_rank: torch.device,
) -> None:
    """In front of, between and behind passes of the length that was captured, in one step too."""
    plain, (trainer, fake) = build_trainer(CASE, ZERO_3, CPU, ddp=SLOTS), graphed(CASE)
    replays, found = [], []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step, lengths in enumerate(((5, 3), (5, 5), (3, 3), (5, 3), (3, 5), (5, 7))):
            for one in (plain, trainer):
                data = [batches(CASE.but(seq=n), step, 0, CPU)[i] for i, n in enumerate(lengths)]
                found.append((step, train_step(one, data)))
            replays.append(len(fake.replays))
    assert found[::2] == found[1::2]
    check_same_bits(full_weights(trainer), full_weights(plain), "lengths")
    assert fake.captures == 2 * CASE.num_layers
    a_pass = 2 * CASE.num_layers
    assert replays == [0, 2 * a_pass, 2 * a_pass, 3 * a_pass, 4 * a_pass, 5 * a_pass]
    lines = [str(one.message) for one in said if "without its CUDA graph" in str(one.message)]
    assert len(lines) == 1, lines  # once, whatever lengths come
    assert "3x2x12" in lines[0] and len(trainer.wrapper._layers.ran_eagerly) == 1


def test_tables_that_a_graph_reads_live_on_when_their_module_replaces_them(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = graphed(CASE)
    layers = [module for module in trainer.wrapper.modules() if type(module) is TransformerLayer]
    table = layers[0].mlp.table = torch.ones(3)
    gathered = torch.ones(5)
    monkeypatch.setitem(get_global_memory_buffer().buffer, ("of a test", torch.bfloat16), gathered)
    for step in range(2):
        train_step(trainer, batches(CASE, step, 0, CPU))
    layers[0].mlp.table = torch.ones(7)
    held = trainer.wrapper._layers._read_by_graphs.values()
    assert any(one is table for one in held) and any(one is gathered for one in held)


def test_a_replay_runs_no_python_of_its_layer_and_finds_its_weights_in_their_place(
    one_rank: torch.device,
) -> None:
    """Weights are gathered when a graph begins, and addresses are those of the capture."""
    trainer, fake = graphed(CASE)
    engine = trainer.wrapper.engine
    calls: list[str] = []
    layers = [module for module in trainer.wrapper.modules() if type(module) is TransformerLayer]
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *unused: calls.append("MLP"))
    ready: list[set[str]] = []
    fake.around = lambda: ready.append(
        {unit.name for unit in engine.units if unit.phase is Phase.READY}
    )
    train_step(trainer, batches(CASE, 0, 0, CPU))
    assert len(calls) == CASE.num_layers * CASE.microbatches and not ready
    train_step(trainer, batches(CASE, 1, 0, CPU))
    recorded = len(calls) - CASE.num_layers * CASE.microbatches
    assert recorded == CASE.num_layers
    places = [full.tensor.data_ptr() for group in engine.groups for full in group.weights]
    train_step(trainer, batches(CASE, 2, 0, CPU))
    assert len(calls) == CASE.num_layers * CASE.microbatches + recorded
    assert [f.tensor.data_ptr() for g in engine.groups for f in g.weights] == places
    in_order = [f"layers.{i}" for i in (*range(CASE.num_layers), *range(CASE.num_layers)[::-1])]
    pass_of_layers = ready[-2 * CASE.num_layers :]
    assert all(
        any(wanted in name for name in names)
        for wanted, names in zip(in_order, pass_of_layers, strict=True)
    )


def test_gathers_and_reductions_are_launched_outside_of_graphs(one_rank: torch.device) -> None:
    trainer, fake = graphed(CASE)
    engine, events = trainer.wrapper.engine, []

    def watched(kind: str, method: Any) -> Any:
        return lambda *given: (events.append((kind, fake.running)), method(*given))[1]

    engine.gather.launch = watched("gather", engine.gather.launch)
    engine.reduce.backward_done = watched("reduce", engine.reduce.backward_done)
    for step in range(3):
        train_step(trainer, batches(CASE, step, 0, CPU))
    assert {kind for kind, _ in events} == {"gather", "reduce"}
    assert not any(running for _, running in events)
    assert len(fake.replays) == 2 * CASE.microbatches * fake.captures


def _in_flight(trainer: Trainer, steps: list[tuple[int, ...]]) -> list[Any]:
    """Losses and norms of steps as in a pipeline: all forwards, of sequences of these lengths, then
    their backwards, in the order of the forwards."""
    found: list[Any] = []
    for step, lengths in enumerate(steps):
        trainer.wrapper.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        data = [batches(CASE.but(seq=n, microbatches=9), step, 0, CPU)[i]
                for i, n in enumerate(lengths)]  # fmt: skip
        outputs = [
            trainer.wrapper(
                tokens[:, :-1], torch.arange(n).expand(CASE.batch, -1),
                torch.ones(n, n, dtype=torch.bool).triu(1)[None, None], labels=tokens[:, 1:],
            ).float().mean()
            for tokens, n in zip(data, lengths, strict=True)
        ]  # fmt: skip
        with trainer.wrapper.no_sync():
            for output in outputs[:-1]:
                output.backward()
        outputs[-1].backward()
        trainer.wrapper.finish_grad_sync()
        found += [output.item() for output in outputs]
        found.append(float(trainer.optimizer.step()[1]))
    return found


def test_passes_in_flight_have_pools_of_their_own_and_each_pool_keeps_its_order(
    one_rank: torch.device,
) -> None:
    plain = build_trainer(CASE, ZERO_3, CPU, ddp=SLOTS)
    (trainer, fake), steps = graphed(CASE), [(5, 5)] * 3
    assert _in_flight(trainer, steps) == _in_flight(plain, steps)
    assert fake.pools == 2
    for pool in (1, 2):
        order = [number for where, number in fake.replays if where == pool]
        once = list(range(1, 2 * CASE.num_layers + 1))
        assert order == once * 2, pool


def test_nothing_is_captured_while_a_pass_of_another_length_is_in_flight(
    one_rank: torch.device,
) -> None:
    """On a GPU its nodes that accumulate gradients would bring their stream into the capture."""
    plain = build_trainer(CASE, ZERO_3, CPU, ddp=SLOTS)
    (trainer, fake), captures = graphed(CASE), []
    capture = fake.capture
    fake.capture = lambda function, pool: (captures.append(pool), capture(function, pool))[1]
    steps = [(5, 5), (5, 3), (5, 3, 5), (5, 5, 3), (3, 5, 5)]
    found, counts = [], []
    for step in steps:
        found += _in_flight(trainer, [step])
        counts.append(len(captures))
    expected = [one for step in steps for one in _in_flight(plain, [step])]
    assert found == expected
    a_pass = 2 * CASE.num_layers
    assert counts == [0, a_pass, a_pass, 2 * a_pass, 2 * a_pass] and set(captures) == {1, 2}


def test_gradients_that_leave_the_graphs_are_not_overwritten_by_the_next_pass(
    one_rank: torch.device,
) -> None:
    """A pipeline may still be sending them."""
    trainer, _ = graphed(CASE)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    model = trainer.wrapper.module.module
    embedding = next(m for name, m in model.named_modules() if name.endswith("embedding"))
    embedding.register_forward_hook(
        lambda module, given, out: out.register_hook(lambda g: kept.append((g, g.clone()))) and None
    )
    for step in range(3):
        train_step(trainer, batches(CASE, step, 0, CPU))
    assert len(kept) == 3 * CASE.microbatches
    assert all(torch.equal(grad, then) for grad, then in kept)


def test_what_does_not_fit_runs_eagerly_and_is_said_once(one_rank: torch.device) -> None:
    trainer, fake = graphed(CASE)
    for step in range(2):
        train_step(trainer, batches(CASE, step, 0, CPU))
    replays = len(fake.replays)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), pytest.warns(
        UserWarning, match="without its CUDA graph: hooks are on what autograd saves"
    ) as said:
        train_step(trainer, batches(CASE, 2, 0, CPU))
    assert sum("without its CUDA graph" in str(one.message) for one in said) == CASE.num_layers
    assert len(fake.replays) == replays


def test_random_states_that_graphs_cannot_use_are_an_error_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = SimpleNamespace(get_states=lambda: {"one": torch.Generator()})
    monkeypatch.setattr(wrapper_graphs, "get_cuda_rng_tracker", lambda: tracker)
    assert len(wrapper_graphs._generators()) == 1
    tracker.get_states = lambda: {"one": torch.Generator(), "model-parallel-rng": torch.zeros(16)}
    with pytest.raises(RuntimeError, match="states model-parallel-rng.*--te-rng-tracker"):
        wrapper_graphs._generators()


def _printed(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("CUDA graphs of layers")]


def test_what_was_captured_is_printed_once_with_the_memory_of_its_pools(
    one_rank: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, _ = graphed(CASE)
    _in_flight(trainer, [(5, 5)] * 2)
    assert _printed(capsys.readouterr().out) == []  # more may be captured
    _in_flight(trainer, [(5, 5)] * 3)
    (line,) = _printed(capsys.readouterr().out)
    assert "3 TransformerLayer, 6 calls captured" in line
    assert "for each pass in flight: 0.500 + 1.000; eager: embedding, output layer" in line
    trainer, _ = graphed(CASE, ZERO_3, "attn")
    _in_flight(trainer, [(5, 3)] * 3)
    (line,) = _printed(capsys.readouterr().out)
    assert "3 SelfAttention, 3 calls" in line
    assert "all but the captured parts of 3 layers, as no other parts were asked for" in line
    assert "self_attention: inputs have other shapes" in line


def test_a_capture_begins_behind_what_was_launched_and_the_next_launch_comes_behind_it() -> None:
    """It writes seeds and offsets, to memory that may have been an index of the embedding."""
    from megatron_fsdp_adapter.graphs.capture import CudaGraphs

    told, current = mock.MagicMock(), mock.MagicMock()
    told.attach_mock(current, "current")
    with mock.patch.multiple(
        torch.cuda, Stream=told.stream_made, stream=told.entered, CUDAGraph=told.graph_made,
        current_stream=lambda: current,
    ):
        graphs = CudaGraphs(CUDA, lambda: [told.generator])
        side, graph = told.stream_made.return_value, told.graph_made.return_value
        assert graphs.capture(lambda: "found", told.pool) == (graph.replay, "found")
    order = [call[0] for call in told.mock_calls]
    first = order.index("stream_made().wait_stream")
    began = order.index("graph_made().capture_begin")
    ended = order.index("graph_made().capture_end")
    assert first < began < ended < order.index("current.wait_stream")
    side.wait_stream.assert_called_once_with(current)
    current.wait_stream.assert_called_once_with(side)


def test_a_step_that_was_given_up_leaves_no_half_of_a_recording(one_rank: torch.device) -> None:
    plain = build_trainer(CASE, ZERO_3, CPU, ddp=SLOTS)
    trainer, fake = graphed(CASE)
    for one in (plain, trainer):
        train_step(one, batches(CASE, 0, 0, CPU))
        one.wrapper.zero_grad_buffer()
        tokens = batches(CASE, 9, 0, CPU)[0]
        one.wrapper(  # and no backward
            tokens[:, :-1], torch.arange(CASE.seq).expand(CASE.batch, -1), None,
            labels=tokens[:, 1:],
        )  # fmt: skip
    assert fake.captures == CASE.num_layers
    for step in (1, 2):
        data = batches(CASE, step, 0, CPU)
        assert train_step(trainer, data) == train_step(plain, data)
    assert fake.captures == 3 * CASE.num_layers


def test_memory_with_addresses_in_a_graph_is_not_given_away(one_rank: torch.device) -> None:
    trainer, _ = graphed(CASE)
    for step in range(2):
        train_step(trainer, batches(CASE, step, 0, CPU))
    with pytest.raises(RuntimeError, match="a CUDA graph of a layer"):
        trainer.wrapper.offload_grad_buffers()


def test_buffers_without_a_fixed_place_cannot_be_captured(one_rank: torch.device) -> None:
    for strategy, ddp in ((ZERO_3, {}), ("optim", SLOTS)):
        trainer = build_trainer(CASE, strategy, CPU, ddp=ddp)
        with pytest.raises(ValueError, match="fsdp_double_buffer"):
            put_graphs_into(trainer.wrapper, FakeGraphs())


def test_core_s_own_managers_are_taken_off(one_rank: torch.device) -> None:
    trainer = build_trainer(CASE, ZERO_3, CPU, ddp=SLOTS)
    layer = next(m for m in trainer.wrapper.modules() if type(m) is TransformerLayer)
    layer.cudagraph_manager = torch.nn.Identity()
    take_off_managers(trainer.wrapper)
    assert not hasattr(layer, "cudagraph_manager")
    assert layer_graphs(trainer.wrapper.engine, trainer.wrapper, object()) is None


def model(**fields: Any) -> Any:
    return SimpleNamespace(**{"cuda_graph_impl": "local", "cuda_graph_scope": [], **fields})


def test_whole_iterations_and_layers_are_told_apart() -> None:
    layers = [model(), model(cuda_graph_scope=["attn"]), model(cuda_graph_modules=["mlp"])]
    others = [
        model(cuda_graph_impl="none"), model(cuda_graph_impl="transformer_engine"),
        model(cuda_graph_impl="full_iteration"), model(cuda_graph_scope=["full_iteration"]),
        SimpleNamespace(),
    ]  # fmt: skip
    assert all(cuda_graphs.captures_layers(one) for one in layers)
    assert not any(cuda_graphs.captures_layers(one) for one in others)
    assert Asked("attn").cuda_graph_scope == ["attn"]


def test_a_second_derivative_through_a_replay_is_an_error() -> None:
    """It would lack what the weights and inputs of the layer add to it."""
    x = torch.ones(3, requires_grad=True)
    call = SimpleNamespace(
        needs=[True], site=SimpleNamespace(name="layers.0"),
        replay=lambda given: [given[0].detach() ** 2],
        backward=lambda grads: [2 * x.detach() * grads[0]],
    )  # fmt: skip
    graphs, of = SimpleNamespace(backward_done=lambda of: None), SimpleNamespace(records=False)
    (y,) = _Call.apply(graphs, of, call, torch.ones(0, requires_grad=True), x)
    [first] = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(first, 2 * x)
    with pytest.raises(RuntimeError, match="create_graph=True.*layers.0.*cuda_graph_impl='none'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
