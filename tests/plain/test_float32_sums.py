"""Sums in float32 of gradients that are sent in bfloat16. Over two ranks, or two replicas of two,
they are those of a reduction in float32 of the same gradients: losses, norms and weights have the
bits of torch's function with that. Over four, they are added up by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as Dtypes
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megatron_fsdp_adapter import (
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter.core.comm.communicator import Communicator
from megatron_fsdp_adapter.core.engine.buffer import is_owned
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.gpt.checks import check_same_bits
from tests.lib.gpt.gpt import full_all
from tests.lib.plain.beside_torch import NormedLayer, TiedNet, check_alike, last_dim, trained
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "core/comm/all_to_all_sum.py",
    "core/engine/grad_buffers.py",
    "core/engine/reduction.py",
    "plain/call_options.py",
)

BF16 = torch.bfloat16
FP32 = torch.float32
WIDTH = 8
SUMS = "reduce_scatter_with_fp32_accumulation"
IN_FLOAT32 = {"mp_policy": Dtypes(param_dtype=BF16, reduce_dtype=FP32)}
"""Of torch's function."""
SENT_IN_BF16 = {"mp_policy": Dtypes(param_dtype=BF16, reduce_dtype=BF16), SUMS: True}


def net(dtype: torch.dtype = FP32) -> TiedNet:
    torch.manual_seed(3)
    return TiedNet(partial(NormedLayer, WIDTH), 2, WIDTH).to(dtype)


def tokens(step: int, microbatch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randint(20, (6,), generator=generator)


def loss_of(model: Any, step: int, microbatch: int, rank: int) -> torch.Tensor:
    return model(tokens(step, microbatch, rank)).float().square().mean()


@contextmanager
def launched(in_place: bool = False) -> Iterator[list[tuple[str, torch.dtype, int]]]:
    """Fills a list with the name of each collective but gathers, its dtype, and its ranks. An
    exchange reads gradients where autograd has left them, and not a copy."""
    found = []
    launch = Communicator.launch

    def noted(self: Communicator, name: str, pairs: Any, **options: Any) -> Any:
        if self.size > 1 and name not in ("all_gather", "broadcast") and self.carries:
            found.extend((name, source.dtype, self.size) for _, source in pairs)
            if in_place:
                assert name != "all_to_all" or not any(is_owned(source) for _, source in pairs)
        return launch(self, name, pairs, **options)

    with mock.patch.object(Communicator, "launch", noted):
        yield found


def freeze(model: nn.Module, trained: bool) -> None:
    """Freezes a part of each layer, or trains it. Torch's function, with dtypes of its own, needs a
    part that is trained from the start."""
    for name, param in model.named_parameters():
        if "up" in name or "norm" in name:
            param.requires_grad_(trained)


Case = Mapping[str, Any]
CASES: Mapping[str, Case] = {
    "one microbatch": {},
    "each of three reduces": {"microbatches": 3},
    "weights stay": {"reshard_after_forward": False, "microbatches": 2},
    "split along the last dim": {"shard_placement_fn": last_dim},
    "in host memory": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "trained later": {"late": True},
    "compiled": {"compiles": True},
    "in bfloat16": {"dtype": BF16, "microbatches": 1},
}
"""Options of both functions, and of the run."""


def made(shard: Callable[..., Any], options: Mapping[str, Any], case: Case) -> Any:
    model = net(case.get("dtype", FP32))
    if case.get("late"):
        freeze(model, False)
    if case.get("compiles"):
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    if "tp" in case:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, case["tp"], plan)
    own = {"microbatches", "dtype", "late", "compiles", "tp"}
    given = {name: value for name, value in case.items() if name not in own}
    for module in (*model.layers, model):
        shard(module, **options, **given)
    return model


def train(model: Any, case: Case, rank: int) -> list[float]:
    def loss(step: int, microbatch: int) -> torch.Tensor:
        if case.get("late") and step == 1:
            freeze(model, True)
        return loss_of(model, step, microbatch, rank)

    return trained(model, loss, case.get("microbatches", 1), keeps=False)[1]


def compare(case: Case, rank: int, say: str, outer: int = 1) -> None:
    model = made(theirs, IN_FLOAT32, case)
    expected = train(model, case, rank)
    mine = made(ours, SENT_IN_BF16, case)
    with launched(in_place=True) as found:
        numbers = train(mine, case, rank)
    assert numbers == expected, say
    check_alike(mine, model, say)
    reductions = {one for one in found if one[0] != "all_reduce_max"}
    wanted = {("all_to_all", BF16, 2)}
    if outer > 1:
        wanted.add(("all_reduce", FP32, outer))
    assert reductions - {("all_reduce", torch.int64, 2)} == wanted, say


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_two_ranks_have_the_bits_of_torchs_reduction_in_float32(rank: int, name: str) -> None:
    compare(CASES[name], rank, name)


