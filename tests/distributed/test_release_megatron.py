"""Megatron models whose memory goes away between steps, by `release_memory` and by the calls of
core's own reinforcement learning, train like those whose memory stays, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_adapter import export_weights, release_memory, return_memory
from megatron_fsdp_adapter.core.runtime.device import storage_bytes
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.distributed.launch import run_ranks
from tests.distributed.test_release_memory import buffers, states
from tests.quantized import emulated
from tests.quantized.emulated import PLANES, emulated_parameter

CASE = Case(num_layers=3, bf16=True, tied=True, swiglu=True, bias=False, microbatches=2)


def freeze(model: torch.nn.Module) -> None:
    model.module.decoder.layers[0].requires_grad_(False)


def freeze_flat(model: torch.nn.Module) -> None:
    """Frozen weights that are views of one storage, as those of cuDNN's recurrent layers."""
    freeze(model)
    params = list(model.module.decoder.layers[0].parameters())
    flat = torch.cat([param.detach().view(-1) for param in params])
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.data = part.view(param.shape)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "slots": {"ddp": {"fsdp_double_buffer": True}},
    "frozen": {"change": freeze},
    "left alone": {"change": freeze_flat, "module_placements": {"decoder.layers.0": "leave"}},
}


def inner(trainer: Trainer) -> Any:
    chained = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    return [one.optimizer for one in chained]


def by_ours(trainer: Trainer, data: Any) -> None:
    model, optimizer = trainer.wrapper, trainer.optimizer
    release_memory(model, optimizer, keep=["main_weights"])
    sum(tensor.float().sum() for _, tensor in export_weights(model))
    released = release_memory(model, optimizer)
    assert released["main_weights"] > 0
    slots = [slot for slot, _ in model.engine.memory.storages()["slots"]]
    away = [*buffers(model), *(state for one in inner(trainer) for state in states(one)), *slots]
    left = [param for name, param in model.named_parameters() if "layers.0." in name]
    left = [param for param in left if not hasattr(param, "_local_tensor")]
    assert not any(map(storage_bytes, [*away, *left]))
    with pytest.raises(RuntimeError, match="return_memory"):
        forward_backward(trainer, data, forward_only=True)
    with pytest.raises(RuntimeError, match="return_memory"):
        trainer.optimizer.step()
    with pytest.raises(RuntimeError, match="return_memory"):
        model.state_dict_for_save_checkpoint()
    with pytest.raises(RuntimeError, match="return_memory"):
        trainer.optimizer.state_dict()
    return_memory(model, optimizer)


def by_core(trainer: Trainer, data: Any) -> None:
    model, optimizer = trainer.wrapper, trainer.optimizer
    model.offload_grad_buffers()
    optimizer.offload_to_cpu()
    assert not any(storage_bytes(state) for one in inner(trainer) for state in states(one))
    with torch.no_grad():
        forward_backward(trainer, data, forward_only=True)  # generation reads weights alone
    with pytest.raises(RuntimeError, match="gradients of this model were released"):
        forward_backward(trainer, data)
    model.restore_grad_buffers()
    optimizer.restore_from_cpu()
    model.param_and_grad_buffer.offload_to_cpu()
    assert not any(storage_bytes(one) for one in buffers(model) if not _in_slot(model, one))
    model.param_and_grad_buffer.reload_from_cpu()


def _in_slot(model: Any, tensor: torch.Tensor) -> bool:
    slots = [slot for slot, _ in model.engine.memory.storages()["slots"]]
    return any(tensor.untyped_storage()._cdata == slot.untyped_storage()._cdata for slot in slots)


def _trains_on(rank: int, world: int, strategy: str, variants: Any) -> None:
    device = init_megatron()
    for name in variants:
        if name == "slots" and strategy != "optim_grads_params":
            continue
        plain, trainer = (
            build_trainer(CASE, strategy, device, **VARIANTS[name]) for _ in range(2)
        )
        for step in range(4):
            data = batches(CASE, step, rank, device)
            one, other = train_step(plain, data), train_step(trainer, data)
            assert one == other, (name, step)
            forward_backward(plain, data, forward_only=True)
            plain.wrapper.start_param_sync()
            trainer.wrapper.start_param_sync()
            if step < 3:
                (by_core if step == 1 else by_ours)(trainer, data)
        mine, theirs = trainer.params(), plain.params()
        assert all(torch.equal(value, theirs[key]) for key, value in mine.items()), name
        for a, b in zip(inner(trainer), inner(plain), strict=True):
            for one, other in zip(states(a), states(b), strict=True):
                assert torch.equal(one, other), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_goes_on_bit_for_bit(strategy: str) -> None:
    run_ranks(_trains_on, 2, strategy, ("plain", "slots"), timeout=400)


def test_weights_that_are_left_alone_go_and_return() -> None:
    run_ranks(_trains_on, 1, "optim_grads_params", ("left alone",), timeout=400)


def _quantized(rank: int, world: int) -> None:
    device, made = init_megatron(), []

    def quantize(model: torch.nn.Module) -> None:
        freeze(model)
        layer = model.module.decoder.layers[0].mlp.linear_fc1
        found = emulated_parameter(layer.weight.detach(), "mxfp8").requires_grad_(False)
        found.__class__ = MXFP8Tensor
        layer._parameters["weight"] = found
        made.append(found)

    trainer = build_trainer(
        CASE.but(hidden=64, ffn=64), "optim", device, quantize,
        module_placements={"decoder.layers.0": "leave"},
    )
    [weight], MXFP8Tensor.copies = made, 0
    planes = [getattr(weight, name) for name in PLANES.values()]
    before = [plane.clone() for plane in planes]
    release_memory(trainer.wrapper, trainer.optimizer)
    assert not any(map(storage_bytes, planes))
    return_memory(trainer.wrapper, trainer.optimizer)
    for plane, value in zip(planes, before, strict=True):
        assert torch.equal(plane.view(torch.uint8), value.view(torch.uint8))
    dict(export_weights(trainer.wrapper, which="trained"))
    assert MXFP8Tensor.copies == 0
    exported = dict(export_weights(trainer.wrapper, dtype=None))
    assert MXFP8Tensor.copies == 1
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(exported[name], weight.dequantize())


class MXFP8Tensor(emulated.MXFP8Tensor):
    """Counts."""

    copies = 0

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        MXFP8Tensor.copies += 1
        return super().dequantize(dtype)


def test_quantized_weights_that_are_left_alone_go_without_a_copy_of_their_values() -> None:
    run_ranks(_quantized, 1)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_goes_on_bit_for_bit_in_variants(strategy: str, world: int) -> None:
    run_ranks(_trains_on, world, strategy, tuple(VARIANTS), timeout=600)
