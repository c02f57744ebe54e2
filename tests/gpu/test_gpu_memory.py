"""What the engine holds, at most and over many steps, on two GPUs, from the allocator's records."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.plan.memory import (
    Precision,
    bytes_between_steps,
)
from tests.lib.gpt.gpt import (
    Case,
    Trainer,
    batches,
    build_model,
    build_trainer,
    forward_backward,
    init_megatron,
)
from tests.lib.gpu.device_memory import (
    SMALL,
    forget_grads,
    formula,
    requested_now,
    run_steps,
    stays_flat,
    warm_libraries,
)
from tests.lib.gpu.gpu_ranks import Check, Outcomes, expecting

CHECKS = ("core/engine/buffer.py", "core/runtime/device.py", "plan/memory.py")

WIDE = Case(
    num_layers=4,
    hidden=512,
    heads=8,
    ffn=2048,
    vocab=8192,
    seq=512,
    batch=2,
    microbatches=2,
    bf16=True,
)


def held_bytes(rank: int, world: int, strategy: str) -> str:
    """Between two steps the allocator holds what the formula says, and nothing after deletion."""
    device = init_megatron()
    warm_libraries(WIDE, rank, device)
    RotaryEmbedding.forward.cache_clear()  # core caches the angles, of deleted models too
    gc.collect()
    before = requested_now()
    trainer = build_trainer(WIDE, strategy, device)
    run_steps(trainer, rank, 2, device)
    forget_grads(trainer)
    trainer.wrapper.engine.gather.reshard_all()  # what the next forward has gathered ahead
    torch.cuda.synchronize()
    RotaryEmbedding.forward.cache_clear()
    expected = bytes_between_steps(formula(trainer, rank, Precision()))
    held = requested_now() - before
    allocated = torch.cuda.memory_allocated()
    del trainer
    gc.collect()
    torch.cuda.synchronize()
    left = requested_now() - before
    assert expected <= held - left <= expected + SMALL, (held, left, expected)
    assert left <= SMALL, f"{left} bytes are left after the model was deleted"
    return f"held {held}, formula {expected}, left {left}, allocated in all {allocated}"


@dataclass
class Tally:
    """The most bytes of gathered weights, and of reduce buckets, that exist at once."""

    trainer: Trainer
    gathered: int = 0
    buckets: int = 0
    units: set[str] = field(default_factory=set)

    def watch(self) -> None:
        runtime = self.trainer.wrapper.engine.runtime
        for name in ("allocate", "release"):
            setattr(runtime, name, self._counting(getattr(runtime, name)))

    def _counting(self, original: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def counted(flat: torch.Tensor) -> None:
            original(flat)
            groups = self.trainer.wrapper.engine.groups
            weights = [full for group in groups for full in group.weights.unsharded]
            self.gathered = max(self.gathered, _allocated(weights))
            self.buckets = max(self.buckets, _allocated(group.grads.bucket for group in groups))

        return counted


def _allocated(buffers: Iterable[Any]) -> int:
    return sum(buffer.tensor.untyped_storage().nbytes() for buffer in buffers)


def _floor_activations(case: Case, rank: int, device: torch.device) -> int:
    """The peak of one forward and backward of the bare model over its weights."""
    model = build_model(case, device)
    trainer = Trainer(case, _Bare(model), _Bare(model), None)
    data = batches(case.but(microbatches=1), 0, rank, device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward_backward(trainer, data)
    return torch.cuda.max_memory_allocated() - before


class _Bare(torch.nn.Module):
    """The unwrapped model, with the two calls that a training step makes on a wrapper."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = module.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def zero_grad_buffer(self) -> None:
        self.module.zero_grad(set_to_none=True)


def peak_bytes(rank: int, world: int) -> str:
    """Communication memory of ZeRO-3: gathered at most the two largest units, the root and the
    last unit, which stay from forward to backward; at most two buckets. The allocator's peak of a
    whole step is within that, the shards, and what the bare model needs for activations."""
    device = init_megatron()
    warm_libraries(WIDE, rank, device)
    activations = _floor_activations(WIDE, rank, device)
    gc.collect()
    trainer = build_trainer(WIDE, "optim_grads_params", device)
    run_steps(trainer, rank, 2, device)
    forget_grads(trainer)
    tally = Tally(trainer)
    tally.watch()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_steps(trainer, rank, 2, device)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return _within_peaks(trainer, rank, tally, peak, activations)


def _within_peaks(trainer: Trainer, rank: int, tally: Tally, peak: int, activations: int) -> str:
    units = trainer.wrapper.engine.units
    root = units[-1]
    others = units[:-1]
    sizes = sorted(unit.weight_bytes for unit in others)
    gather_bound = root.weight_bytes + others[-1].weight_bytes + sum(sizes[-2:])
    buckets = sorted(sum(group.grads.bucket.nbytes for group in unit.groups) for unit in units)
    bucket_bound = sum(buckets[-2:])
    shards = formula(trainer, rank, Precision())["gradient shard"]
    text = (
        f"gathered {tally.gathered} <= {gather_bound}, buckets {tally.buckets} <= {bucket_bound}, "
        f"peak {peak} with activations {activations}, shards {shards}"
    )
    assert 0 < tally.gathered <= gather_bound, text
    assert 0 < tally.buckets <= bucket_bound, text
    # Backward's gradients of the unit that is being copied exist beside its bucket.
    grads = max(sizes)
    bound = activations + gather_bound + bucket_bound + shards + grads
    assert peak <= bound, f"{text}: more than {bound}"
    return text


def flat_memory(rank: int, world: int, strategy: str) -> str:
    return stays_flat(build_trainer(WIDE, strategy, init_megatron()), rank, 500)


DEVICE_CHECKS = {
    **{f"held, {name}": Check(held_bytes, (name,)) for name in STRATEGIES},
    "peak": Check(peak_bytes),
    **{f"flat, {name}": Check(flat_memory, (name,)) for name in ("optim", "optim_grads_params")},
}
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=150.0)

test_on_two_gpus = expecting(OUTCOMES)
