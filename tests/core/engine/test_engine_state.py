"""Phases, guards, gradients, what is shown and kept, and what an exception leaves behind."""

from __future__ import annotations

import copy
import functools
import itertools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.grad_buffers import GradBuffers
from megatron_fsdp_adapter.core.engine.grad_states import GradState
from megatron_fsdp_adapter.core.engine.params import GatheredParameter, ReshardedParameter
from megatron_fsdp_adapter.core.engine.partition import UnitPlan
from megatron_fsdp_adapter.core.engine.step import Step
from megatron_fsdp_adapter.core.engine.unit import Phase, Unit
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, LOAD, storage_bytes
from megatron_fsdp_adapter.core.topology import DENSE, EXPERT
from tests.lib.engine import schedule
from tests.lib.engine.engine_cases import Rig, build, built, streamed_buffers
from tests.lib.engine.scenarios import BF16, INSTANCES, ZERO_1, ZERO_3
from tests.lib.engine.small_model import Loop, Setup

CHECKS = (
    "core/engine/unit.py",
    "core/engine/params.py",
    "core/engine/between_passes.py",
    "core/engine/group.py",
    "core/engine/grad_buffers.py",
    "core/engine/grad_states.py",
    "core/engine/weight_buffers.py",
    "core/engine/engine.py",
    "core/engine/step.py",
)

LEGAL = {
    ("SHARDED", "GATHERING"),
    ("GATHERING", "READY"),
    ("READY", "SHARDED"),
    ("GATHERING", "SHARDED"),
}


@pytest.mark.parametrize(("old", "new"), itertools.product(Phase, repeat=2))
def test_the_table_has_the_legal_transitions_only(old, new):
    unit = Unit(UnitPlan("decoder.layers.7", None), 7, [], STRATEGIES[ZERO_3])
    unit.phase = old
    refused = pytest.raises(RuntimeError, match=rf"layers\.7: {old.name} -> {new.name} is")
    legal = (old.name, new.name) in LEGAL
    with nullcontext() if legal else refused:
        unit.advance(new)
    assert unit.phase is (new if legal else old)


# Gradients.

GRAD_GROUPS = {
    "shards": Setup(),
    "one rank": Setup(split=True, whole=True),
    "replicas": Setup(outer=2, world=4),
    "split again": Setup(outer=2, world=4, shard_outer=True),
    "as FSDP2": Setup(main_params=None, as_fsdp2=True),
}
"""Groups, by what their gradients may do besides what those of all groups may."""

ALL_GROUPS = ("shards", "one rank", "replicas", "split again", "as FSDP2")

LEGAL_FOR_GRADS = {
    ("EMPTY", "EMPTY"): ALL_GROUPS,
    ("EMPTY", "ACCUMULATED"): ALL_GROUPS,
    ("EMPTY", "REDUCED"): ALL_GROUPS,
    ("ACCUMULATED", "EMPTY"): ALL_GROUPS,
    ("ACCUMULATED", "ACCUMULATED"): ALL_GROUPS,
    ("ACCUMULATED", "REDUCED"): ALL_GROUPS,
    ("REDUCED", "EMPTY"): ALL_GROUPS,
    ("REDUCED", "ACCUMULATED"): ("one rank", "as FSDP2"),
    ("REDUCED", "REDUCED"): ALL_GROUPS,
    ("REDUCED", "FINISHED"): ("replicas", "split again"),
    ("FINISHED", "EMPTY"): ALL_GROUPS,
    ("FINISHED", "REDUCED"): ("replicas",),
    ("FINISHED", "ACCUMULATED"): ("as FSDP2",),
}


@functools.cache
def grads_of(kind: str) -> GradBuffers:
    """Gradients of a group of this kind."""
    with built(GRAD_GROUPS[kind]) as rig:
        groups = rig.engine.groups
        return next(one for one in groups if one.is_single_rank == (kind == "one rank")).grads


