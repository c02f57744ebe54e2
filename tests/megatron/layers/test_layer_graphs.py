"""CUDA graphs of layers on the host: what is captured is noted, operator by operator, and replayed
on the same memory (`tests/lib/engine/fake_graphs.py`). Trained beside the same model without
them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fsdp_adapter.build import building
from megatron_fsdp_adapter.build.building import has_one_rank
from megatron_fsdp_adapter.core.engine.unit import Phase
from megatron_fsdp_adapter.graphs.capture import CudaGraphs
from megatron_fsdp_adapter.graphs.layer_graphs import _Call
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from megatron_fsdp_adapter.megatron.layers import layer_graphs as wrapper_graphs
from megatron_fsdp_adapter.megatron.layers.layer_graphs import layer_graphs, take_off_managers
from megatron_fsdp_adapter.plan.unit_grouping import UNIT_NUMEL
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from megatron_fsdp_adapter.plan.unsharded_budget import GIB
from tests.lib.engine.fake_graphs import FakeGraphs, put_graphs_into
from tests.lib.gpt.checks import check_same_bits
from tests.lib.gpt.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    full_weights,
    train_step,
)

CHECKS = (
    "megatron/layers/layer_graphs.py",
    "graphs/layer_graphs.py",
    "graphs/captured.py",
    "graphs/capture.py",
    "graphs/sites.py",
)

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, seq=5, microbatches=2, bf16=True)
A_PASS = 2 * CASE.num_layers
"""Graphs of a microbatch: the forward and the backward of each layer."""
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SLOTS = {"fsdp_double_buffer": True}
ZERO_3 = "optim_grads_params"


def eager(case: Case = CASE, strategy: str = ZERO_3, ddp: Mapping[str, Any] = SLOTS) -> Trainer:
    return build_trainer(case, strategy, CPU, ddp=ddp)


def graphed(
    case: Case = CASE,
    strategy: str = ZERO_3,
    parts: tuple[str, ...] = (),
    ddp: Mapping[str, Any] = SLOTS,
) -> tuple[Trainer, FakeGraphs]:
    trainer = eager(case, strategy, ddp)
    fake = FakeGraphs()
    put_graphs_into(trainer.wrapper, fake, *parts)
    return trainer, fake


def data(step: int, *lengths: int) -> list[torch.Tensor]:
    """A step's sequences, of these lengths if any are given."""
    many = CASE.but(microbatches=9)
    return [batches(many.but(seq=n), step, 0, CPU)[i] for i, n in enumerate(lengths)] or batches(
        CASE, step, 0, CPU
    )


def numbers(trainer: Trainer) -> Any:
    """Losses and norms of three steps, the first of which is eager, losses of evaluations between,
    and the weights at the end."""
    found: list[Any] = []
    for step in range(3):
        found.append(train_step(trainer, batches(trainer.case, step, 0, CPU)))
        with torch.no_grad():
            given = batches(trainer.case, 90 + step, 0, CPU)
            found.append(forward_backward(trainer, given, forward_only=True))
    return found, full_weights(trainer)


class Model(NamedTuple):
    """A strategy; changes of the case; the captured parts; fields of the DDP config. whole: the
    rank is the only one, so that nothing is sharded."""

    strategy: str = ZERO_3
    change: Mapping[str, Any] = MappingProxyType({})
    parts: tuple[str, ...] = ()
    ddp: Mapping[str, Any] = MappingProxyType(SLOTS)
    whole: bool = False


