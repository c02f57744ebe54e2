"""At real width, on two GPUs: collectives beside compute; gradient norms in FP8; and experts on one
data-parallel rank, which under ZeRO-3 have no bucket, and train as under `optim`, bit for bit where
two runs of it agree."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_fsdp_adapter.core.topology import EXPERT
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO, BUDGET_OPTION
from tests.lib.gpt.checks import relative
from tests.lib.gpt.gpt import Case, batches, build_trainer, give_up, init_megatron, train_step
from tests.lib.gpu import experts as moe
from tests.lib.gpu.device_memory import run_steps
from tests.lib.gpu.gpu_ranks import DETERMINISTIC, Check, Outcomes, expecting
from tests.lib.gpu.runs import COPY_ENGINES, SLOTS, ZERO_1, ZERO_3, Fields, fp8, te_layers

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from lib.bench_trace import budget, budget_text, read_events

CHECKS = ("core/engine/gather.py", "core/engine/reduce.py", "core/topology.py")

LONG_KERNELS = Case(
    num_layers=4,
    hidden=4096,
    heads=32,
    ffn=16384,
    vocab=8192,
    seq=4096,
    batch=1,
    microbatches=2,
    bf16=True,
)
CASE = Case(
    num_layers=2,
    hidden=4096,
    heads=32,
    ffn=14336,
    vocab=1000,
    seq=1024,
    batch=1,
    swiglu=True,
    bias=False,
    bf16=True,
    microbatches=3,
    lr=1e-4,
)
KIND = moe.KINDS["TEGroupedMLP, bf16"]
FUSED = "alltoall, fused"
FIELDS: Mapping[str, Fields] = {
    "alltoall": moe.DISPATCHERS["alltoall"],
    FUSED: {"moe_token_dispatcher_type": "alltoall", "gradient_accumulation_fusion": True},
}
NEAR = 2e-2
"""Relative, of losses and norms whose sums are in other orders: a token may change its expert."""
OPTIONS: Mapping[str, Fields] = {
    "plain": {},
    "slots": SLOTS,
    "parts": {"megatron_fsdp_enable_fine_grained_param_gather": True},
}
Run = tuple[list[tuple[float, float]], dict[str, torch.Tensor], float]


def _run(rank: int, dispatcher: str, strategy: str, ddp: Fields) -> Run:
    """(loss, norm) of three steps, this rank's main weights of experts after, peak in GiB."""
    device = moe.init_experts()
    torch.cuda.reset_peak_memory_stats()
    trainer = moe.trainer_of(KIND, FIELDS[dispatcher], strategy, device, ddp, CASE)
    steps = [train_step(trainer, batches(CASE, step, rank, device)) for step in range(3)]
    trainer.wrapper.stop_communication()
    engine = trainer.wrapper.engine
    experts = [group for group in engine.groups if group.key.domain == EXPERT]
    assert experts
    assert all(group.grads.bucket is group.grads.main for group in experts)
    for group in experts:
        assert group.is_single_rank == (strategy == ZERO_3)
    engine.to_sharded()
    weights = {}
    for pair in engine.pairs:
        if pair.group.key.domain == EXPERT:
            weights[pair.managed.fqns[0]] = pair.sharded._local_tensor.cpu().clone()
    peak = torch.cuda.max_memory_allocated() / 2**30
    del trainer, engine, experts
    gc.collect()
    torch.cuda.empty_cache()
    return steps, weights, peak


def _differing(one: Run, other: Run) -> int:
    return sum(not torch.equal(one[1][name], value) for name, value in other[1].items())


