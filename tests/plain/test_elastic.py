"""Replicas that may be missing in a step, by the plan of a stand-in for torchft's manager.
Under torchft itself: tests/elastic/test_replicas.py."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp_adapter import (
    elastic_optimizer,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp_adapter.build import replicas
from megatron_fsdp_adapter.core.comm.managed import ReplicaRefused
from megatron_fsdp_adapter.elastic.facts import facts_of, set_own_facts
from megatron_fsdp_adapter.elastic.state import ReplicaState
from tests.lib.elastic.planned import Attempt, PlannedManager
from tests.lib.elastic.replica import data_of, digest, sharded
from tests.lib.gpt.checks import check_same_bits, check_weights
from tests.lib.gpt.gpt import full_all
from tests.lib.plain.plain import net
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "build/replicas.py",
    "core/comm/managed.py",
    "elastic/facts.py",
    "elastic/state.py",
    "plain/elastic.py",
)

BOTH = (0, 1)
PLANS = {
    2: (Attempt(BOTH), Attempt([0]), Attempt(BOTH, fails=True), Attempt([1]), Attempt(BOTH)),
    4: (
        Attempt([1, 3]),
        Attempt([0, 2]),
        Attempt([1], fails=True),
        Attempt([1]),
        Attempt([3, 2]),
    ),
}
"""By the number of replicas. At most two take part, as gloo's sum of more depends on its pieces."""

RANKS = 4
MICROBATCHES = 2


