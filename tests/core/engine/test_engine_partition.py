"""From module trees to units and groups, and what ranks hold of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from megatron_fsdp_adapter.core.engine.partition import (
    ROOT,
    GroupKey,
    managed_params,
    only_looks_up,
    partition,
    unit_modules,
)
from megatron_fsdp_adapter.core.layout.format import PER_TENSOR

CHECKS = ("core/engine/partition.py",)


class Block(nn.Module):
    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.inner = nn.ModuleList(children)


def plans_of(module: nn.Module):
    units = unit_modules(module, lambda child: isinstance(child, Block))
    found = {}
    for plan in partition(units, managed_params(module, units)):
        found[plan.name] = [
            list(entry.fqns) for managed in plan.groups.values() for entry in managed
        ]
    return found


def shared(*blocks: Block) -> nn.Module:
    """The last matrix of the last block is the first one of the first."""
    blocks[-1].inner[-1].weight = blocks[0].inner[0].weight
    return nn.Sequential(*blocks)


def held_twice(inner: nn.Module) -> nn.Module:
    """By two blocks, of which each has its own parameter beside it."""
    return nn.Sequential(Block(inner), Block(inner))


def without_own() -> Block:
    block = Block(Block())
    block.own = None
    return block


def matrix() -> nn.Module:
    return nn.Linear(2, 2, bias=False)


PLANS: dict[str, tuple[nn.Module, dict[str, list[list[str]]]]] = {}
"""A model, and names of parameters by unit and group."""
PLANS["a parameter belongs to the nearest unit above"] = (
    nn.Sequential(matrix(), Block(nn.Linear(2, 2), Block()), Block()),
    {
        "1": [["1.own"], ["1.inner.0.weight"], ["1.inner.0.bias"]],
        "1.inner.1": [["1.inner.1.own"]],
        "2": [["2.own"]],
        ROOT: [["0.weight"]],
    },
)
PLANS["a unit without parameters of its own is no unit"] = (
    nn.Sequential(without_own()),
    {"0.inner.0": [["0.inner.0.own"]], ROOT: []},
)
PLANS['names are matched by component: unit "1" is not above "10.own"'] = (
    nn.Sequential(*[Block() if i in (1, 10) else nn.Identity() for i in range(11)]),
    {"1": [["1.own"]], "10": [["10.own"]], ROOT: []},
)
PLANS["a parameter shared inside of one unit stays there"] = (
    shared(Block(matrix(), matrix())),
    {"0": [["0.own"], ["0.inner.0.weight", "0.inner.1.weight"]], ROOT: []},
)
PLANS["one shared between units goes to the root"] = (
    shared(Block(matrix()), Block(matrix())),
    {"0": [["0.own"]], "1": [["1.own"]], ROOT: [["0.inner.0.weight", "1.inner.0.weight"]]},
)
PLANS["one of a module that is shared between units too"] = (
    held_twice(matrix()),
    {"0": [["0.own"]], "1": [["1.own"]], ROOT: [["0.inner.0.weight"]]},
)
PLANS["a shared unit has its own"] = (
    held_twice(Block(matrix())),
    {
        "0": [["0.own"]],
        "0.inner.0": [["0.inner.0.own"], ["0.inner.0.inner.0.weight"]],
        "1": [["1.own"]],
        ROOT: [],
    },
)


@pytest.mark.parametrize("name", PLANS)
def test_which_unit_a_parameter_is_in(name):
    """The root unit is the last, and there even when it is empty."""
    model, expected = PLANS[name]
    assert list(plans_of(model).items()) == list(expected.items())


def test_groups_share_domain_dtype_and_requires_grad():
    block = Block(nn.Linear(2, 2), nn.Linear(2, 2))
    frozen, narrow = block.inner
    frozen.weight.requires_grad_(False)
    narrow.to(torch.bfloat16)

    units = {"0": block}
    entries = []
    for entry in managed_params(nn.Sequential(block), units):
        domain = "other" if entry.fqns[0].endswith("own") else "d"
        entries.append(replace(entry, domain=domain))
    plans = partition(units, entries)
    found = {}
    for key, managed in plans[0].groups.items():
        names = [entry.fqns[0] for entry in managed]
        found[key.domain, key.dtype, key.requires_grad] = names
    assert found == {
        ("other", torch.float32, True): ["0.own"],
        ("d", torch.float32, False): ["0.inner.0.weight"],
        ("d", torch.float32, True): ["0.inner.0.bias"],
        ("d", torch.bfloat16, True): ["0.inner.1.weight", "0.inner.1.bias"],
    }


COMPUTE_DTYPES = {
    "the caller's": ({"compute_dtype": torch.bfloat16}, (torch.bfloat16, torch.float32)),
    "its own": ({}, (torch.float32, None)),
    "its own again": ({"compute_dtype": torch.float32}, (torch.float32, None)),
    "quantized": ({"compute_dtype": torch.bfloat16, "format": PER_TENSOR}, (torch.float32, None)),
}


@pytest.mark.parametrize("name", COMPUTE_DTYPES)
def test_the_dtype_of_compute_weights_is_the_callers_for_plain_floats_alone(name):
    decided, expected = COMPUTE_DTYPES[name]
    [entry] = managed_params(matrix())
    key = replace(entry, **decided).key
    assert (key.dtype, key.given) == expected
    assert key.quantized is decided.get("format")


def test_what_is_left_out_is_in_no_plan_and_a_unit_may_read_no_weights_in_backward():
    table = nn.Embedding(5, 3)
    module = nn.Sequential(table, Block(matrix()))
    units = {"0": table, "1": module[1]}
    entries = [entry for entry in managed_params(module, units) if entry.fqns != ("1.own",)]
    plans = partition(units, entries, ["0"])
    names = [one.fqns[0] for plan in plans for managed in plan.groups.values() for one in managed]
    assert names == ["0.weight", "1.inner.0.weight"]
    assert [plan.backward_reads_weights for plan in plans] == [False, True, True]


def _table(**attributes: Any) -> nn.Module:
    table = nn.Embedding(5, 3)
    for name, value in attributes.items():
        setattr(table, name, value)
    return table


def _hooked() -> nn.Module:
    table = _table()
    table.register_forward_hook(lambda module, args, out: out @ module.weight.t())
    return table


LOOKS_UP = {
    "an embedding": (nn.Embedding(5, 3, padding_idx=1), True),
    "one with dropout": (nn.Sequential(nn.Embedding(5, 3), nn.Dropout()), True),
    "a class of its own": (type("Own", (nn.Embedding,), {})(5, 3), False),
    "parametrized": (weight_norm(nn.Embedding(5, 3)), False),
    "with a hook": (_hooked(), False),
    "with a forward": (_table(forward=lambda rows: rows), False),
    "with another parameter": (_table(more=nn.Parameter(torch.ones(3))), False),
    "with a layer inside": (_table(more=nn.Linear(3, 3)), False),
    "with a layer behind": (nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3)), False),
}


@pytest.mark.parametrize("name", LOOKS_UP)
def test_only_what_is_known_to_look_up_is_not_gathered_in_backward(name):
    module, expected = LOOKS_UP[name]
    assert only_looks_up(module, {nn.Embedding, nn.Dropout, nn.Sequential}) is expected


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (3, 4, 5)])
def test_specs_cut_between_rows(shape):
    module = nn.Module()
    module.p = nn.Parameter(torch.ones(shape))
    spec = managed_params(module)[0].spec(0, GroupKey("dense", torch.float32, True))
    assert spec.shape == shape
    assert spec.granularity == torch.ones(shape or (1,))[0].numel()
