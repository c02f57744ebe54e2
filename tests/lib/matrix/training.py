"""A cell and its reference, trained for three steps, and how far they are apart.

The reference keeps whole gradients and weights; of ours each rank compares the shards that it
holds. Sums of squares are added up over the ranks that share a tensor out, so that nothing is
gathered, at any width.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fsdp_adapter import release_memory, return_memory
from megatron_fsdp_adapter.core.engine.partition import TO
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from megatron_fsdp_adapter.megatron.layers.te_weight_cache import switch_off_weight_cache
from megatron_fsdp_adapter.megatron.options.table import (
    EXPERT_INSTANCES,
    EXPERT_OUTER,
    EXPERT_STRATEGY,
    UNIT_NUMEL,
)
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO, GIB
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.engine.fake_graphs import FakeGraphs, put_graphs_into
from tests.lib.gpt.exact import U_FLOAT32, gamma
from tests.lib.gpt.gather_full import main_piece, put_together, shard_groups
from tests.lib.gpt.gpt import ddp_config, give_up
from tests.lib.gpt.topologies import (
    TopologyTrainer,
    init_topology,
    plain_name,
    run_schedule,
    wrapped,
)
from tests.lib.gpu.captured import forget_graphs
from tests.lib.ranks.spare_memory import agree_on

from .bounds import PEAK, SENSITIVITY, Bounds, bounds_of, is_sensitive, movement_of
from .model import case_of, chunk_of, config_of, topology_of
from .muon import muon_options, steps_by_hand
from .surroundings import activations_kept, check_export, memories
from .table import REFERENCE, Cell, has_fp8_weights

Tensors = dict[str, torch.Tensor]

STEPS = 3
ALL_GIB = 1000.0
"""A budget for all units."""
WARMUP = 1
"""Steps before the one that is captured, which is replayed right away."""

UPDATES = gamma(STEPS * 2, U_FLOAT32)
"""Of a weight: each update rounds it, in the reference and in ours."""

BUFFERS: Mapping[str, Mapping[str, bool]] = {
    "plain": {},
    "slots": {"fsdp_double_buffer": True},
    "nccl_ub": {"nccl_ub": True},
    "ce_gather": {"fsdp_copy_engine_all_gather": True},
    "ce_gather_reduce": {
        "fsdp_copy_engine_all_gather": True,
        "fsdp_copy_engine_reduce_scatter": True,
    },
}


def _budget_gib(cell: Cell, models: Sequence[Any]) -> float | str:
    """Three quarters of what the weights of a chunk take: some units' weights, or, where they are
    the main weights too, gradients as well."""
    nbytes = sum(param.numel() * param.element_size() for param in models[0].parameters())
    return {
        "nothing": 0.0,
        "some": 0.75 * nbytes / GIB,
        "all": ALL_GIB,
        "found": AUTO,
    }[str(cell["kept"])]


def _unit_numel(cell: Cell, models: Sequence[Any]) -> int | None:
    """More elements than any layer has, so that at least two are joined."""
    if cell["joined"] == "default":
        return None
    models = [getattr(model, "module", model) for model in models]  # of one in 16 bits
    layers = [layer for model in models for layer in model.decoder.layers]
    return 1 + max(sum(param.numel() for param in layer.parameters()) for layer in layers)


def _ddp_options(cell: Cell) -> dict[str, Any]:
    options: dict[str, Any] = dict(BUFFERS[str(cell["buffers"])])
    if cell["outer"] != "plain":
        outer = "optim" if cell["outer"] == "hybrid" else "no_shard"
        options |= {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer}
    if cell["expert_strategy"] != "same":
        options[EXPERT_STRATEGY] = cell["expert_strategy"]
    if cell["expert_outer"] != "same":
        splits = cell["expert_outer"] == "hybrid"
        options |= {
            EXPERT_INSTANCES: 2 if splits else 1,
            EXPERT_OUTER: "optim" if splits else "no_shard",
        }
    if cell["wire"] == "bf16":
        options["megatron_fsdp_grad_comm_dtype"] = torch.bfloat16
    if cell["graph"] == "on":
        options["check_for_nan_in_grad"] = False
    if cell["units"] == "parts":
        options["megatron_fsdp_enable_fine_grained_param_gather"] = True
    if cell["offload"] == "streamed":
        options["chunked_optimizer_state_offload"] = True
    return options


def _values_of_fp8(models: Sequence[Any]) -> Tensors:
    found = {}
    for number, model in enumerate(models):
        for name, param in model.named_parameters():
            if hasattr(param, "_high_precision_init_val"):
                found[f"{number}.{plain_name(name)}"] = param._high_precision_init_val.to(
                    param.device
                )
    return found


def build(
    cell: Cell, width: str, device: torch.device, whole: Tensors | None = None
) -> TopologyTrainer:
    """Groups have been made. Strategy None is stock DDP. `whole`: is given, by name, the values
    that FP8 weights were made from."""
    case = case_of(cell, width)
    topology = topology_of(cell)
    config = config_of(cell, width)
    models = [chunk_of(cell, width, config, i, device) for i in range(topology.num_chunks)]
    if whole is not None:
        whole.update(_values_of_fp8(models))
    strategy: Any = cell["strategy"]
    ours = strategy is not None
    quantized = has_fp8_weights(cell["precision"])
    if ours:
        ddp = ddp_config(
            case,
            strategy,
            {
                **_ddp_options(cell),
                BUDGET: _budget_gib(cell, models),
                UNIT_NUMEL: _unit_numel(cell, models),
            },
        )
    else:
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=quantized,
            fp8_param_gather=quantized,
        )
    if ours:
        options = muon_options(cell)
    else:
        options = {"use_distributed_optimizer": quantized}
    trainer = wrapped(topology, case, models, strategy, ddp, options)
    if ours:
        for chunk in trainer.chunks:
            count = sum(TO in unit.name for unit in chunk.engine.units)
            assert count == (cell["joined"] == "pairs"), chunk.engine.units
        if cell["kept"] == "found":
            agree_on(trainer.chunks, int(ALL_GIB * GIB))
    return trainer


# The reference.


@dataclass(frozen=True)
class Record:
    """Losses and norms of all steps; the reference's whole tensors: gradients of the first step
    and main weights before and after all. gains: of Muon's matrices, by what the relative error of
    a gradient may be multiplied in the update."""

    losses: list[float]
    norms: list[float]
    gradients: Tensors
    before: Tensors
    after: Tensors
    gains: Mapping[str, float]


def _main_weights(trainer: TopologyTrainer, whole: Tensors) -> Tensors:
    """`whole`: of FP8 weights the values that they were made from, which are not kept of frozen
    ones."""
    if whole:
        mains = put_together(trainer.named_parameters(), trainer.optimizer, main_piece)
        found = {}
        for name, param in trainer.named_parameters():
            found[name] = (
                mains[name] if param.requires_grad else whole.get(name, param.detach()).float()
            )
        return found
    found = {}
    for name, param in trainer.named_parameters():
        found[name] = getattr(param, "main_param", param).detach().float().clone()
    return found


def _gradients(trainer: TopologyTrainer, is_split: bool) -> Tensors:
    if is_split:
        return put_together(
            trainer.named_parameters(),
            trainer.optimizer,
            lambda param, rows: param.main_grad.view(-1)[rows],
        )
    return {
        name: param.main_grad.detach().float().clone()
        for name, param in trainer.named_parameters()
        if param.requires_grad
    }


def _updated(trainer: TopologyTrainer) -> float:
    """The norm before clipping."""
    success, norm, _ = trainer.optimizer.step()
    assert success, "the optimizer skipped the step"
    return float(norm)


def trained_reference(cell: Cell, width: str, rounded: bool = False) -> Record:
    """Stock DDP of the cell, three steps; collective. It quantizes weights as often as ours, where
    that keeps nothing quantized: delayed scaling looks at the history of earlier casts. `rounded`:
    gradients are rounded to bf16 before each update."""
    with memories({**cell, **REFERENCE}):
        return _recorded(cell, width, rounded)


def _recorded(cell: Cell, width: str, rounded: bool) -> Record:
    device = init_topology(topology_of(cell))
    whole: Tensors = {}
    trainer = build({**cell, **REFERENCE}, width, device, whole)
    if cell["fusion"] == "on" or cell["strategy"] == "optim_grads_params":
        for chunk in trainer.chunks:
            switch_off_weight_cache(chunk)
    gains = steps_by_hand(trainer, cell, bool(whole))
    before = _main_weights(trainer, whole)
    gradients = {}
    losses = []
    norms = []
    for step in range(STEPS):
        losses.append(run_schedule(trainer, step))
        if step == 0:
            gradients = _gradients(trainer, bool(whole))
        for _, param in trainer.named_parameters() if rounded else ():
            if param.requires_grad:
                param.main_grad.copy_(param.main_grad.bfloat16())
        norms.append(_updated(trainer))
    record = Record(losses, norms, gradients, before, _main_weights(trainer, whole), gains)
    for chunk in trainer.chunks:
        give_up(chunk)
    return record


def sensitivity(record: Record, other: Record) -> dict[str, float]:
    """By name, how far the movements of two references are apart, relative to that of the first."""
    found = {}
    for name, after in record.after.items():
        found[name] = _relative(
            float((other.after[name] - after).norm()), float((after - record.before[name]).norm())
        )
    return found


# What ours is measured by.


@dataclass
class Finding:
    """One measure: the largest relative error, its bound, and where it is."""

    error: float
    bound: float
    where: str

    @property
    def used(self) -> float:
        """Of the bound, which may be zero."""
        return _relative(self.error, self.bound)

    @property
    def holds(self) -> bool:
        """False for not-a-number as well."""
        return self.error <= self.bound


Findings = dict[str, Finding]
MEASURES = {
    f"{measure}{more}"
    for measure, more in product(
        ("gradient", "movement", "weights at the start"), ("", ", element")
    )
} | {f"{measure}{more}" for measure, more in product(("norm", "loss"), ("", ", later"))}


def _note(findings: Findings, measure: str, found: Finding) -> None:
    """Keeps the worst."""
    other = findings.get(measure)
    if other is None or math.isnan(found.error) or found.used > other.used:
        findings[measure] = found


def _relative(error: float, size: float) -> float:
    return error / size if size > 0 else error


def check_shards(
    findings: Findings,
    measure: str,
    bound: Callable[[str], float],
    trainer: TopologyTrainer,
    local_of: Callable[[Any], torch.Tensor],
    expected: Tensors,
    base: Tensors | None = None,
) -> None:
    """Compares what `local_of` gives of each pair with its part of `expected`, by name. Errors are
    relative to `expected`, less `base` where that is given; collective."""
    by_groups: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
    for name, pair in trainer._pairs():
        if name in expected:
            by_groups.setdefault(shard_groups(pair.group), []).append((name, pair))
    compared = {name for pairs in by_groups.values() for name, _ in pairs}
    assert compared == set(expected), f"names {compared ^ set(expected)}"
    for groups, pairs in by_groups.items():
        sums = []
        peaks = []
        for name, pair in pairs:
            held = pair.sharded.megatron_fsdp_slice
            local = local_of(pair).to(expected[name].device).reshape(-1).double()
            theirs = expected[name].reshape(-1)[held].double()
            if base:
                size = theirs - base[name].reshape(-1)[held].double()
            else:
                size = theirs
            error = local - theirs
            if base:  # the weights themselves are rounded in every step
                error = error.sign() * (error.abs() - UPDATES * theirs.abs()).clamp(min=0)
            sums.append([error.square().sum(), size.square().sum(), local.new_tensor(len(local))])
            peaks.append([_peak(error), _peak(size)])
        added, largest = (torch.stack([torch.stack(r) for r in rows]) for rows in (sums, peaks))
        for group in groups:
            dist.all_reduce(added, group=group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        rows = zip(pairs, added.tolist(), largest.tolist(), strict=True)
        for (name, pair), (error, size, count), (peak, of) in rows:
            assert count == pair.unsharded.numel(), (
                f"{name}: {count} of {pair.unsharded.numel()} are held"
            )
            found = Finding(_relative(math.sqrt(error), math.sqrt(size)), bound(name), name)
            _note(findings, measure, found)
            worst = Finding(_relative(peak, of), PEAK * bound(name), name)
            _note(findings, f"{measure}, element", worst)


def _peak(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude; 0 of nothing. Not-a-number is infinite, or MAX over ranks may lose
    it."""
    if values.numel() == 0:
        return values.new_zeros(())
    return values.abs().max().nan_to_num(nan=math.inf)


