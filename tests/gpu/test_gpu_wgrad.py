"""How modules write fused weight gradients: every class of Transformer Engine that can, in every
precision that is accepted, on the release that is installed. Training beside stock DDP:
test_gpu_matrix.py.

    python -m pytest -q -rA tests/gpu/test_gpu_wgrad.py      two GPUs of the Hopper kind or newer
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter.core.config import STRATEGIES, EngineConfig, MixedPrecisionPolicy
from megatron_fsdp_adapter.core.distributed_index import FSDPDistributedIndex
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.engine.partition import managed_params, partition
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.runtime.device import CudaRuntime
from megatron_fsdp_adapter.megatron.layers import fused_wgrad, wgrad_probe
from megatron_fsdp_adapter.megatron.layers.wgrad_probe import MAKERS, Observed, ProbedPrecision
from tests.lib.gpt.gather_full import full_values
from tests.lib.gpt.topologies import local_of
from tests.lib.gpu.gpu_ranks import DETERMINISTIC, Check, Outcomes, expecting

CHECKS = (
    "megatron/layers/fused_wgrad.py",
    "megatron/layers/wgrad_probe.py",
    "core/engine/wgrad.py",
)

RECIPES = ("bf16", "tensorwise", "delayed", "blockwise")
WEIGHTS = ("tensorwise weights", "delayed weights", "blockwise weights")
"""The same recipes, and weights that are quantized from the start. Training with them:
test_gpu_fp8_params.py."""
CLASSES = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
SIZE = 256
TOKENS = 128


def _recipe(name: str) -> Any:
    from transformer_engine.common import recipe

    return {
        "tensorwise": recipe.Float8CurrentScaling,
        "blockwise": recipe.Float8BlockScaling,
        "delayed": functools.partial(recipe.DelayedScaling, reduce_amax=False),
    }[name]()


def context_of(name: str) -> Callable[[], AbstractContextManager[Any]]:
    if name == "bf16":
        return nullcontext
    return functools.partial(wgrad_probe.te_context, "autocast", _recipe(name))


def precision_of(name: str) -> ProbedPrecision:
    recipe = name.removesuffix(" weights")
    if name not in WEIGHTS:
        return ProbedPrecision(name, context_of(name))
    made = functools.partial(wgrad_probe.te_context, "quantized_model_init", _recipe(recipe))
    return ProbedPrecision(name, context_of(recipe), made)


class Pair(nn.Module):
    """One fused layer of Transformer Engine, called `calls` times in a forward."""

    def __init__(self, name: str, calls: int) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        sizes = (2, SIZE, SIZE) if name == "GroupedLinear" else (SIZE, SIZE)
        self.name = name
        self.calls = calls
        self.layer = getattr(te, name)(
            *sizes,
            bias=False,
            params_dtype=torch.bfloat16,
            device="cuda",
            fuse_wgrad_accumulation=True,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            if self.name == "GroupedLinear":
                x = self.layer(x, [TOKENS, 0])
            else:
                x = self.layer(x)
        return x


class Model(nn.Module):
    def __init__(self, name: str, calls: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Pair(name, calls) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def _model(name: str, calls: int) -> Model:
    torch.manual_seed(1)
    model = Model(name, calls)
    torch.manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 2:
                param.copy_(torch.randn_like(param) / SIZE**0.5)
    return model


def _gradients(model: Model, context: Any, microbatches: int, run: Callable[..., Any]) -> None:
    for index in range(microbatches):
        torch.manual_seed(10 + index + 100 * dist.get_rank())
        x = torch.randn(TOKENS, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        grad = torch.randn(TOKENS, SIZE, dtype=torch.bfloat16, device="cuda")
        run(x, grad, index == microbatches - 1)


def _reference(name: str, calls: int, context: Any, microbatches: int) -> dict[str, torch.Tensor]:
    """The contract of Megatron's DDP: a zeroed float32 `main_grad`, and no word to modules."""
    model = _model(name, calls)
    for param in model.parameters():
        if param.ndim == 2:
            param.main_grad = torch.zeros_like(param, dtype=torch.float32)  # type: ignore[attr-defined]

    def run(x: torch.Tensor, grad: torch.Tensor, is_last: bool) -> None:
        with context():
            output = model(x)
        output.backward(grad)

    _gradients(model, context, microbatches, run)
    found = {}
    for key, param in model.named_parameters():
        total = getattr(param, "main_grad", param.grad)
        assert total is not None, key
        total = total.float()
        dist.all_reduce(total)
        found[key] = total / dist.get_world_size()
    return found