@on_ranks(4)
def test_replicas_sum_in_float32_too(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for case in ({}, {"microbatches": 2}, {"dtype": BF16}):
        compare({"mesh": mesh, **case}, rank // 2, str(case), outer=2)


@on_ranks(4)
def test_with_tensor_parallelism(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    compare({"mesh": mesh["dp"], "tp": mesh["tp"]}, mesh["dp"].get_local_rank(), "tp")


# `fully_shard_model`.

BY_MODEL: Mapping[str, tuple[Mapping[str, Any], Case]] = {
    "ZeRO-1": ({"data_parallel_sharding_strategy": "optim"}, {}),
    "ZeRO-2": ({"data_parallel_sharding_strategy": "optim_grads"}, {"microbatches": 2}),
    "ZeRO-3": ({}, {"microbatches": 3}),
    "units that stay unsharded": ({BUDGET: 1.0}, {}),
    "joined layers": ({"suggested_communication_unit_size": 10**6}, {}),
    "in host memory": ({"chunked_optimizer_state_offload": True}, {}),
    "trained later": ({}, {"late": True}),
    "compiled": ({}, {"compiles": True}),
}
"""Options of the function, and of the run."""


def by_model(options: Mapping[str, Any], case: Case) -> Any:
    model = net()
    if case.get("late"):
        freeze(model, False)
    if case.get("compiles"):
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    policy = MixedPrecisionPolicy(None, FP32, BF16, compute_dtype=BF16)
    return fully_shard_model(
        model,
        case.get("mesh"),
        [NormedLayer],
        mixed_precision_policy=policy,
        **{SUMS: True},
        **options,
    )


def steps(model: Any, case: Case, rank: int) -> list[float]:
    """Trains with AdamW and without clipping, as norms of the two functions differ in bits."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not isinstance(model, TiedNet):
        optimizer = fully_shard_optimizer(optimizer)
    losses = []
    for step in range(3):
        if case.get("late") and step == 1:
            freeze(model, True)
        for microbatch in range(case.get("microbatches", 1)):
            loss = loss_of(model, step, microbatch, rank)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare_model(options: Mapping[str, Any], case: Case, rank: int, outer: str = "") -> None:
    own = {name: value for name, value in case.items() if name != "mesh"}
    model = made(theirs, IN_FLOAT32, case)
    expected = steps(model, own, rank)
    mine = by_model(options, case)
    with launched() as found:
        losses = steps(mine, own, rank)
    say = f"{options}"
    assert losses == expected, say
    weights = {n.removeprefix("module."): v for n, v in full_all(mine.state_dict()).items()}
    check_same_bits(weights, full_all(model.state_dict()), say)
    wanted = {("all_to_all", BF16, 2)}
    if outer:
        wanted.add((outer, FP32, 2))
    assert {one for one in found if one[1].is_floating_point} == wanted, say


@pytest.mark.parametrize("name", BY_MODEL)
@on_ranks(2)
def test_a_sharded_model_has_them_too(rank: int, name: str) -> None:
    compare_model(*BY_MODEL[name], rank)


@on_ranks(4)
def test_an_outer_axis_of_a_sharded_model_carries_float32(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for name, collective in (("no_shard", "all_reduce"), ("optim", "reduce_scatter")):
        options = {"outer_dp_sharding_strategy": name}
        compare_model(options, {"mesh": mesh}, rank, collective)


# By hand.


def by_hand(
    weights: Mapping[str, torch.Tensor], step: int, microbatches: int, kept: bool
) -> dict[str, torch.Tensor]:
    """The gradients of a step: bfloat16 ones of each rank, from a model that is whole, which are
    added up in float32 in the order of ranks. kept: each rank adds up those of its microbatches in
    bfloat16 before that."""
    ranks = 4
    model = net(BF16)
    model.load_state_dict(weights, assign=False)
    total: dict[str, torch.Tensor] = {}
    sums: list[dict[str, torch.Tensor]] = []
    for microbatch in range(microbatches):
        each = []
        for rank in range(ranks):
            model.zero_grad()
            loss_of(model, step, microbatch, rank).backward()
            each.append({name: param.grad.clone() for name, param in model.named_parameters()})
        if kept and sums:
            for rank in range(ranks):
                for name, grad in each[rank].items():
                    sums[rank][name] += grad
        else:
            sums = each
        if kept and microbatch < microbatches - 1:
            continue
        for name in sums[0]:
            mean = sums[0][name].float()
            for rank in range(1, ranks):
                mean = mean + sums[rank][name].float()
            mean = mean / ranks
            total[name] = mean if name not in total else total[name] + mean
    return total


@pytest.mark.parametrize(
    ("by_calls", "kept"), [(True, False), (True, True), (False, False)], ids=str
)
@on_ranks(4)
def test_four_ranks_add_up_in_their_order(rank: int, by_calls: bool, kept: bool) -> None:
    model = made(ours, SENT_IN_BF16, {}) if by_calls else by_model({}, {})
    for step in range(2):
        state = {n.removeprefix("module."): v for n, v in full_all(model.state_dict()).items()}
        expected = by_hand(state, step, 3, kept)
        for microbatch in range(3):
            is_last = microbatch == 2
            loss = loss_of(model, step, microbatch, rank)
            if by_calls:
                model.set_requires_gradient_sync(is_last or not kept)
            loss.backward()
        found = {
            name.removeprefix("module."): param.grad.full_tensor()
            for name, param in model.named_parameters()
        }
        check_same_bits(found, expected, f"step {step}")
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        model.zero_grad()


# What is refused.


@pytest.mark.parametrize("dtype", (None, FP32, torch.float16))
@on_ranks(1)
def test_another_dtype_of_reductions_is_refused(rank: int, dtype: torch.dtype | None) -> None:
    policy = Dtypes(param_dtype=BF16, reduce_dtype=dtype)
    with pytest.raises(ValueError, match=f"{SUMS}=True with mp_policy.reduce_dtype={dtype}"):
        ours(net(), mp_policy=policy, **{SUMS: True})


@on_ranks(1)
def test_a_hook_that_changes_sums_before_they_are_added_is_refused(rank: int) -> None:
    model = made(ours, SENT_IN_BF16, {})
    with pytest.raises(ValueError, match=f"set_all_reduce_hook: .* {SUMS}=True"):
        model.set_all_reduce_hook(torch.Tensor.zero_)