FUSED = {"fused": True}
MODELS = {
    "layers": Model(),
    "layers, ZeRO-2": Model("optim_grads"),
    "attention and MLP": Model(parts=("attn", "mlp")),
    "fused": Model(change=FUSED),
    "recomputed": Model(change={"recompute": "selective-mlp", "bias": False}),
    "tied": Model(change={"tied": True, "swiglu": True}),
    # Gradients that stay over the microbatches of a step, which graphs add to.
    "kept gradients": Model("optim", {"microbatches": 3}, ddp={}),
    "kept gradients, fused": Model("no_shard", FUSED, ddp={}),
    "kept gradients, one microbatch": Model("optim", {**FUSED, "microbatches": 1}, ddp={}),
    "kept gradients, parts": Model("optim", {"tied": True}, ("attn", "mlp"), {}),
    "joined": Model(ddp={**SLOTS, UNIT_NUMEL: 5000}),
    "joined and kept, fused": Model("optim", FUSED, ddp={UNIT_NUMEL: 5000}),
    "some units kept, fused": Model(change=FUSED, ddp={**SLOTS, BUDGET: 3e3 / GIB}),
    "all units kept": Model(ddp={**SLOTS, BUDGET: 1.0}),
    "alone": Model(change={"microbatches": 3}, ddp={}, whole=True),
    "alone, fused": Model("optim_grads", FUSED, ddp={}, whole=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_replays_train_to_the_bits_of_eager_steps(one_rank: torch.device, name: str) -> None:
    row = MODELS[name]
    case = CASE.but(**row.change)
    patches.install(FUSED_WGRAD)
    is_alone = mock.patch.object(building, "has_one_rank", has_one_rank)
    try:
        with is_alone if row.whole else nullcontext():
            trainer, fake = graphed(case, row.strategy, row.parts, row.ddp)
            plain = eager(case, row.strategy, row.ddp)
        expected, weights = numbers(plain)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # that something runs eagerly
            found, mine = numbers(trainer)
    finally:
        patches.uninstall(FUSED_WGRAD)
    assert found == expected
    check_same_bits(mine, weights, name)
    assert fake.captures == A_PASS * max(1, len(row.parts))
    assert len(fake.replays) == 2 * case.microbatches * fake.captures


# What is around replays: a run of an eager step, one with captures, and one of replays alone.


@pytest.fixture(scope="module")
def run(one_rank: torch.device) -> Iterator[Any]:
    """Trainer and graphs after it, and what was noted meanwhile."""
    trainer, fake = graphed()
    engine = trainer.wrapper.engine
    model = trainer.wrapper.module.module
    seen = SimpleNamespace(
        trainer=trainer, fake=fake, mlps=[], ready=[], places=[], launched=[], left=[]
    )
    layers = [module for module in trainer.wrapper.modules() if type(module) is TransformerLayer]
    seen.table = layers[0].mlp.table = torch.ones(3)
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *unused: seen.mlps.append(len(seen.places)))

    def note_ready() -> None:
        ready = {unit.name for unit in engine.units if unit.phase is Phase.READY}
        seen.ready.append(ready)

    fake.around = note_ready

    def watched(kind: str, method: Any) -> Any:
        def watching(*given: Any, **options: Any) -> Any:
            seen.launched.append((kind, fake.running))
            return method(*given, **options)

        return watching

    engine.gather.start_gather = watched("gather", engine.gather.start_gather)
    engine.reduce.backward_done = watched("reduce", engine.reduce.backward_done)

    def note_left(grad: torch.Tensor) -> None:
        seen.left.append((grad, grad.clone()))

    def watch_output(module: Any, given: Any, out: torch.Tensor) -> None:
        out.register_hook(note_left)

    embedding = next(m for name, m in model.named_modules() if name.endswith("embedding"))
    embedding.register_forward_hook(watch_output)
    seen.gathered = torch.ones(5)
    buffer = get_global_memory_buffer().buffer
    with mock.patch.dict(buffer, {("of a test", torch.bfloat16): seen.gathered}):
        for step in range(3):
            train_step(trainer, data(step))
            seen.places.append(
                [f.tensor.data_ptr() for g in engine.groups for f in g.weights.unsharded]
            )
    layers[0].mlp.table = torch.ones(7)
    yield seen


def test_a_replay_runs_no_python_of_its_layer_and_finds_its_weights_in_their_place(
    run: Any,
) -> None:
    """Weights are gathered when a graph begins, and addresses are those of the capture."""
    eager_calls = CASE.num_layers * CASE.microbatches
    assert run.mlps == [0] * eager_calls + [1] * CASE.num_layers  # the captured microbatch's
    assert run.places[1] == run.places[2]
    assert len(run.ready) == len(run.fake.replays) == 2 * CASE.microbatches * A_PASS
    layers = [f"layers.{i}" for i in range(CASE.num_layers)]
    in_order = [*layers, *layers[::-1]]
    for wanted, names in zip(in_order, run.ready[-A_PASS:], strict=True):
        assert any(wanted in name for name in names)


def test_gathers_and_reductions_are_launched_outside_of_graphs(run: Any) -> None:
    assert {kind for kind, _ in run.launched} == {"gather", "reduce"}
    for _, running in run.launched:
        assert not running


def test_tables_that_a_graph_reads_live_on_when_their_module_replaces_them(run: Any) -> None:
    held = run.trainer.wrapper._layers._read_by_graphs
    assert {id(run.table), id(run.gathered)} <= held.keys()


def test_gradients_that_leave_the_graphs_are_not_overwritten_by_the_next_pass(run: Any) -> None:
    """A pipeline may still be sending them."""
    assert len(run.left) == 3 * CASE.microbatches
    for grad, then in run.left:
        assert torch.equal(grad, then)


def test_memory_with_addresses_in_a_graph_is_not_given_away(run: Any) -> None:
    with pytest.raises(RuntimeError, match="a CUDA graph of a layer"):
        run.trainer.wrapper.offload_grad_buffers()


def test_what_does_not_fit_runs_eagerly_and_is_said_once(run: Any) -> None:
    replays = len(run.fake.replays)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        pytest.warns(
            UserWarning, match="without its CUDA graph: saved-tensor hooks are active"
        ) as said,
    ):
        train_step(run.trainer, data(3))
    assert sum("without its CUDA graph" in str(one.message) for one in said) == CASE.num_layers
    assert len(run.fake.replays) == replays