def _ours(
    name: str, calls: int, recipe: str, strategy: str, microbatches: int, slots: bool
) -> tuple[dict[str, torch.Tensor], str]:
    model, context, row = _model(name, calls), context_of(recipe), STRATEGIES[strategy]
    device = torch.device("cuda", torch.cuda.current_device())
    group: Any = dist.group.WORLD
    index = FSDPDistributedIndex(group, device_type="cuda", grad_scale=1.0 / dist.get_world_size())
    precisions = [ProbedPrecision("weights")]
    if recipe != "bf16":
        precisions.append(ProbedPrecision(recipe, context))
    observe = functools.partial(
        wgrad_probe.observed, precisions=tuple(precisions), main_dtype=torch.float32, device=device
    )
    units = {f"units.{i}": unit for i, unit in enumerate(model.units)}
    entries = []
    for entry in managed_params(model, units):
        entries.append(replace(entry, writer=fused_wgrad.grad_writer(entry, observe)))
    plans = partition(units, entries)
    config = EngineConfig(
        row, MixedPrecisionPolicy(), weight_slots=slots, bucket_slots=slots, poison_buffers=True
    )
    engine = FsdpEngine(model, plans, dict(index.domains), config, CudaRuntime(device))

    def run(x: torch.Tensor, grad: torch.Tensor, is_last: bool) -> None:
        engine.microbatch(last=is_last)
        with context():
            output = model(x)
        output.backward(grad)

    _gradients(model, context, microbatches, run)
    engine.finish_grads()
    named = [(pair.managed.fqns[0], pair) for pair in engine.pairs]
    found = full_values(named, lambda pair: local_of(pair.grad).float())
    writers = {p.managed.writer.value for p in engine.pairs if p.unsharded.ndim == 2}
    return found, "/".join(sorted(writers))


def writes_what_ddp_writes(rank: int, world: int, name: str, recipe: str) -> str:
    """Gradients of two units under poison, every strategy; one call and two of a module in a
    forward; one microbatch and three; in slots."""
    said = []
    for calls, microbatches in ((1, 1), (1, 3), (2, 1), (2, 2)):
        expected = _reference(name, calls, context_of(recipe), microbatches)
        for strategy, row in STRATEGIES.items():
            for slots in (False, True) if row.shard_weights else (False,):
                found, writers = _ours(name, calls, recipe, strategy, microbatches, slots)
                label = f"{strategy}, {calls} calls, {microbatches} microbatches, slots {slots}"
                for key, value in expected.items():
                    error = (found[key] - value).norm() / value.norm().clamp(min=1e-6)
                    assert error < 2e-2, f"{label}: {key} is off by {error:.3g} ({writers})"
                if calls == microbatches == 1 and not slots:
                    said.append(f"{strategy}: {writers}")
    return "; ".join(said)


def guarantee_removed_is_seen(rank: int, world: int) -> str:
    """Taken for one that overwrites, a layer in FP8 adds to a bucket that was not cleared."""
    seen = []
    blind = Observed(adds=True, overwrites_in_backward=True)
    for name in ("LayerNormLinear", "LayerNormMLP"):
        with mock.patch.object(wgrad_probe, "observed", lambda *asked, **options: blind):
            found, writers = _ours(name, 1, "tensorwise", "optim_grads_params", 1, False)
        assert writers == WgradProtocol.OVERWRITES.value
        broken = [key for key, value in found.items() if value.isnan().any()]
        assert broken, f"{name}: nothing is NaN"
        seen.append(f"{name}: NaN in {len(broken)} of {len(found)}")
    return "; ".join(seen)


def is_run_with_quantized_weights(rank: int, world: int, name: str, recipe: str) -> str:
    """Its protocol is seen, not taken to be "adds" for want of a run, and it keeps to one."""
    seen = wgrad_probe.observe(
        MAKERS[f"transformer_engine.{name}"],
        precision_of(recipe),
        torch.bfloat16,
        torch.float32,
        torch.device("cuda", torch.cuda.current_device()),
    )
    assert seen.adds or seen.overwrites_in_backward or seen.overwrites_in_forward, seen
    return str(seen)


DEVICE_CHECKS = {
    **{
        f"{name}, {recipe}": Check(is_run_with_quantized_weights, (name, recipe))
        for name in CLASSES
        for recipe in WEIGHTS
    },
    **{
        f"{name}, {recipe}": Check(writes_what_ddp_writes, (name, recipe))
        for name in CLASSES
        for recipe in RECIPES
    },
    "guarantee removed": Check(guarantee_removed_is_seen),
}
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=240.0, needs=("te",), environment=DETERMINISTIC)

test_fused_weight_gradients = expecting(OUTCOMES)
