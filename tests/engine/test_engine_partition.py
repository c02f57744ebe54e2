"""From module trees to units and groups, and the flat buffers that groups live in."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from megatron_fsdp_adapter.core.engine.buffer import FlatBuffer, Held, items_in
from megatron_fsdp_adapter.core.engine.partition import (
    ROOT,
    managed_params,
    only_looks_up,
    partition,
    unit_modules,
)
from megatron_fsdp_adapter.core.layout.planner import plan_group
from megatron_fsdp_adapter.core.layout.ranges import FlatRange
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.engine.engine_cases import Setup, build
from tests.engine.pretended import pretended_world


class Block(nn.Module):
    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.inner = nn.ModuleList(children)


def plans_of(module: nn.Module, units: dict[str, nn.Module] | None = None, **options):
    units = unit_modules(module, lambda child: isinstance(child, Block)) if units is None else units
    plans = partition(module, units, domain_of=lambda param, name: "d", **options)
    return {
        plan.name: [list(entry.fqns) for managed in plan.groups.values() for entry in managed]
        for plan in plans
    }


def test_a_parameter_belongs_to_the_nearest_unit_above():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Block(nn.Linear(2, 2), Block()), Block())
    assert plans_of(model) == {
        "1": [["1.own"], ["1.inner.0.weight"], ["1.inner.0.bias"]],
        "1.inner.1": [["1.inner.1.own"]],
        "2": [["2.own"]],
        ROOT: [["0.weight"]],
    }


def test_the_root_unit_is_last_and_there_even_when_empty():
    assert list(plans_of(nn.Sequential(Block(), Block()))) == ["0", "1", ROOT]


def test_a_unit_without_parameters_of_its_own_is_no_unit():
    model = nn.Sequential(Block(Block()))
    del model[0].own
    model[0].register_parameter("own", None)
    assert list(plans_of(model)) == ["0.inner.0", ROOT]


def test_names_are_matched_by_component():
    """Unit "1" is not above "10.own"."""
    model = nn.Sequential(*[Block() if i in (1, 10) else nn.Identity() for i in range(11)])
    assert plans_of(model) == {"1": [["1.own"]], "10": [["10.own"]], ROOT: []}


def test_a_parameter_shared_inside_one_unit_stays_there():
    block = Block(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    block.inner[1].weight = block.inner[0].weight
    model = nn.Sequential(block)
    assert plans_of(model)["0"] == [["0.own"], ["0.inner.0.weight", "0.inner.1.weight"]]


def test_a_parameter_shared_between_units_goes_to_the_root():
    one, two = Block(nn.Linear(2, 2, bias=False)), Block(nn.Linear(2, 2, bias=False))
    two.inner[0].weight = one.inner[0].weight
    found = plans_of(nn.Sequential(one, two))
    assert found == {
        "0": [["0.own"]], "1": [["1.own"]],
        ROOT: [["0.inner.0.weight", "1.inner.0.weight"]],
    }  # fmt: skip


def test_a_module_held_twice_is_listed_once_with_both_names():
    block = Block()
    model = nn.ModuleDict({"a": block, "b": nn.ModuleDict({"c": block})})
    [entry] = managed_params(model)
    assert entry.fqns == ("a.own",)
    assert entry.slots == ((block, "own"),)


def test_groups_share_domain_dtype_and_requires_grad():
    model = nn.Sequential(Block(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[0].inner[0].weight.requires_grad_(False)
    model[0].inner[1].to(torch.bfloat16)
    plans = partition(
        model,
        {"0": model[0]},
        domain_of=lambda param, name: "other" if name.endswith("own") else "d",
    )
    found = {key: [e.fqns[0] for e in managed] for key, managed in plans[0].groups.items()}
    assert {(k.domain, k.dtype, k.requires_grad): v for k, v in found.items()} == {
        ("other", torch.float32, True): ["0.own"],
        ("d", torch.float32, False): ["0.inner.0.weight"],
        ("d", torch.float32, True): ["0.inner.0.bias"],
        ("d", torch.bfloat16, True): ["0.inner.1.weight", "0.inner.1.bias"],
    }


def test_a_model_without_trainable_parameters_is_refused():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match=r"Linear has no trainable parameter.*requires_grad"):
        partition(model, {}, domain_of=lambda param, name: "d")


def test_units_say_whether_their_backward_reads_weights():
    model = nn.Sequential(Block(), Block())
    plans = partition(
        model,
        {"0": model[0], "1": model[1]},
        domain_of=lambda param, name: "d",
        backward_reads_weights=lambda module: module is not model[0],
    )
    assert [plan.backward_reads_weights for plan in plans] == [False, True, True]


class _Own(nn.Embedding):
    pass


def _hooked() -> nn.Module:
    table = nn.Embedding(5, 3)
    table.register_forward_hook(lambda module, args, out: out @ module.weight.t())
    return table


def _with_forward() -> nn.Module:
    table = nn.Embedding(5, 3)
    table.forward = lambda rows: nn.functional.normalize(table.weight)[rows]  # type: ignore[method-assign]
    return table


def _with_more(more: nn.Module | nn.Parameter) -> nn.Module:
    table = nn.Embedding(5, 3)
    table.more = more
    return table


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Embedding(5, 3, padding_idx=1), True),
        (nn.Sequential(nn.Embedding(5, 3), nn.Dropout()), True),
        (_Own(5, 3), False),
        (weight_norm(nn.Embedding(5, 3)), False),
        (_hooked(), False),
        (_with_forward(), False),
        (_with_more(nn.Parameter(torch.ones(3))), False),
        (_with_more(nn.Linear(3, 3)), False),
        (nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3)), False),
    ],
)
def test_only_what_is_known_to_look_up_is_not_gathered_in_backward(module, expected):
    assert only_looks_up(module, {nn.Embedding, nn.Dropout, nn.Sequential}) is expected


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (3, 4, 5)])
def test_specs_cut_between_rows(shape):
    module = nn.Module()
    module.p = nn.Parameter(torch.ones(shape))
    spec = managed_params(module)[0].spec(0)
    assert spec.shape == shape and spec.granularity == torch.ones(shape or (1,))[0].numel()


# Flat buffers.


def test_views_survive_release_and_see_the_next_storage():
    buffer = FlatBuffer(10, torch.float32, HostRuntime())
    view = buffer.views([FlatRange(2, 5)])[0]
    pointer = view.untyped_storage()._cdata
    assert buffer.allocated and buffer.nbytes == 40 and not view.any()
    buffer.release()
    assert not buffer.allocated and buffer.nbytes == 40 and view.shape == (3,)
    buffer.release()
    buffer.allocate()
    buffer.tensor.copy_(torch.arange(10.0))
    buffer.allocate()
    assert view.tolist() == [2.0, 3.0, 4.0]
    assert view.untyped_storage()._cdata == pointer
    view.zero_()
    assert buffer.tensor[2:5].tolist() == [0.0, 0.0, 0.0]


def test_autograd_reads_the_storage_of_the_moment():
    """`F.linear` saves a view of its weight: releasing and refilling between forward and backward
    gives the refilled values."""
    buffer = FlatBuffer(6, torch.float32, HostRuntime())
    param = nn.Parameter(torch.empty(2, 3))
    param.data = buffer.tensor.view(2, 3)
    buffer.tensor.fill_(1.0)
    x = torch.ones(1, 3, requires_grad=True)
    loss = torch.nn.functional.linear(x, param).sum()
    buffer.release()
    buffer.allocate()
    buffer.tensor.fill_(5.0)
    loss.backward()
    assert x.grad.tolist() == [[10.0, 10.0, 10.0]]


def test_items_lie_where_the_layout_says():
    module = nn.Linear(5, 3)
    managed = managed_params(module)
    layout = plan_group([entry.spec(i) for i, entry in enumerate(managed)], 2)
    buffer = FlatBuffer(layout.total_numel, torch.float32, HostRuntime())
    whole = Held(layout.with_shards(1), 0)
    for index, item in enumerate(items_in(buffer, whole, whole)):
        item.fill_(index + 1.0)
        extent = layout.item_range(index)
        assert item.shape == managed[index].param.shape
        assert (buffer.tensor[extent.start : extent.stop] == index + 1.0).all()
    assert buffer.tensor.sum() == 15 + 2 * 3


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_ranks_together_hold_each_parameter_once(world, strategy):
    """Or each all of it, where nothing is sharded."""
    rows: dict[str, list[torch.Tensor]] = {}
    for rank in range(world):
        with pretended_world(world, rank):
            rig = build(Setup(strategy, world=world, rank=rank))
            began = rig.initial
            for name, value in rig.weights().items():
                rows.setdefault(name, []).append(value)
    assert began
    torch.manual_seed(0)
    with pretended_world(1):
        whole = build(Setup("no_shard", world=1)).weights()
    for name, expected in whole.items():
        if strategy == "no_shard":
            assert all(torch.equal(piece, expected) for piece in rows[name])
        else:
            assert torch.equal(torch.cat([p for p in rows[name] if p.numel()]), expected)