# A cell.


@contextlib.contextmanager
def _schedule(cell: Cell) -> Iterator[Any]:
    """Core's schedule, or the one that captures it. Behind it all graphs are forgotten."""
    try:
        if cell["graph"] != "on":
            yield None
        else:
            yield FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=WARMUP)
            assert FullCudaGraphWrapper.cuda_graph["training"] is not None, "no graph was captured"
    finally:
        if cell["graph"] == "on":
            forget_graphs()


def check_cell(cell: Cell, width: str) -> Findings:
    """Trains reference and cell; this rank's findings by measure; collective."""
    if cell["fusion"] == "on":
        patches.install(FUSED_WGRAD)
    reference = trained_reference(cell, width)
    bounds = bounds_of(cell)
    movement: Mapping[str, float] = {}
    if is_sensitive(cell):
        movement = sensitivity(reference, trained_reference(cell, width, rounded=True))
    gc.collect()
    with memories(cell):
        return _measured(cell, width, reference, bounds, movement)


def _measured(
    cell: Cell,
    width: str,
    reference: Record,
    bounds: Bounds,
    movement: Mapping[str, float],
) -> Findings:
    device = init_topology(topology_of(cell), 1 if cell["outer"] == "plain" else 2)
    stand_in = cell["target"] == "cpu" and cell["graph"] == "layers"
    trainer = build(cell, width, device)
    if cell["start"] == "meta":
        trainer.load(reference.before)
    if stand_in:
        for chunk in trainer.chunks:
            put_graphs_into(chunk, FakeGraphs())
    findings: Findings = {}
    check_shards(
        findings,
        "weights at the start",
        lambda name: 0.0,
        trainer,
        lambda pair: pair.sharded._local_tensor,
        reference.before,
    )
    with _schedule(cell) as schedule, activations_kept(cell, trainer):
        _train(findings, bounds, trainer, reference, schedule)
    if cell["kept"] == "found":
        assert all(chunk.engine.budget.chosen_for for chunk in trainer.chunks)
    if cell["graph"] == "layers":
        graphs = [chunk._layers for chunk in trainer.chunks]
        for one in graphs:
            assert one.replayed, graphs
            assert not one.ran_eagerly, graphs
    check_shards(
        findings,
        "movement",
        lambda name: max(
            movement_of(cell, bounds, reference.gains.get(name)),
            SENSITIVITY * movement.get(name, 0.0),
        ),
        trainer,
        lambda pair: pair.sharded._local_tensor,
        reference.after,
        reference.before,
    )
    return findings