@pytest.mark.parametrize(("old", "new"), itertools.product(GradState, repeat=2))
def test_the_table_has_the_legal_transitions_of_gradients_only(old, new):
    for kind in ALL_GROUPS:
        grads = grads_of(kind)
        grads.state = old
        refused = pytest.raises(
            RuntimeError, match=rf"gradients of \S+: {old.name} -> {new.name} is not a legal"
        )
        legal = kind in LEGAL_FOR_GRADS.get((old.name, new.name), ())
        with nullcontext() if legal else refused:
            grads.advance(new)
        assert grads.state is (new if legal else old)


# Guard.


def resharded(rig: Rig) -> nn.Parameter:
    """An unsharded parameter whose unit is SHARDED."""
    return next(
        pair.unsharded for pair in rig.engine.pairs if "layers.1.up.weight" in pair.managed.fqns
    )


def _add(p):
    return p + 1


def _matmul(p):
    return torch.ones(1, 7).to(p.dtype) @ p


def _a_function(p):
    return torch.nn.functional.linear(torch.ones(1, 6).to(p.dtype), p)


def _item(p):
    return p[0, 0].item()


def _data(p):
    return p.data


def _detach(p):
    return p.detach()


def _clone(p):
    return p.clone()


def _to(p):
    return p.to(torch.float64)


def _numpy(p):
    return p.detach().float().numpy()


def _in_place(p):
    return p.zero_()


def _iteration(p):
    return list(p)


def _assignment(p):
    return p.__setitem__(0, 1.0)


def _in_a_list(p):
    return torch.stack([p, p])


def _as_a_keyword(p):
    return torch.nn.functional.linear(input=torch.ones(1, 6, dtype=p.dtype), weight=p)