def trains_as_optim(rank: int, world: int, name: str, dispatcher: str) -> str:
    """Everything else is kept by a budget, so that all sums are in one order."""
    expected, again = (_run(rank, dispatcher, ZERO_1, {}) for _ in range(2))
    found = _run(rank, dispatcher, ZERO_3, {**OPTIONS[name], BUDGET_OPTION: 100.0})
    plain = _run(rank, dispatcher, ZERO_3, OPTIONS[name])
    same = expected[0] == again[0] and _differing(expected, again) == 0
    told = (
        f"two runs of optim {'agree' if same else 'differ'}; steps {expected[0]}, {found[0]}, "
        f"{plain[0]}; peaks {expected[2]:.2f}, {found[2]:.2f}, without budget {plain[2]:.2f} GiB"
    )
    if same:
        assert found[0] == expected[0], told
        assert _differing(found, expected) == 0, told
    for run in (found, plain):
        for mine, theirs in zip(run[0], expected[0], strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert relative(a, b) <= NEAR, told
    return told


def overlap(rank: int, world: int, strategy: str) -> str:
    """Collectives run while compute kernels do: at least a tenth of their time. How much depends on
    the host too, which has to launch kernels faster than the device runs them."""
    device = init_megatron()
    trainer = build_trainer(LONG_KERNELS, strategy, device)
    run_steps(trainer, rank, 3, device)
    torch.cuda.synchronize()
    if rank != 0:
        run_steps(trainer, rank, 2, device)
        return "traced on the first rank"
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run_steps(trainer, rank, 2, device)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = budget(read_events(path))
    communication = found["beside"] + found["exposed"]
    assert communication > 0, "no NCCL kernel in the trace"
    assert found["beside"] >= 0.1 * communication, found
    return budget_text(strategy, found)


# Gradient norms of the first steps under FP8 compute, with weight gradients in the bucket: small
# shapes hid that buckets were added to which nothing had cleared.

NORMS = Case(
    num_layers=2,
    hidden=4096,
    heads=32,
    ffn=14336,
    vocab=8192,
    seq=4096,
    batch=1,
    swiglu=True,
    bias=False,
    bf16=True,
    lr=1e-5,
    weight_decay=0.0,
    fused=True,
)
BOUND = 1e-2


NORMS_OF: Mapping[str, Fields] = {
    "plain": {},
    "slots": SLOTS,
    "copy engines": COPY_ENGINES,
    "a budget that is found": {BUDGET_OPTION: AUTO},
}


def norms(case: Case, strategy: str | None, recipe: str, ddp: Fields) -> list[float]:
    device = init_megatron()
    with te_layers(fp8(recipe)):
        trainer = build_trainer(case, strategy, device, ddp=ddp)
    data = batches(case, 0, torch.distributed.get_rank(), device)
    found = [train_step(trainer, data)[1] for _ in range(6)]  # a budget is found in the fourth
    if strategy is None:
        give_up(trainer.wrapper)
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return found


def norms_are_ddps(rank: int, world: int, recipe: str, microbatches: int) -> str:
    patches.install(FUSED_WGRAD)
    case = NORMS.but(microbatches=microbatches)
    expected = norms(case, None, recipe, {})
    told = []
    for name, ddp in NORMS_OF.items():
        found = norms(case, ZERO_3, recipe, ddp)
        off = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        assert off <= BOUND, (name, found, expected)
        told.append(f"{name} off by {off:.2%}")
    return ", ".join(told)


OVERLAPS = {f"overlap, {name}": Check(overlap, (name,)) for name in (ZERO_1, ZERO_3)}
EXPERTS = {
    name: Check(trains_as_optim, (name, dispatcher))
    for name, dispatcher in (("plain", "alltoall"), ("slots", FUSED), ("parts", FUSED))
}
OF_NORMS = {
    f"norms, {recipe}, {count} microbatches": Check(norms_are_ddps, (recipe, count))
    for recipe, count in (("tensorwise", 3), ("delayed", 1))
}
OUTCOMES = Outcomes(OVERLAPS, timeout_s=100.0)
NORM_OUTCOMES = Outcomes(OF_NORMS, timeout_s=150.0, needs=("te", "fp8"))
OF_EXPERTS = {
    name: Outcomes({name: check}, timeout_s=150.0, environment=DETERMINISTIC)
    for name, check in EXPERTS.items()
}
"""Processes for each: what core's experts have trained stays in memory, under its DDP as well."""

test_collectives_beside_compute = expecting(OUTCOMES)
test_norms_in_fp8_are_those_of_ddp = expecting(NORM_OUTCOMES)

test_experts_on_one_rank_each = expecting(*OF_EXPERTS.values())