def _train(
    findings: Findings, bounds: Bounds, trainer: TopologyTrainer, reference: Record, schedule: Any
) -> None:
    """All steps; afterwards the optimizer's weights can be read. Memory goes away once between two,
    and comes back."""
    for step in range(STEPS):
        loss = run_schedule(trainer, step, schedule=schedule)
        if step == 0:
            check_shards(
                findings,
                "gradient",
                lambda name: bounds.gradient,
                trainer,
                lambda pair: pair.sharded.grad._local_tensor,
                reference.gradients,
            )
        norm = _updated(trainer)
        later = "" if step == 0 else ", later"
        for measure, bound, mine, theirs in (
            ("loss", bounds.loss, loss, reference.losses[step]),
            ("norm", bounds.norm, norm, reference.norms[step]),
        ):
            error = _relative(abs(mine - theirs), abs(theirs))
            where = f"step {step}: {mine:.7g} for {theirs:.7g}"
            found = Finding(error, bounds.later if step else bound, where)
            _note(findings, measure + later, found)
        if step == 0 and schedule is None:  # a graph has addresses
            release_memory(trainer.chunks, trainer.optimizer)
            return_memory(trainer.chunks, trainer.optimizer)
    for chunk in trainer.chunks:
        chunk.stop_communication()
    check_export(trainer)


def wrong(found: Findings) -> list[str]:
    """The measures that do not hold on this rank."""
    return [
        f"{name}: off by {one.error:.2e}, {one.bound:.2e} allowed ({one.where})"
        for name, one in found.items()
        if not one.holds
    ]


def checked_cell(cell: Cell, width: str) -> str:
    """How much of its bound each measure used, of a cell within all of them; collective."""
    found = check_cell(cell, width)
    assert wrong(found) == []
    assert set(found) == MEASURES
    return ", ".join(f"{name} {one.used:.2f}" for name, one in found.items())