READS = {
    "add": _add,
    "matmul": _matmul,
    "a function": _a_function,
    "item": _item,
    "data": _data,
    "detach": _detach,
    "clone": _clone,
    "to": _to,
    "numpy": _numpy,
    "in place": _in_place,
    "iteration": _iteration,
    "assignment": _assignment,
    "in a list": _in_a_list,
    "as a keyword": _as_a_keyword,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("strategy", [ZERO_1, ZERO_3])
def test_reading_a_resharded_parameter_names_it(two_ranks, strategy, name):
    """With kept weights the values are there, but older than the main weights."""
    rig = build(Setup(strategy))
    rig.step(sync=False)
    message = r"parameter layers\.1\.up\.weight of unit layers\.1.*SHARDED"
    with pytest.raises(RuntimeError, match=message):
        READS[name](resharded(rig))


def _shape(p):
    return (tuple(p.shape), p.size(0), p.dim(), len(p))


def _memory(p):
    return (p.numel(), p.stride(), p.element_size())


def _kind(p):
    return (p.dtype, p.device.type, p.is_floating_point())


def _gradient(p):
    return (p.requires_grad, p.is_leaf, p.grad)


def _identity(p):
    return {p: 1}[p]


def _text(p):
    return "layers.1.up.weight" in repr(p)


def _class(p):
    return isinstance(p, nn.Parameter) and torch.is_tensor(p)


METADATA = {
    "shape": (_shape, ((7, 6), 7, 2, 7)),
    "memory": (_memory, (42, (6, 1), 2)),
    "kind": (_kind, (BF16, "cpu", True)),
    "gradient": (_gradient, (True, True, None)),
    "identity": (_identity, 1),
    "text": (_text, True),
    "class": (_class, True),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_a_resharded_parameter_can_be_read(two_ranks, name):
    read, expected = METADATA[name]
    assert read(resharded(build(Setup()))) == expected


def test_gathered_parameters_count_writes_and_call_no_python(two_ranks):
    """While a unit computes no function of Python's is called for its parameters, and afterwards
    they are guarded."""
    rig = build(Setup())
    layer = rig.model.layers[1]
    seen = []
    layer.up.register_forward_hook(lambda module, args, out: seen.append(type(module.weight)))
    rig.step()
    assert seen == [GatheredParameter]
    assert type(resharded(rig)) is ReshardedParameter
    assert seen[0].__torch_function__ is torch._C._disabled_torch_function_impl
    unit = next(u for u in rig.engine.units if u.name == "layers.1")
    rig.engine.to_unsharded()
    rig.engine.gather.unshard(unit)
    param = resharded(rig)
    assert type(param) is GatheredParameter
    assert torch.isfinite(layer.up.weight).all()
    with torch.no_grad():
        for write in (lambda: param.data.mul_(2), lambda: param.mul_(2), lambda: param[0].zero_()):
            write()
            assert unit.take_written() == [param._fsdp_label]
            assert unit.take_written() == []
    with pytest.raises(RuntimeError, match=r"layers.1.up.weight of unit layers.1.data was assig"):
        param.data = torch.ones_like(param)
    param.data = param.data  # what is there
    copied = copy.deepcopy(param)
    copied.data = torch.ones_like(param)
    assert copied.sum() == param.numel()
    assert param.sum() != param.numel()


def test_a_module_called_outside_its_unit_is_refused(two_ranks):
    """A child of a unit, which has no hooks of its own, sees resharded weights."""
    rig = build(Setup())
    rig.step()
    rig.engine.to_unsharded()
    with pytest.raises(RuntimeError, match="Call the module that owns it"):
        rig.model.layers[0].up(torch.ones(1, 6, dtype=torch.bfloat16))


# Gradient states.


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("no_shard", {}), (ZERO_1, {}), *((strategy, INSTANCES) for strategy in STRATEGIES)],
)
def test_a_backward_after_the_reduction_is_an_error(strategy, options):
    """Where gradients are kept, or reduced over an outer axis."""
    setup = Setup(strategy, **options)
    with built(setup) as rig:
        rig.zero()
        rig.forward_backward()
        with pytest.raises(RuntimeError, match=r"unit head.*no_sync.*set all gradients to None"):
            rig.loss().backward()
        rig.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_optimizer_has_gradients_from_the_end_of_backwards_to_their_zeroing(
    two_ranks, strategy
):
    rig = build(Setup(strategy))

    def expect_gradients(present: bool) -> None:
        for pair in rig.engine.pairs:
            assert pair.sharded.grad is (pair.grad if present else None)

    for _ in range(2):
        rig.forward_backward(2)
        rig.finish()
        expect_gradients(True)
        rig.finish()
        expect_gradients(True)
        rig.zero()
        expect_gradients(False)
        rig.zero()
        expect_gradients(False)


@pytest.mark.parametrize("strategy", [ZERO_1, ZERO_3])
def test_a_step_that_is_forgotten_inside_its_backward_is_not_ended_by_it(two_ranks, strategy):
    rig = build(Setup(strategy))
    rig.step()
    rig.zero()
    loss = rig.loss()
    last = rig.model.embedding.weight
    hook = last.register_post_accumulate_grad_hook(lambda param: rig.engine.zero_grads())
    loss.backward()
    hook.remove()
    assert rig.engine.step == Step()
    assert not rig.engine.has_grads
    rig.step()


def test_frozen_parameters_have_no_gradient_and_no_buffers_for_it(two_ranks):
    rig = build(Setup(frozen=True))
    rig.step()
    frozen = [pair for pair in rig.engine.pairs if not pair.unsharded.requires_grad]
    assert {pair.managed.fqns[0].split(".")[1] for pair in frozen} == {"1", "2"}
    for pair in frozen:
        assert pair.grad is None
        assert pair.sharded.grad is None
        assert not pair.sharded.requires_grad
        assert not hasattr(pair.group, "bucket")


# What is shown.