def planned(rank: int, plan: Sequence[Attempt], count: int = 2) -> tuple[PlannedManager, Any]:
    """The manager of a rank, and the mesh of its replica, one of `count`."""
    mesh = init_device_mesh(
        "cpu", (count, dist.get_world_size() // count), mesh_dim_names=("replica", "shard")
    )
    manager = PlannedManager(mesh["replica"].get_group(), rank // mesh["shard"].size(), plan)
    return manager, mesh["shard"]


def by_calls(
    manager: Any, mesh: Any, shard: Any = fully_shard, by_hooks: bool = False, **options: Any
) -> tuple[Any, Any]:
    """A model that is sharded by a call for each module. shard: this package's function, or
    torch's, which takes no scalars; by_hooks: torchft's recipe for FSDP2, a hook on each module."""
    module = net(blocks=2)
    module.temperature = nn.Parameter(module.temperature.detach().view(1))
    if not by_hooks:
        options["elastic"] = manager
    for each in (*module.blocks, module):
        shard(each, mesh=mesh, **options)
        if by_hooks:
            each.set_all_reduce_hook(lambda output: manager.allreduce(output).wait())
    return module, torch.optim.AdamW(module.parameters(), lr=0.01)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
by_torch = partial(by_calls, shard=torch_fully_shard, by_hooks=True)
DOORS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "fully_shard": by_calls,
    "hooks": partial(by_calls, by_hooks=True),
    "torch": by_torch,
    "bf16": partial(by_calls, mp_policy=BF16),
    "torch in bf16": partial(by_torch, mp_policy=BF16),
    "optim": partial(sharded, "fully_shard_model", strategy="optim"),
    "optim_grads_params": partial(sharded, "fully_shard_model"),
}
"""Ways to shard a model, which make it and its optimizer."""

BY_HOOKS = ("hooks", "torch", "torch in bf16")
BESIDE = {"fully_shard": "torch", "hooks": "torch", "bf16": "torch in bf16"}
"""The way of torch's FSDP2 that has the same bits."""


def backwards(model: Any, step: int, replica: int, rank: int, reduces: bool) -> None:
    """The backwards of a step. reduces: each of them reduces; otherwise the last one does."""
    for microbatch in range(MICROBATCHES):
        syncs = reduces or microbatch == MICROBATCHES - 1
        context = nullcontext()
        if not hasattr(model, "no_sync"):
            model.set_requires_gradient_sync(syncs)
        elif not syncs:
            context = model.no_sync()
        with context:
            model(data_of(MICROBATCHES * step + microbatch, replica, rank)).backward()


def unsharded(plan: Sequence[Attempt], ranks: int) -> dict[str, torch.Tensor]:
    """The weights that one process has after the steps of `plan` that do not fail, of replicas of
    so many ranks."""
    module = net(blocks=2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    step = 0
    for attempt in plan:
        if attempt.fails:
            continue
        losses = []
        for microbatch in range(MICROBATCHES):
            for replica in attempt.replicas:
                for rank in range(ranks):
                    losses.append(module(data_of(MICROBATCHES * step + microbatch, replica, rank)))
        (torch.stack(losses).sum() / (ranks * len(attempt.replicas))).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def trained(rank: int, door: str, count: int, reduces: bool) -> dict[str, torch.Tensor]:
    """The weights after the plan for `count` replicas. Checks which attempts change them."""
    plan = PLANS[count]
    manager, mesh = planned(rank, plan, count)
    replica, place = divmod(rank, RANKS // count)
    model, inner = DOORS[door](manager, mesh)
    # torchft's own hooks know no engine, and its wrapper does no more than this.
    optimizer = None if door in BY_HOOKS else elastic_optimizer(manager, inner, model)
    for attempt in plan:
        if optimizer is None:
            manager.start_quorum()
            inner.zero_grad()
        else:
            optimizer.zero_grad()
        before = digest(model)
        step = manager.current_step()
        backwards(model, step, replica, place, reduces)
        if optimizer is not None:
            optimizer.step()
        elif manager.should_commit():
            inner.step()
        assert manager.current_step() == step + (not attempt.fails)
        assert (digest(model) == before) == attempt.fails
        assert manager.calls.count("should_commit") == 1
        assert manager.calls[-1] == "should_commit"  # no reduction after that
    weights = full_all(dict(model.named_parameters()))
    return {name.removeprefix("module."): value for name, value in weights.items()}


@pytest.mark.parametrize(
    "door, count, reduces",
    [
        ("fully_shard", 2, False),
        ("fully_shard", 2, True),
        ("fully_shard", 4, False),
        ("fully_shard", 4, True),
        ("hooks", 2, False),
        ("bf16", 2, True),
        ("bf16", 4, True),
        ("optim", 2, False),
        ("optim_grads_params", 2, False),
        ("optim_grads_params", 2, True),
        ("optim_grads_params", 4, False),
    ],
)
@on_ranks(RANKS)
def test_steps_take_the_mean_over_the_replicas_that_are_there(
    rank: int, door: str, count: int, reduces: bool
) -> None:
    weights = trained(rank, door, count, reduces)
    if door != "bf16":
        check_weights(weights, unsharded(PLANS[count], RANKS // count), door, 1e-5)
    if door in BESIDE:
        check_same_bits(weights, trained(rank, BESIDE[door], count, reduces), "torch's FSDP2")


@pytest.mark.parametrize("door", ["fully_shard", "optim_grads_params"])
@on_ranks(4)
def test_a_replica_that_joins_goes_on_with_the_bits_of_another(rank: int, door: str) -> None:
    replica = rank // 2
    plan = (Attempt([0]), Attempt([0]), Attempt(BOTH, joins=[1]), Attempt(BOTH))
    manager, mesh = planned(rank, plan)
    model, inner = DOORS[door](manager, mesh)
    model.register_buffer("seen", torch.tensor(float(replica)))
    if replica == 1:
        with torch.no_grad():
            for param in model.parameters():
                param._local_tensor.add_(1.0)  # type: ignore[attr-defined]
    torch.manual_seed(rank)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = elastic_optimizer(manager, inner, model, scheduler=scheduler)
    found = []
    for attempt in plan:
        optimizer.zero_grad()
        loss = model(data_of(manager.current_step(), replica, rank % 2))
        loss.backward()
        optimizer.step()
        if replica == 0 or 1 in attempt.replicas:
            scheduler.step()
        moments = [state["exp_avg"]._local_tensor.sum().item() for state in inner.state.values()]
        counts = {float(state["step"]) for state in inner.state.values()}
        drawn = torch.rand(2).tolist()
        rest = (inner.param_groups[0]["lr"], counts, moments, drawn, model.seen.item())
        every: list[Any] = [None, None]
        dist.all_gather_object(every, (digest(model), rest), manager.group)
        found.append(every)
    assert found[1][0][0] != found[1][1][0]
    for alike in found[2:]:
        assert alike[0] == alike[1]


@on_ranks(4)
def test_gradients_are_reduced_before_replicas_agree_on_a_step(rank: int) -> None:
    manager, mesh = planned(rank, [Attempt(BOTH)])
    model = fully_shard_model(net(), mesh, elastic=manager, sync_model_each_microbatch=False)
    inner = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = elastic_optimizer(manager, inner, model)
    optimizer.zero_grad()
    model(data_of(0, rank // 2, rank % 2)).backward()
    assert "allreduce" not in manager.calls
    optimizer.step()
    assert manager.calls.index("should_commit") == len(manager.calls) - 1 > 0


@on_ranks(RANKS)
def test_a_hook_of_reductions_gets_the_mean_over_replicas(rank: int) -> None:
    manager, mesh = planned(rank, [Attempt(BOTH)])
    model, inner = by_calls(manager, mesh)
    seen: list[list[str]] = []
    model.set_all_reduce_hook(lambda output: seen.append(list(manager.calls)))
    elastic_optimizer(manager, inner, model).zero_grad()
    model(data_of(0, rank // 2, rank % 2)).backward()
    assert seen and all(seen)


# What is refused.

Use = Callable[[PlannedManager, Any], Any]
REFUSED: list[tuple[str, Use]] = []
"""What the error says, and what raises it, given a manager and a mesh of two ranks."""


def refused(said: str) -> Callable[[Use], Use]:
    """Adds a function to the table."""

    def add(use: Use) -> Use:
        REFUSED.append((said, use))
        return use

    return add


@refused(f"elastic with outer_dp_sharding_strategy='optim': {replicas.SPLIT_STATE}")
def _split_state(manager: PlannedManager, mesh: Any) -> None:
    fully_shard_model(net(), mesh, outer_dp_sharding_strategy="optim", elastic=manager)


def _two_dims() -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))


@refused("elastic: the mesh has 2 replicas too")
def _replicas_in_the_mesh(manager: PlannedManager, mesh: Any) -> None:
    fully_shard_model(net(), _two_dims(), elastic=manager)


@refused("elastic: the mesh has 2 replicas too")
def _replicas_in_the_mesh_of_fully_shard(manager: PlannedManager, mesh: Any) -> None:
    fully_shard(net(), mesh=_two_dims(), elastic=manager)


@refused("has no methods ['allreduce'")
def _no_manager(manager: PlannedManager, mesh: Any) -> None:
    fully_shard_model(net(), mesh, elastic=object())  # type: ignore[arg-type]


@refused("has no methods ['allreduce'")
def _no_manager_of_fully_shard(manager: PlannedManager, mesh: Any) -> None:
    fully_shard(net(), mesh=mesh, elastic=object())  # type: ignore[arg-type]


@refused("another call for this model was given")
def _two_managers(manager: PlannedManager, mesh: Any) -> None:
    module = net()
    fully_shard(module.blocks[0], mesh=mesh)
    fully_shard(module, mesh=mesh, elastic=manager)
    module(data_of(0, 0, 0))


@refused("elastic with main weights in host memory")
def _weights_in_host_memory(manager: PlannedManager, mesh: Any) -> None:
    fully_shard_model(net(), mesh, chunked_optimizer_state_offload=True, elastic=manager)


@refused("elastic with main weights in host memory")
def _weights_of_fully_shard_in_host_memory(manager: PlannedManager, mesh: Any) -> None:
    module = fully_shard(net(), mesh=mesh, offload_policy=CPUOffloadPolicy(), elastic=manager)
    fully_shard_optimizer(torch.optim.AdamW(module.parameters()))


@refused("there are replicas, and the hook runs in the stream of the reduction over them")
def _a_stream_for_a_hook(manager: PlannedManager, mesh: Any) -> None:
    made = fully_shard(net(), mesh=mesh, elastic=manager)
    made.set_all_reduce_hook(print, stream=torch.cpu.Stream())


@refused("the model was sharded without it")
def _a_model_without_the_manager(manager: PlannedManager, mesh: Any) -> None:
    model = fully_shard_model(net(), mesh)
    elastic_optimizer(manager, torch.optim.SGD(model.parameters()), model)


@refused("it has an elastic optimizer")
def _two_optimizers(manager: PlannedManager, mesh: Any) -> None:
    model, inner = sharded("fully_shard_model", manager, mesh)
    for _ in range(2):
        elastic_optimizer(manager, inner, model)


@refused("an elastic step cannot repeat a forward")
def _a_closure(manager: PlannedManager, mesh: Any) -> None:
    model, inner = sharded("fully_shard_model", manager, mesh)
    elastic_optimizer(manager, inner, model).step(lambda: 0.0)


@pytest.mark.parametrize("said, use", REFUSED)
@on_ranks(2)
def test_is_refused(rank: int, said: str, use: Use) -> None:
    manager, mesh = planned(rank, [Attempt([0])], count=1)
    with pytest.raises(ValueError) as raised:
        use(manager, mesh)
    assert said in str(raised.value)


@on_ranks(2)
def test_a_replica_that_differs_is_refused_before_it_reduces(rank: int) -> None:
    manager, mesh = planned(rank, [Attempt([0]), Attempt([0], joins=[0])], count=1)
    model, inner = sharded("fully_shard_model", manager, mesh)
    optimizer = elastic_optimizer(manager, inner, model)
    other, of_other = sharded("fully_shard_model", manager, mesh, "optim")
    theirs = facts_of([other.engine], of_other)
    assert pickle.loads(pickle.dumps(facts_of([model.engine], inner))) != theirs
    optimizer.zero_grad()
    model(data_of(0, 0, rank)).backward()
    optimizer.step()
    try:
        set_own_facts(theirs)
        before = digest(model)
        optimizer.zero_grad()
        with pytest.raises(ReplicaRefused, match="options of model 0: .*optim_grads_params"):
            model(data_of(1, 0, rank)).backward()
        assert "allreduce" not in manager.calls
        assert digest(model) == before
    finally:
        set_own_facts({})


@pytest.mark.parametrize("kind", ["meta", "cpu"])
def test_counts_of_steps_return_to_the_kind_of_device_that_they_were_on(kind: str) -> None:
    """Torch's fused optimizers have them on the GPU, for which "meta" stands; what a transport
    brings is on the host."""
    param = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.SGD([param])
    state = ReplicaState([], optimizer, {}, facts_of([], optimizer))
    optimizer.state[param] = {"step": torch.ones((), device=kind)}
    sent = state._optimizer_state()
    sent["values"] = [{"step": torch.ones(())}]
    state._load_optimizer_state(sent)
    assert optimizer.state[param]["step"].device.type == kind
