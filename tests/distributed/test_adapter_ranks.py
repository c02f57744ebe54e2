"""What Megatron and a user read from the wrapper where it takes two ranks: slices, empty shards,
groups, weights that differ. One rank: tests/adapter/test_adapter_contract.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import clip_grads
from torch.distributed.tensor import DTensor

from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    full_all,
    init_megatron,
    train_step,
)
from tests.distributed.shared_ranks import on_ranks

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2)


def _weights(trainer: Trainer) -> dict[str, Any]:
    trainer.wrapper.stop_communication()
    return dict(trainer.wrapper.module.module.named_parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_and_state_are_of_this_rank_s_rows(rank: int, strategy: str) -> None:
    """Zero-size locals included, with slice(0, 0): every rank emits the same keys (trap C3), none
    of global shape."""
    device = init_megatron()
    trainer = build_trainer(CASE, strategy, device)
    forward_backward(trainer, batches(CASE, 0, rank, device))
    params = _weights(trainer)
    for name, param in params.items():
        assert isinstance(param.grad, DTensor), name
        assert param.grad._local_tensor.shape == param._local_tensor.shape
        assert param.grad.shape == param.shape and param.grad.dtype == param.dtype
        assert param._local_tensor.numel() or param.megatron_fsdp_slice == slice(0, 0)
    pointers = {name: param.grad._local_tensor.data_ptr() for name, param in params.items()}
    before = full_all({name: param.grad for name, param in params.items()})
    trainer.wrapper.scale_gradients(torch.tensor(0.5))
    after = full_all({name: param.grad for name, param in params.items()})
    for name, param in params.items():
        assert torch.equal(after[name], before[name] * 0.5), name
        assert param.grad._local_tensor.data_ptr() == pointers[name]
        param.grad._local_tensor.add_(1.0)  # as the embedding all-reduce does, in place
    trainer.wrapper.scale_gradients(0.0)
    assert trainer.optimizer.step()[1] == 0.0, "the norm of what the optimizer reads"
    inner = distributed_optimizer(trainer).optimizer
    assert set(inner.state) == set(params.values())
    for param in params.values():
        for moment in ("exp_avg", "exp_avg_sq"):
            value = inner.state[param][moment]
            assert isinstance(value, DTensor) and value.shape == param.shape
            assert value._local_tensor.shape == param._local_tensor.shape  # trap M11


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_each_element_counts_once_in_the_norm_and_among_zeros(rank: int, strategy: str) -> None:
    """Each element counts once. Traps G4, H7: replicated gradients were added up over the ranks.
    M4: zeros were counted in gradients that the step does not read. Tokens that do not occur have
    zero gradients."""
    device, case = init_megatron(), CASE.but(microbatches=1)
    trainer = build_trainer(case, strategy, device)
    forward_backward(trainer, batches(case, 0, rank, device))
    grads = full_all({name: param.grad for name, param in _weights(trainer).items()})
    exact = torch.stack([grad.double().norm() for grad in grads.values()]).norm().item()
    zeros = sum(int((grad == 0).sum()) for grad in grads.values())
    assert trainer.optimizer.count_zeros() == zeros > 0
    distributed_optimizer(trainer).config.log_num_zeros_in_grad = True
    _, norm, counted = trainer.optimizer.step()
    assert counted == zeros
    assert abs(norm - exact) < 1e-6 * exact, (norm, exact)


def _strict(original: Any) -> Any:
    def applier(op: Any, buffer: Any, lists: list[list[torch.Tensor]], *args: Any) -> Any:
        for tensors in lists:
            assert all(tensor.numel() > 0 for tensor in tensors), "an empty tensor in a list"
        return original(op, buffer, lists, *args)

    return applier


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@on_ranks(2)
def test_empty_shards_never_reach_a_multi_tensor_kernel(rank: int, strategy: str) -> None:
    """Parameters of which a rank holds nothing never reach a multi-tensor kernel (trap M12): TE's
    drop a list of tensors that ends in an empty one. The stand-ins of core, which are there without
    TE, are made to behave like it."""
    device = init_megatron()
    case = Case(num_layers=1, hidden=6, heads=1, ffn=10, vocab=11, clip=0.01)
    reference = build_trainer(case, None, device)
    expected = [train_step(reference, batches(case, n, rank, device))[1] for n in range(2)]
    strict = _strict(clip_grads.multi_tensor_applier)
    trainer = build_trainer(case, strategy, device)
    with mock.patch.object(clip_grads, "multi_tensor_applier", strict):
        norms = [train_step(trainer, batches(case, n, rank, device))[1] for n in range(2)]
    assert norms == pytest.approx(expected, rel=1e-6)
    assert any(p._local_tensor.numel() == 0 for p in _weights(trainer).values())
