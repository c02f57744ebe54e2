"""An outer data-parallel axis: two optimizer instances of two ranks each, whose shards are replicas
(HSDP) or split again (hybrid FSDP), under every strategy.

Two independent references: stock DDP with two optimizer instances, and plain ZeRO-3 over the
four ranks, which was compared with plain DDP elsewhere.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from megatron_fsdp_adapter.core.engine.group import GradState
from tests.distributed.checks import (
    Step,
    check_run,
    check_step,
    free_run,
    passes,
    steps_from_reference,
)
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
)
from tests.distributed.launch import run_ranks
from tests.distributed.random_cases import fresh_seed, random_case
from tests.distributed.topologies import (
    TOPOLOGIES,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)

pytestmark = pytest.mark.once

WORLD, INSTANCES = 4, 2
OUTER = ("no_shard", "optim")


def _options(outer: str | None) -> dict[str, Any]:
    if outer is None:
        return {"num_distributed_optimizer_instances": INSTANCES}
    return {"num_distributed_optimizer_instances": INSTANCES, "outer_dp_sharding_strategy": outer}


def _init() -> torch.device:
    return init_megatron(num_distributed_optimizer_instances=INSTANCES)


def _packed(runs: list[list[Step]]) -> bytes:
    """A tensor in a pipe is a file that goes with the process that sent it."""
    packed = io.BytesIO()
    torch.save(runs, packed)
    return packed.getvalue()


def _unpacked(packed: bytes) -> list[list[Step]]:
    return torch.load(io.BytesIO(packed), weights_only=False)


def _build(case: Case, strategy: str | None, device: torch.device, outer: str | None) -> Trainer:
    """Megatron wires `no_sync` where its own option of overlap is on, whatever a strategy needs."""
    trainer = build_trainer(case, strategy, device, ddp=_options(outer))
    if not case.overlap:
        trainer.wrapper.config.no_sync_func = None
    return trainer


def _compare(rank: int, world: int, cases: Sequence[Case]) -> bytes:
    """Each step from the reference's weights, then steps that run free; the latter's results
    with ZeRO-3, for each case and outer strategy."""
    device, runs = _init(), []
    for case in cases:
        for outer in OUTER:
            reference = _build(case, None, device, None)
            ours = {s: _build(case, s, device, outer) for s in STRATEGIES}
            for strategy, mine, theirs in steps_from_reference(reference, ours, rank, 2, device):
                check_step(mine, theirs, f"{strategy}, outer {outer}, {case}")
            free = _build(case, "optim_grads_params", device, outer)
            runs.append(free_run(free, rank, 5, device))
    return _packed(runs)


def _plain(rank: int, world: int, cases: Sequence[Case]) -> bytes:
    device = init_megatron()
    return _packed(
        [
            free_run(build_trainer(case, "optim_grads_params", device), rank, 5, device)
            for case in cases
        ]
    )


def _cases(overlap: bool) -> list[Case]:
    three = random_case(fresh_seed()).but(microbatches=3, batch=1, overlap=overlap)
    if not overlap:
        return [three]
    return [random_case(fresh_seed()).but(microbatches=1, num_layers=2), three]


@pytest.mark.parametrize(
    "overlap", [True, pytest.param(False, marks=pytest.mark.full)], ids=["overlap", "none"]
)
def test_instances_train_like_stock_ddp_and_like_plain_zero_3(overlap: bool) -> None:
    """2 x 2, 1 and 3 microbatches. Trap G9: the outer reduction came too late; G14: only the last
    microbatch counted, where without overlap nobody tells which one that is."""
    cases = _cases(overlap)
    plain = _unpacked(run_ranks(_plain, WORLD, cases)[0])
    runs = _unpacked(run_ranks(_compare, WORLD, cases, timeout=240.0)[0])
    for number, run in enumerate(runs):
        label = f"outer {OUTER[number % 2]}, {cases[number // 2]}"
        check_run(run, plain[number // 2], label)


def _mixture(rank: int, world: int) -> None:
    """Experts on two expert-parallel ranks, so that each is shared by two data-parallel ranks, one
    of each instance."""
    topology = TOPOLOGIES["ep2"]
    for microbatches, strategies in ((1, STRATEGIES[-1:]), (3, STRATEGIES)):
        case = case_for(topology, microbatches=microbatches)
        for strategy in strategies:
            init_topology(topology)
            plain = _steps(build_topology_trainer(topology, case, strategy))
            for outer in OUTER:
                init_topology(topology, INSTANCES)
                ours = build_topology_trainer(topology, case, strategy, ddp=_options(outer))
                domains = {g.key.domain: g.domain for g in ours.chunks[0].engine.groups}
                assert domains["expert"].axis.size == 1 and domains["expert"].outer_size == 2
                assert domains["dense"].axis.size == domains["dense"].outer_size == 2
                label = f"{strategy}, outer {outer}, {microbatches} microbatches"
                for mine, theirs in zip(_steps(ours), plain, strict=True):
                    check_step(mine, theirs, label)


def _steps(trainer: TopologyTrainer) -> list[Step]:
    return [topology_step(trainer, step) for step in range(2)]


@pytest.mark.full
def test_mixture_of_experts_trains_like_one_instance() -> None:
    run_ranks(_mixture, WORLD, timeout=240.0)


def _launches(trainer: Trainer, rank: int, device: torch.device, told: bool) -> list[int]:
    """Groups that a step of 3 microbatches reduces over the outer axis: asked for by the backwards,
    and launched in all. Without `told`, nobody tells which microbatch is the last."""
    reduce = trainer.wrapper.engine.reduce
    trainer.wrapper.config.no_sync_func = trainer.wrapper.no_sync if told else None
    asked, finish = [0, 0], trainer.wrapper.engine.reduce_grads
    communicate = reduce._communicate_outer

    def at_end() -> None:
        asked[0] = sum(g.grad_state is GradState.FINISHED for g in trainer.wrapper.engine.groups)
        finish()

    def count(groups: Any) -> Any:
        asked[1] += len(groups)
        return communicate(groups)

    trainer.wrapper.engine.reduce_grads, reduce._communicate_outer = at_end, count
    forward_backward(trainer, batches(trainer.case, 0, rank, device))
    return asked


def _outer_reductions(rank: int, world: int) -> dict[tuple[str, str, bool], list[int]]:
    device, case, found = _init(), Case(), {}
    for strategy in ("optim_grads", "optim_grads_params"):
        for outer in OUTER:
            for told in (False, True):
                trainer = build_trainer(case, strategy, device, ddp=_options(outer))
                found[strategy, outer, told] = _launches(trainer, rank, device, told)
    return found


def test_outer_axis_is_reduced_once_a_step() -> None:
    """For each unit on the last microbatch, when its backward ends. Where nobody tells which one
    is the last (Megatron-LM with ZeRO-3 and no --overlap-grad-reduce) it waits for the end."""
    for key, (in_backward, launched) in run_ranks(_outer_reductions, WORLD)[0].items():
        units = 5  # embedding, two layers, output layer, final norm
        assert launched == units, key
        assert in_backward == (units if key[2] else 0), key


def _shapes(rank: int, world: int) -> None:
    """What Megatron and checkpoints see of the axes."""
    device, case = _init(), Case()
    for outer, placement in zip(OUTER, (Replicate(), Shard(0)), strict=True):
        trainer = build_trainer(case, "optim_grads_params", device, ddp=_options(outer))
        index = trainer.wrapper.megatron_fsdp_dist_index
        assert index.use_hybrid_fsdp and index.dp_outer_dim == "outer_fsdp_dp"
        assert index.hsdp_outer_dp_shard is (outer == "optim")
        assert index.get_dp_group().size() == 4 and index.get_fsdp_group().size() == 2
        assert index.get_outer_fsdp_group().size() == 2
        held = 0
        for param in trainer.wrapper.parameters():
            mesh = param.device_mesh
            assert mesh.mesh_dim_names[:2] == ("outer_fsdp_dp", "dp_cp")
            assert tuple(mesh.get_coordinate()[:2]) == (rank // 2, rank % 2)
            assert mesh.mesh.view(-1).tolist() == [0, 1, 2, 3]
            assert param.placements[:2] == (placement, Shard(0))
            held += param._local_tensor.numel()
        sizes: list[Any] = [None] * world
        dist.all_gather_object(sizes, held)
        whole = sum(param.numel() for param in trainer.wrapper.parameters())
        assert sum(sizes) == whole * (1 if outer == "optim" else INSTANCES)


def test_meshes_and_placements_tell_the_outer_axis() -> None:
    run_ranks(_shapes, WORLD)


def _late_backward(rank: int, world: int) -> list[str]:
    """A backward after the outer reduction of a step."""
    device, case, messages = _init(), Case(microbatches=1), []
    for strategy in STRATEGIES:
        trainer = build_trainer(case, strategy, device, ddp=_options("optim"))
        forward_backward(trainer, batches(case, 0, rank, device))
        tokens = batches(case, 1, rank, device)[0]
        with pytest.raises(RuntimeError) as raised:
            trainer.wrapper(
                tokens[:, :-1], torch.arange(case.seq).expand(case.batch, -1),
                torch.ones(1, 1, case.seq, case.seq, dtype=torch.bool).triu(1),
                labels=tokens[:, 1:],
            ).mean().backward()  # fmt: skip
        messages.append(str(raised.value))
    return messages


def test_backward_after_the_outer_reduction_is_an_error() -> None:
    for message in run_ranks(_late_backward, WORLD)[0]:
        assert "after this step's gradients had been reduced" in message and "no_sync" in message


def _with_fault(rank: int, world: int, case: Case, fault: str) -> bool:
    """Whether a step still equals the reference with a mistake in the outer axis."""
    device = _init()
    reference = build_trainer(case, None, device, ddp=_options(None))
    ours = {"z": build_trainer(case, "optim_grads_params", device, ddp=_options("optim"))}
    engine = ours["z"].wrapper.engine
    if fault == "outer gradients not reduced":
        engine.reduce._communicate_outer = lambda groups: []
    if fault == "outer weights not gathered":
        engine.gather._gather_outer = lambda unit: []
    [*_] = (steps := list(steps_from_reference(reference, ours, rank, 2, device)))
    return all(passes(check_step, mine, theirs, fault) for _, mine, theirs in steps)


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", ("none", "outer gradients not reduced", "outer weights not gathered")
)
def test_the_comparison_sees_a_mistake_in_the_outer_axis(fault: str) -> None:
    case = random_case(fresh_seed()).but(num_layers=1, batch=1)
    assert run_ranks(_with_fault, WORLD, case, fault)[0] is (fault == "none")