def test_the_tree_shows_one_identity_or_the_other(two_ranks):
    rig = build(Setup(tied=True))
    pair = next(p for p in rig.engine.pairs if len(p.managed.fqns) == 2)
    assert pair.managed.fqns == ("embedding.weight", "head.weight")
    seen = []
    rig.model.norm.register_forward_hook(
        lambda *_: seen.append((rig.model.embedding.weight, rig.model.head.weight))
    )
    assert rig.model.embedding.weight is rig.model.head.weight is pair.sharded
    rig.loss().backward()
    assert seen[0] == (pair.unsharded, pair.unsharded)
    rig.finish()
    assert rig.model.embedding.weight is rig.model.head.weight is pair.sharded


def test_nothing_transient_is_alive_behind_an_evaluation_and_between_steps(two_ranks):
    rig = build(Setup())

    def alive() -> set[str]:
        return {name.rpartition(".")[2] for name in rig.allocated()}

    rig.evaluate()
    assert alive() - {"grad"} == {"main"}
    for _ in range(2):
        rig.step(sync=False)
        assert alive() == {"main", "grad"}
    rig.zero()
    assert alive() == {"main"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_a_part_of_a_schedule_that_raises_the_next_step_is_like_any_other(
    two_ranks, strategy
):
    rig = build(Setup(strategy, scheduled=True))
    passes = schedule.Passes(rig, 0)
    passes.forward(0)
    passes.functions[1] = None  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        passes.forward(1)
    rig.zero()
    with rig.watch():
        rig.step()
        rig.zero()
        Loop.forward_backward(rig)


# Main weights in host memory, and those of domains of one rank.


def test_the_first_units_are_loaded_when_the_backwards_are_over(two_ranks):
    """Behind nothing that the backward does; they go when no step follows, or main weights are
    written."""
    rig = build(Setup(adam=True, offload=True))
    device = dict(streamed_buffers(rig))

    def loaded() -> set[str]:
        return {name.rsplit(".", 1)[0] for name, flat in device.items() if storage_bytes(flat)}

    with rig.watch():
        rig.step()
        for ends in (rig.zero, rig.load):
            rig.zero()
            rig.forward_backward()
            before = rig.runtime.record(COMPUTE)
            rig.finish()
            assert loaded() == {"embedding", "root"}
            assert rig.runtime.record(LOAD).clock[COMPUTE] < before.clock[COMPUTE] - 5
            ends()
            assert loaded() == set()


@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": torch.float32}, {"frozen": True}, {"main_params": torch.bfloat16},
     {"recipe": "current"}],
    ids=str,
)  # fmt: skip
def test_main_weights_that_are_compute_weights_or_quantized_stay_on_the_device(two_ranks, changes):
    for strategy in (ZERO_1, ZERO_3):
        for group in build(Setup(strategy, adam=True, offload=True, **changes)).engine.groups:
            stays = group.main.dtype == group.key.dtype or group.key.quantized is not None
            assert group.main.is_on_host == (group.key.requires_grad and not stays)


def test_main_weights_of_one_rank_in_the_compute_dtype_are_the_compute_weights(two_ranks):
    rig = build(Setup(split=True, whole=True, main_params=None))
    shared = {
        group.key.domain: group.main.buffer is group.weights.unsharded[0]
        for group in rig.engine.groups
    }
    assert shared == {DENSE: False, EXPERT: True}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_looking_for_gradients_that_are_not_finite_reads_each_buffer_once(two_ranks, strategy):
    """Off it costs nothing, and on the parameters are looked at in place of segments."""
    found = []
    for check_by in (None, "unit", "parameter"):
        rig = build(Setup(strategy, dtype=torch.float32, check_by=check_by))
        with mock.patch.object(torch, "_foreach_norm", wraps=torch._foreach_norm) as norms:
            rig.forward_backward(2)
        found.append(sum(len(call.args[0]) for call in norms.call_args_list))
    segments = 0
    for group in rig.engine.groups:
        segments += len(group.grads.bucket.segments(group.shards.full))
    assert found[:2] == [0, 2 * segments]
    assert found[2] > found[1]
