"""Phases, guards, gradient states, and what an exception leaves behind."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.group import GradState
from megatron_fsdp_adapter.core.engine.guard import GatheredParameter, ReshardedParameter
from megatron_fsdp_adapter.core.engine.partition import UnitPlan
from megatron_fsdp_adapter.core.engine.unit import TRANSITIONS, Phase, Unit
from tests.engine.engine_cases import Exploded, Rig, Setup, build, microbatch
from tests.engine.pretended import pretended_world

ZERO_1, ZERO_2, ZERO_3 = "optim", "optim_grads", "optim_grads_params"
LEGAL = {
    ("SHARDED", "GATHERING"),
    ("GATHERING", "READY"),
    ("READY", "SHARDED"),
    ("GATHERING", "SHARDED"),
}


@pytest.fixture
def world():
    with pretended_world(2):
        yield


@pytest.mark.parametrize(("old", "new"), list(itertools.product(Phase, repeat=2)))
def test_transitions(old, new):
    unit = Unit(UnitPlan("decoder.layers.7", None), 7, [], STRATEGIES["optim_grads_params"])
    unit.phase = old
    if (old.name, new.name) in LEGAL:
        unit.advance(new)
        assert unit.phase is new
    else:
        with pytest.raises(RuntimeError, match=rf"decoder\.layers\.7: {old.name} -> {new.name} is"):
            unit.advance(new)
        assert unit.phase is old


def test_the_table_has_the_legal_transitions_only():
    assert {(old.name, new.name) for old, new in TRANSITIONS} == LEGAL


# Guard.


def resharded(rig: Rig) -> nn.Parameter:
    """An unsharded parameter whose unit is SHARDED."""
    return next(
        pair.unsharded for pair in rig.engine.pairs if "layers.1.up.weight" in pair.managed.fqns
    )


READS = {
    "add": lambda p: p + 1,
    "matmul": lambda p: torch.ones(1, 7).to(p.dtype) @ p,
    "a function": lambda p: torch.nn.functional.linear(torch.ones(1, 6).to(p.dtype), p),
    "item": lambda p: p[0, 0].item(),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.float64),
    "numpy": lambda p: p.detach().float().numpy(),
    "in place": lambda p: p.zero_(),
    "iteration": lambda p: list(p),
    "assignment": lambda p: p.__setitem__(0, 1.0),
    "in a list": lambda p: torch.stack([p, p]),
    "as a keyword": lambda p: torch.nn.functional.linear(
        input=torch.ones(1, 6, dtype=p.dtype), weight=p
    ),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("strategy", [ZERO_1, ZERO_3])
def test_reading_a_resharded_parameter_names_it(world, strategy, read):
    """With kept weights the values are there, but older than the main weights."""
    rig = build(Setup(strategy))
    rig.step(sync=False)
    message = r"parameter layers\.1\.up\.weight of unit layers\.1.*SHARDED"
    with pytest.raises(RuntimeError, match=message):
        READS[read](resharded(rig))


def test_metadata_of_a_resharded_parameter_can_be_read(world):
    rig = build(Setup())
    param = resharded(rig)
    assert isinstance(param, ReshardedParameter)
    assert tuple(param.shape) == (7, 6) and param.numel() == 42 and param.dim() == 2
    assert param.dtype == torch.bfloat16 and param.device.type == "cpu" and param.requires_grad
    assert param.grad is None and param.is_leaf and param.size(0) == 7 and param.stride() == (6, 1)
    assert param.element_size() == 2 and param.is_floating_point() and len(param) == 7
    assert {param: 1}[param] == 1
    assert "layers.1.up.weight" in repr(param)
    assert isinstance(param, nn.Parameter) and torch.is_tensor(param)


def test_gathered_parameters_count_writes_and_call_no_python(world):
    """While a unit computes no function of Python's is called for its parameters, and afterwards
    they are guarded."""
    rig = build(Setup())
    layer = rig.model.layers[1]
    seen = []
    layer.up.register_forward_hook(lambda module, args, out: seen.append(type(module.weight)))
    rig.step()
    assert seen == [GatheredParameter] and isinstance(layer.up.weight, nn.Parameter)
    assert seen[0].__torch_function__ is torch._C._disabled_torch_function_impl
    assert type(resharded(rig)) is ReshardedParameter
    unit = next(u for u in rig.engine.units if u.name == "layers.1")
    rig.engine.to_unsharded()
    rig.engine.gather.need(unit)
    param = resharded(rig)
    assert type(param) is GatheredParameter and torch.isfinite(layer.up.weight).all()
    with torch.no_grad():
        for write in (lambda: param.data.mul_(2), lambda: param.mul_(2), lambda: param[0].zero_()):
            write()
            assert unit.take_written() == [param._fsdp_label] and unit.take_written() == []
    with pytest.raises(RuntimeError, match=r"layers.1.up.weight of unit layers.1.data was assig"):
        param.data = torch.ones_like(param)
    param.data = param.data  # what is there
    copied = copy.deepcopy(param)
    copied.data = torch.ones_like(param)
    assert copied.sum() == param.numel() and param.sum() != param.numel()


def test_a_module_called_outside_its_unit_is_refused(world):
    """A child of a unit, which has no hooks of its own, sees resharded weights."""
    rig = build(Setup())
    rig.step()
    rig.engine.to_unsharded()
    with pytest.raises(RuntimeError, match="call the module that owns it"):
        rig.model.layers[0].up(torch.ones(1, 6, dtype=torch.bfloat16))


# Gradient states.


@pytest.mark.parametrize("strategy", ["no_shard", ZERO_1])
def test_a_backward_after_the_reduction_is_an_error(world, strategy):
    rig = build(Setup(strategy))
    rig.zero()
    rig.forward_backward()
    with pytest.raises(RuntimeError, match=r"unit head.*no_sync.*clear the gradients"):
        rig.loss().backward()
    rig.step()


@pytest.mark.parametrize("strategy", [ZERO_2, ZERO_3])
def test_sharded_gradients_take_any_number_of_backwards(world, strategy):
    rig = build(Setup(strategy))
    rig.zero()
    rig.forward_backward()
    rig.forward_backward()
    rig.finish()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_states_of_gradients_over_a_step(world, strategy):
    rig = build(Setup(strategy))
    sharded = STRATEGIES[strategy].shard_grads

    def states() -> set[GradState]:
        return {group.grad_state for group in rig.engine.groups}

    rig.zero()
    assert states() == {GradState.EMPTY}
    rig.last(False)
    rig.loss().backward()
    assert states() == {GradState.REDUCED if sharded else GradState.ACCUMULATED}
    rig.last(True)
    rig.loss().backward()
    assert states() == {GradState.REDUCED}
    rig.finish()
    rig.finish()
    assert states() == {GradState.REDUCED}
    assert all(pair.sharded.grad is pair.grad for pair in rig.engine.pairs)
    rig.zero()
    rig.zero()
    assert states() == {GradState.EMPTY}
    assert all(pair.sharded.grad is None for pair in rig.engine.pairs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_that_no_backward_reached_have_gradients_of_zero(world, strategy):
    rig = build(Setup(strategy))
    rig.model.path = [0, 2]
    rig.zero()
    rig.forward_backward()
    rig.finish()
    for pair in rig.engine.pairs:
        grad = pair.sharded.grad._local_tensor  # type: ignore[union-attr]
        unused = pair.managed.fqns[0].startswith(("layers.1.", "layers.3."))
        assert grad.isfinite().all()
        if unused:
            assert not grad.any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_without_any_backward_are_zero(world, strategy):
    rig = build(Setup(strategy))
    rig.zero()
    rig.finish()
    for pair in rig.engine.pairs:
        assert not pair.sharded.grad._local_tensor.any()  # type: ignore[union-attr]


def test_frozen_parameters_have_no_gradient_and_no_buffers_for_it(world):
    rig = build(Setup(frozen=True))
    rig.step()
    frozen = [pair for pair in rig.engine.pairs if not pair.unsharded.requires_grad]
    assert {pair.managed.fqns[0].split(".")[1] for pair in frozen} == {"1", "2"}
    for pair in frozen:
        assert pair.grad is None and pair.sharded.grad is None
        assert not pair.sharded.requires_grad and not hasattr(pair.group, "bucket")


# Exceptions.


def assert_at_rest(rig: Rig) -> None:
    assert all(unit.phase is Phase.SHARDED for unit in rig.engine.units)
    assert not any(w.allocated for group in rig.engine.groups for w in group.weights)
    assert not any(group.bucket.allocated or group.grad.allocated for group in rig.engine.groups)
    assert all(pair.unsharded.grad is None for pair in rig.engine.pairs)


@pytest.mark.parametrize("where", ["forward 0", "forward 3", "backward 0", "backward 3"])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non_reentrant"])
def test_zeroing_after_an_exception_leaves_nothing(world, where, recompute):
    rig = build(Setup(ZERO_3, recompute=recompute))
    with rig.watch():
        rig.step(sync=False)
        rig.zero()
        rig.model.explode = where
        with pytest.raises(Exploded):
            rig.loss().backward()
        rig.model.explode = None
        rig.zero()
        assert_at_rest(rig)
        rig.step(sync=False)
        rig.zero()
        assert_at_rest(rig)


def test_an_exception_in_the_first_step_of_all(world):
    rig = build(Setup(ZERO_3))
    with rig.watch():
        rig.model.explode = "backward 2"
        rig.zero()
        with pytest.raises(Exploded):
            rig.loss().backward()
        rig.model.explode = None
        rig.step()


def test_a_forward_recovers_even_without_zeroing(world):
    """The evaluation that follows a failed step, before anything is zeroed."""
    rig = build(Setup(ZERO_3))
    with rig.watch():
        expected = rig.evaluate()
        rig.zero()
        rig.model.explode = "backward 1"
        with pytest.raises(Exploded):
            rig.loss().backward()
        rig.model.explode = None
        assert torch.equal(rig.evaluate(), expected)


# What is shown.


def test_the_tree_shows_one_identity_or_the_other(world):
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


def test_raw_parameters_are_views_of_one_storage_for_life(world):
    """Also of the same address: backward reads what forward saved."""
    rig = build(Setup())
    storages = [pair.unsharded.untyped_storage()._cdata for pair in rig.engine.pairs]
    offsets = [pair.unsharded.storage_offset() for pair in rig.engine.pairs]
    rig.step()
    rig.evaluate()
    assert [pair.unsharded.untyped_storage()._cdata for pair in rig.engine.pairs] == storages
    assert [pair.unsharded.storage_offset() for pair in rig.engine.pairs] == offsets


def test_a_forward_that_no_gradient_leaves_reshards_everything(world):
    rig = build(Setup())
    with torch.no_grad():
        rig.model(microbatch(0))
    assert not any(w.allocated for group in rig.engine.groups for w in group.weights)