# Several passes in flight, as in a pipeline, and sequences of other lengths.


def in_turn(trainer: Trainer, step: int, lengths: tuple[int, ...]) -> Any:
    """Loss and norm of a step whose passes come one after the other."""
    return train_step(trainer, data(step, *lengths))


def in_flight(trainer: Trainer, step: int, lengths: tuple[int, ...]) -> Any:
    """Losses and norm of a step as in a pipeline: all forwards, then their backwards, in the order
    of the forwards."""
    trainer.wrapper.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    outputs = []
    for tokens, n in zip(data(step, *lengths), lengths, strict=True):
        positions = torch.arange(n).expand(CASE.batch, -1)
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)[None, None]
        losses = trainer.wrapper(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        outputs.append(losses.float().mean())
    with trainer.wrapper.no_sync():
        for output in outputs[:-1]:
            output.backward()
    outputs[-1].backward()
    trainer.wrapper.finish_grad_sync()
    return [output.item() for output in outputs], float(trainer.optimizer.step()[1])


class Passes(NamedTuple):
    """`lengths` of the sequences of each step; `pools` that there are after it; how many passes are
    `replayed`, the first use of each pool too; `reasons` why others are not; what is `printed`."""

    take: Callable[[Trainer, int, tuple[int, ...]], Any]
    lengths: tuple[tuple[int, ...], ...]
    pools: list[int]
    replayed: int
    reasons: int
    printed: str
    parts: tuple[str, ...] = ()


PASSES = {
    "in turn": Passes(
        in_turn, ((5, 3), (5, 5), (5, 7), (3, 5)), [0, 1, 1, 1], 4, 1,
        "2 TransformerLayer, 2 calls captured.*layers.0 ran eagerly: inputs have other shapes",
    ),
    "parts": Passes(
        in_turn, ((5, 3), (5, 3), (5, 3)), [0, 1, 1], 2, 1,
        "2 SelfAttention, 2 calls.*self_attention ran eagerly: inputs have other", ("attn",),
    ),
    "in flight": Passes(
        in_flight, ((5, 5), (5, 5), (5, 5)), [0, 2, 2], 4, 0,
        r"2 TransformerLayer, 4 calls captured.* for each pass in flight: 0.500 \+ 1.000$",
    ),
    # On a GPU nodes that accumulate gradients would bring their stream into a capture that comes
    # behind a pass of another length in flight.
    "in flight, another length": Passes(
        in_flight, ((5, 5), (5, 3), (5, 3, 5), (5, 5, 3), (3, 5, 5)), [0, 1, 1, 2, 2], 6, 2,
        "inputs have other shapes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_passes_in_flight_have_pools_of_their_own_and_other_lengths_run_eagerly(
    one_rank: torch.device, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each pool keeps its order. What runs eagerly is logged once, and printed with what was
    captured when nothing more is."""
    row = PASSES[name]
    plain = eager()
    trainer, fake = graphed(parts=row.parts)
    pools = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step, lengths in enumerate(row.lengths):
            found = row.take(trainer, step, lengths)
            expected = row.take(plain, step, lengths)
            assert found == expected, step
            pools.append(fake.captures / A_PASS)
    check_same_bits(full_weights(trainer), full_weights(plain), name)
    assert pools == row.pools
    assert len(fake.replays) == row.replayed * A_PASS
    for pool in range(1, fake.pools + 1):
        order = [number for where, number in fake.replays if where == pool]
        assert order == list(range(1, A_PASS + 1)) * (len(order) // A_PASS), pool
    reasons = [one for one in said if "without its CUDA graph" in str(one.message)]
    assert len(reasons) == row.reasons
    printed = capsys.readouterr().out.splitlines()
    (line,) = [one for one in printed if one.startswith("CUDA graphs")]
    assert re.search(row.printed, line), line


def test_graphs_are_made_again_where_a_step_has_several_microbatches_at_last(
    one_rank: torch.device,
) -> None:
    """With one they overwrite kept gradients; afterwards they add."""
    lengths = ((5,), (5,), (5,), (5, 5, 5), (5, 5), (5,))
    case = CASE.but(**FUSED)
    patches.install(FUSED_WGRAD)
    try:
        plain = eager(case, "optim", {})
        trainer, fake = graphed(case, "optim", ddp={})
        zeroed = []
        for step, one in enumerate(lengths):
            assert in_turn(trainer, step, one) == in_turn(plain, step, one), step
            zeroed.append(trainer.wrapper._layers._adds)
    finally:
        patches.uninstall(FUSED_WGRAD)
    assert zeroed == [False, False, False, True, True, True]
    assert fake.captures == 2 * A_PASS
    assert fake.pools == 2
    check_same_bits(full_weights(trainer), full_weights(plain), "weights")


def test_a_step_that_was_given_up_leaves_no_half_of_a_recording(one_rank: torch.device) -> None:
    plain = eager()
    (trainer, fake) = graphed()
    for one in (plain, trainer):
        train_step(one, data(0))
        one.wrapper.zero_grad_buffer()
        tokens = data(9)[0]
        positions = torch.arange(CASE.seq).expand(CASE.batch, -1)
        one.wrapper(tokens[:, :-1], positions, None, labels=tokens[:, 1:])  # and no backward
    assert fake.captures == CASE.num_layers
    for step in (1, 2):
        assert train_step(trainer, data(step)) == train_step(plain, data(step))
    assert fake.captures == CASE.num_layers + A_PASS


def test_buffers_without_a_fixed_place_cannot_be_captured(one_rank: torch.device) -> None:
    for strategy in (ZERO_3, "optim_grads"):
        trainer = eager(strategy=strategy, ddp={})
        with pytest.raises(ValueError, match="fsdp_double_buffer"):
            put_graphs_into(trainer.wrapper, FakeGraphs())


def test_core_s_own_managers_are_taken_off(one_rank: torch.device) -> None:
    wrapper = eager().wrapper
    layer = next(m for m in wrapper.modules() if type(m) is TransformerLayer)
    layer.cudagraph_manager = torch.nn.Identity()
    take_off_managers(wrapper)
    assert not hasattr(layer, "cudagraph_manager")
    assert layer_graphs(wrapper.engine, wrapper, object()) is None


def test_random_states_that_graphs_cannot_use_are_an_error_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = SimpleNamespace(get_states=lambda: {"one": torch.Generator()})
    monkeypatch.setattr(wrapper_graphs, "get_cuda_rng_tracker", lambda: tracker)
    assert len(wrapper_graphs._generators()) == 1
    tracker.get_states = lambda: {"one": torch.Generator(), "model-parallel-rng": torch.zeros(16)}
    with pytest.raises(RuntimeError, match="states model-parallel-rng.*--te-rng-tracker"):
        wrapper_graphs._generators()


def test_a_capture_begins_behind_what_was_launched_and_the_next_launch_comes_behind_it() -> None:
    """It writes seeds and offsets, to memory that may have been an index of the embedding."""
    told, current = mock.MagicMock(), mock.MagicMock()
    told.attach_mock(current, "current")
    with mock.patch.multiple(
        torch.cuda,
        Stream=told.stream_made,
        stream=told.entered,
        CUDAGraph=told.graph_made,
        current_stream=lambda: current,
    ):
        graphs = CudaGraphs(CUDA, lambda: [told.generator])
        side = told.stream_made.return_value
        graph = told.graph_made.return_value
        assert graphs.capture(lambda: "found", told.pool) == (graph.replay, "found")
    order = [call[0] for call in told.mock_calls]
    first = order.index("stream_made().wait_stream")
    began = order.index("graph_made().capture_begin")
    ended = order.index("graph_made().capture_end")
    assert first < began < ended < order.index("current.wait_stream")
    side.wait_stream.assert_called_once_with(current)
    current.wait_stream.assert_called_once_with(side)


def test_a_second_derivative_through_a_replay_is_an_error() -> None:
    """It would lack what the weights and inputs of the layer add to it."""
    x = torch.ones(3, requires_grad=True)
    call = SimpleNamespace(
        needs=[True],
        site=SimpleNamespace(name="layers.0"),
        replay=lambda given: [given[0].detach() ** 2],
        backward=lambda grads: [2 * x.detach() * grads[0]],
    )
    graphs = SimpleNamespace(backward_done=lambda of: None)
    of = SimpleNamespace(records=False)
    (y,) = _Call.apply(graphs, of, call, torch.ones(0, requires_grad=True), x)
    [first] = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(first, 2 * x)
    with pytest.raises(RuntimeError, match="create_graph=True.*layers.0.*cuda_graph_impl='none'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
