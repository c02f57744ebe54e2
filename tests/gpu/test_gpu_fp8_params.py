"""Quantized weights in training, on two GPUs: Megatron's wrapper against stock DDP with
`fp8_param_gather`, which quantizes with Transformer Engine's own function.

    python -m pytest -q -rA tests/gpu/test_gpu_fp8_params.py
"""

from __future__ import annotations

import gc
import os
from typing import Any
from unittest import mock

import torch

from megatron_fsdp_adapter import export_weights
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    init_megatron,
    train_step,
)
from tests.lib.gpu.fp8 import CASE, RECIPES, quantized_of, same_weights
from tests.lib.gpu.gpu_ranks import DETERMINISTIC, Check, Outcomes, expecting
from tests.lib.gpu.runs import fp8, te_trainer
from tests.lib.quantized.te_checks import same

CHECKS = (
    "quantized/weights.py",
    "quantized/quantizers.py",
    "quantized/params.py",
    "quantized/columns.py",
)

STEPS = 5
BOUND = 2e-2
"""Relative, of losses whose gradients were added up in another order."""


def trainer_of(case: Case, recipe: str, strategy: str | None, device: torch.device) -> Trainer:
    """A GPT whose weights are quantized from the start."""
    return te_trainer(case, strategy, device, fp8(recipe, fp8_param=True))


def compare(ours: Trainer, theirs: Trainer, label: str, count: int = 4 * CASE.num_layers) -> int:
    mine, other = ((quantized_of(one), one.params()) for one in (ours, theirs))
    same_weights(mine, other, label, count)
    return count


def no_transposes(trainer: Trainer) -> list[str]:
    """Names of weights from which TE has derived columns in a forward so far; filled as it goes."""
    found: list[str] = []

    def look(module: Any, *rest: Any) -> None:
        for name, param in module._parameters.items():
            derived = getattr(param, "_transpose", None)
            if derived is None:
                derived = getattr(param, "_columnwise_data", None)
            if derived is not None:
                found.append(f"{type(module).__name__}.{name}")

    for module in trainer.wrapper.modules():
        if hasattr(module, "param_init_meta"):
            module.register_forward_hook(look)
    return found


def trains_as_ddp(rank: int, world: int, recipe: str, strategy: str, microbatches: int) -> str:
    device = init_megatron()
    case = CASE.but(microbatches=microbatches)
    theirs = trainer_of(case, recipe, None, device)
    ours = trainer_of(case, recipe, strategy, device)
    derived = no_transposes(ours)
    label = f"{recipe}, {strategy}"
    losses = []
    # Sharded gradients are added up over ranks first, and over microbatches then.
    exact = microbatches == 1 or strategy in ("no_shard", "optim")
    checked = compare(ours, theirs, f"{label}, made")
    for step in range(STEPS):
        data = batches(case, step, rank, device)
        mine = train_step(ours, data)[0]
        other = train_step(theirs, data)[0]
        losses.append(mine)
        if exact:
            assert mine == other, (label, step, mine, other)
            compare(ours, theirs, f"{label}, step {step}")
        assert abs(mine - other) < BOUND * other, (label, step, mine, other)
    assert not derived, f"columns were derived in forward: {sorted(set(derived))}"
    return f"{checked} weights, {'bits' if exact else 'bounds'}, losses {losses}"


def fused_trains_as_ddp(
    rank: int, world: int, recipe: str, strategy: str, microbatches: int
) -> str:
    """Modules write weight gradients into the bucket, which holds garbage before: losses and
    gradient norms are DDP's, whose modules add to zeroes."""
    patches.install(FUSED_WGRAD)
    case = CASE.but(microbatches=microbatches, fused=True, clip=1e6)  # norms, and no clipping
    device = init_megatron()
    theirs = trainer_of(case, recipe, None, device)
    with mock.patch.dict(os.environ, {"MEGATRON_FSDP_ADAPTER_POISON": "1"}):
        ours = trainer_of(case, recipe, strategy, device)
    writers = {p.managed.writer for p in ours.wrapper.engine.pairs if p.group.key.quantized}
    assert WgradProtocol.AUTOGRAD not in writers, writers
    compare(ours, theirs, f"{recipe}, {strategy}, made")
    furthest = 0.0
    is_exact = True
    for step in range(STEPS):
        data = batches(case, step, rank, device)
        pairs = zip(train_step(ours, data), train_step(theirs, data), strict=True)
        for what, (mine, other) in zip(("loss", "norm"), pairs, strict=True):
            off = abs(mine - other) / other
            assert off < BOUND, (recipe, strategy, step, what, mine, other)
            furthest = max(furthest, off)
            is_exact = is_exact and mine == other
    for name, main in ours.params().items():
        assert bool(main.isfinite().all()), name
    said = "/".join(sorted(writer.value for writer in writers))
    return f"{said}: {'bits' if is_exact else f'off by {furthest:.2g}'}"


def holds_bytes(rank: int, world: int, recipe: str) -> str:
    """Between steps, sharded weights are their main weights and moments: no bytes, and no
    transposes."""
    device = init_megatron()
    case = CASE.but(num_layers=4, hidden=1024, heads=8, ffn=4096)
    small = trainer_of(CASE, recipe, "optim_grads_params", device)
    train_step(small, batches(CASE, 0, rank, device))  # libraries take their workspaces
    del small
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    trainer = trainer_of(case, recipe, "optim_grads_params", device)
    for step in range(2):
        train_step(trainer, batches(case, step, rank, device))
    trainer.wrapper.zero_grad_buffer()
    engine = trainer.wrapper.engine
    engine.gather.reshard_all()
    torch.cuda.synchronize()
    held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    groups = engine.groups
    expected = 12 * sum(g.shards.held.layout.shard_numel for g in groups)
    # What the first trainer had leaves by and by, some of it after `before` was read.
    assert 0.99 * expected < held < 1.02 * expected + 2**22, (held, expected)
    for group in groups:
        for param in group.params if group.key.quantized else ():
            for name in ("_transpose", "_columnwise_data"):
                assert param.__dict__.get(name) is None, name
    return f"{held / 2**20:.1f} MiB held, {expected / 2**20:.1f} by the sum of buffers"


def exports_its_bytes(rank: int, world: int, recipe: str) -> str:
    """`export_weights(quantized=True)` of bytes that are not kept has those that are gathered."""
    device = init_megatron()
    trainer = trainer_of(CASE, recipe, "optim_grads_params", device)
    for step in range(2):
        train_step(trainer, batches(CASE, step, rank, device))
    exported = dict(export_weights(trainer.wrapper, quantized=True))
    gathered = quantized_of(trainer)
    for name, (data, _) in gathered.items():
        same(exported[name].view(torch.uint8), data.view(torch.uint8), f"{recipe} {name}")
    return f"{len(gathered)} weights"


DEVICE_CHECKS = {
    f"{recipe}, {strategy}, {count} microbatches{label}": Check(check, (recipe, strategy, count))
    for label, check in (("", trains_as_ddp), (", fused", fused_trains_as_ddp))
    for recipe in RECIPES
    for strategy in STRATEGIES
    for count in (1, 3)
}
DEVICE_CHECKS |= {f"{recipe}, memory": Check(holds_bytes, (recipe,)) for recipe in RECIPES}
DEVICE_CHECKS |= {f"{recipe}, exported": Check(exports_its_bytes, (recipe,)) for recipe in RECIPES}
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=400.0, needs=("te",), environment=DETERMINISTIC)

test_quantized_weights_train_as_under_ddp = expecting(OUTCOMES)
